"""The LoRA delta (x A^T) B^T inside a kernel that reads a base product: nothing of it in memory.

Two ways, by kernel and shapes alone. Row by row, which few rows always are, a program holds some
columns of one row and reads that row's own B, on the ordinary cores. By tiles, for more rows, it
holds rows of one slot, which read B once, on the tensor cores, and tiles of the rows without
adapter come after those of the slots. A row's result depends on its own inputs, its adapter and
T, never on its neighbours, its slot or its place.

Of its B a program asks for the first ranks before the base product is complete: `first_ranks`
comes before `wait_for_inputs`. After it come `row_sums`, `row_product` and `row_delta`, or
`tile_sums` and `tile_delta`; what else the program reads is best asked for between the two, so
that it waits for memory once. `lora_arguments` says what the arguments are. Knows columns of one
slice, not what is made of a delta.
"""

import triton
import triton.language as tl

from kernels.lora_arguments import FEW_PARTS
from kernels.lora_segments import as_weights, find_pairs

_FEW_PARTS = tl.constexpr(FEW_PARTS)


@triton.jit
def find_slice(b_ptrs, lora_ranks, scalings, slot, stacked, MAX_LORAS: tl.constexpr):
    """(address of B, rank, scaling) of one slice of `slot`; rank 0 for slot -1."""
    return slice_at(b_ptrs, lora_ranks, scalings, stacked * MAX_LORAS + slot, slot >= 0)


@triton.jit
def slice_at(b_ptrs, lora_ranks, scalings, entry, known):
    """The same at `entry` of the tables; rank 0 unless `known`."""
    rank = tl.load(lora_ranks + entry, mask=known, other=0)
    address = tl.load(b_ptrs + entry, mask=known, other=0)
    scaling = tl.load(scalings + entry, mask=known, other=0.0)
    return address, rank, scaling


@triton.jit
def whole_ranks(rank, VECTOR: tl.constexpr):
    """A rank, or each of a block of them, where rows of B start on 16 bytes, else 0: a multiple of
    VECTOR to the compiler."""
    whole = rank // VECTOR * VECTOR
    return whole * (whole == rank).to(tl.int32)


@triton.jit
def _whole_block(address, arena, whole, n, r, inside):
    """B[n, r] in its dtype [N, R] where `whole` is B's rank; zeros beyond it and off `inside`."""
    mask = inside[:, None] & (r < whole)[None, :]
    return tl.load(as_weights(address, arena) + n[:, None] * whole + r[None, :], mask, other=0.0)


@triton.jit
def _odd_block(address, arena, rank, n, r, inside):
    """The same where rows of B start anywhere."""
    mask = inside[:, None] & (r < rank)[None, :]
    return tl.load(as_weights(address, arena) + n[:, None] * rank + r[None, :], mask, other=0.0)


@triton.jit
def rank_block(address, arena, rank, n, r, inside, VECTOR: tl.constexpr):
    """The same whatever the rank: whether rows start on 16 bytes is data, and said in a way that
    the compiler can use where it holds."""
    if rank % VECTOR == 0:
        block = _whole_block(address, arena, rank // VECTOR * VECTOR, n, r, inside)
    else:
        block = _odd_block(address, arena, rank, n, r, inside)
    return block


@triton.jit
def first_ranks(
    address,
    arena,
    rank,
    n,
    inside,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SKIP: tl.constexpr = 0,
):
    """B[n, SKIP : SKIP + BLOCK_R] in its dtype [N, BLOCK_R], to be read before the inputs are
    complete.

    Zeros where rows of B do not start on 16 bytes: `row_delta` and `tile_delta` read such a B
    from its first rank.
    """
    whole = whole_ranks(rank, VECTOR)
    return _whole_block(address, arena, whole, n, SKIP + tl.arange(0, BLOCK_R), inside)


@triton.jit
def row_sums(
    source,
    rank,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SKIP: tl.constexpr = 0,
    PARTS: tl.constexpr = 1,
    PART_STRIDE: tl.constexpr = 0,
):
    """The row's x A^T [BLOCK_R] for `first_ranks`; `source` is its and the slice's in `shrunk`."""
    r = SKIP + tl.arange(0, BLOCK_R)
    return sums_at(source, r, whole_ranks(rank, VECTOR), PARTS, PART_STRIDE)


@triton.jit
def sums_at(source, r, rank, PARTS: tl.constexpr, PART_STRIDE: tl.constexpr):
    """x A^T [R] at ranks `r`, 0 from `rank` on: the sum of PARTS, a power of two. All of them are
    asked for before one is added, for what they cost is the wait; up to FEW_PARTS one by one."""
    if PARTS <= _FEW_PARTS:
        sums = tl.load(source + r, mask=r < rank, other=0.0)
        for part in tl.static_range(1, PARTS):
            sums += tl.load(source + part * PART_STRIDE + r, mask=r < rank, other=0.0)
    else:
        part = tl.arange(0, PARTS) * PART_STRIDE
        parts = tl.load(source + part[:, None] + r[None, :], (r < rank)[None, :], other=0.0)
        sums = tl.sum(parts, axis=0)
    return sums


@triton.jit
def row_product(block, sums):
    """[N] float32 from [N, R] of B and [R] of x A^T."""
    return tl.sum(block.to(tl.float32) * sums[None, :], axis=1)


@triton.jit
def row_delta(
    total,  # [N] float32: `row_product` of the first ranks
    address,
    arena,
    rank,
    scaling,
    source,
    n,
    inside,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,  # ranks that `total` holds
    ONE_BLOCK: tl.constexpr,  # no rank is above that
    PARTS: tl.constexpr = 1,
    PART_STRIDE: tl.constexpr = 0,
):
    """[N] float32: columns `n` of one slice of one row's delta."""
    whole = whole_ranks(rank, VECTOR)
    if not ONE_BLOCK:
        for first_rank in range(BLOCK_R, whole, BLOCK_R):
            r = first_rank + tl.arange(0, BLOCK_R)
            block = _whole_block(address, arena, whole, n, r, inside)
            s = sums_at(source, r, whole, PARTS, PART_STRIDE)
            total += row_product(block, s)
    for odd_rank in range(tl.where(whole > 0, 0, rank)):  # one by one, from the same lines
        weights = tl.load(as_weights(address, arena) + n * rank + odd_rank, inside, other=0.0)
        r = odd_rank + tl.arange(0, 1)
        total += weights.to(tl.float32) * sums_at(source, r, rank, PARTS, PART_STRIDE)
    return scaling * total


@triton.jit
def find_rows(
    row_order,
    seg_indptr,
    weight_indices,
    num_segments,
    num_tokens,
    max_segments,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
):
    """(slot, rows [BLOCK_M], which of them there are, whether any is) of a tile; slot -1 where
    there is no delta.

    The rows without adapter are one more segment, which starts where the pairs end.
    """
    slot, first, end = find_pairs(
        seg_indptr, weight_indices, num_segments, max_segments, tile, BLOCK_M, BLOCK_SEGMENTS, False
    )
    total = tl.load(seg_indptr + max_segments)
    base_tile = tl.load(num_segments) + total // BLOCK_M
    is_base = tile >= base_tile
    first = tl.where(is_base, total + (tile - base_tile) * BLOCK_M, first)
    end = tl.where(is_base, num_tokens, end)
    places = first + tl.arange(0, BLOCK_M)
    rows = tl.load(row_order + places, mask=places < end, other=0).to(tl.int64)
    return tl.where(is_base | (first >= end), -1, slot), rows, places < end, first < end


@triton.jit
def add_expanded(acc, s, block):
    """acc [M, N] += s [M, R] block^T [N, R], with all that float32 `s` holds, or 16 bits of it."""
    block = tl.trans(block)
    if block.dtype == tl.bfloat16:
        # Two bfloat16 parts keep 16 bits of the float32 sum at tensor core speed.
        high = s.to(tl.bfloat16)
        low = (s - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, block, acc)
        acc = tl.dot(high, block, acc)
    else:
        acc = tl.dot(s, block.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def _tile_sums(sources, live, r, rank):
    """[M, R]: the rows' x A^T at ranks `r`; zeros beyond `rank`."""
    mask = live[:, None] & (r < rank)[None, :]
    return tl.load(sources[:, None] + r[None, :], mask, other=0.0)


@triton.jit
def tile_sums(sources, live, rank, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr):
    """The rows' x A^T [M, BLOCK_R] for `first_ranks`; `sources` [M] are theirs in `shrunk`."""
    return _tile_sums(sources, live, tl.arange(0, BLOCK_R), whole_ranks(rank, VECTOR))


@triton.jit
def tile_delta(
    first,  # [N, BLOCK_R] from `first_ranks`
    sums,  # [M, BLOCK_R] from `tile_sums`
    address,
    arena,
    rank,
    scaling,
    sources,
    live,
    n,
    inside,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[M, N] float32: columns `n` of one slice of the deltas of a tile's rows."""
    whole = whole_ranks(rank, VECTOR)
    acc = add_expanded(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), sums, first)
    for first_rank in range(BLOCK_R, whole, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        block = _whole_block(address, arena, whole, n, r, inside)
        acc = add_expanded(acc, _tile_sums(sources, live, r, whole), block)
    for first_rank in range(0, tl.where(whole > 0, 0, rank), BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        block = _odd_block(address, arena, rank, n, r, inside)
        acc = add_expanded(acc, _tile_sums(sources, live, r, rank), block)
    return scaling * acc
