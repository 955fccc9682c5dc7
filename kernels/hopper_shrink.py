"""A tile of x A^T on Hopper: ranks of several adapter slots, one after the other, by all rows.

As wide as a tile of the base product, so that few programs do: of each row the tile keeps the
ranks of its own slot. What `lora_shrink` computes, to the bit. Where ranks lie, and which are a
row's own, is said here for `hopper_ranks` too, whose programs are the product's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.arrivals import arrives_last
from kernels.dependent_launch import wait_for_inputs
from kernels.hopper_multiply import (
    end_barriers,
    multiply,
    new_barriers,
    product_layout,
    row_layout,
)

ELEMENTS = gl.constexpr(4096)  # of a tile that are stored at once: 32 a thread of four warps


@gluon.jit
def find_ranks(
    index,
    stacked,
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    max_segments,
    MAX_RANK: gl.constexpr,
    MAX_LORAS: gl.constexpr,
):
    """Of places `index`, MAX_RANK to a segment: slot, rank, whether there is such a rank, and the
    address of its slice."""
    segment, rank = index // MAX_RANK, index % MAX_RANK
    inside = segment < max_segments
    slot = gl.load(weight_indices + segment, mask=inside, other=-1)
    first = gl.load(seg_indptr + segment, mask=inside, other=0)
    end = gl.load(seg_indptr + segment + 1, mask=inside, other=0)
    used = first < end
    entry = stacked * MAX_LORAS + slot
    there = rank < gl.load(lora_ranks + entry, mask=used, other=0)
    return slot, rank, there, gl.load(a_ptrs + entry, mask=used, other=0)


@gluon.jit
def sum_of_parts(places, mask, parts, stride, layout: gl.constexpr):
    """`arrivals.sum_in_order`, in Gluon."""
    total = gl.zeros(mask.shape, gl.float32, layout)
    for first in range(0, parts, 4):
        part0 = load_part(places, mask, first, parts, stride)
        part1 = load_part(places, mask, first + 1, parts, stride)
        part2 = load_part(places, mask, first + 2, parts, stride)
        part3 = load_part(places, mask, first + 3, parts, stride)
        total = total + part0 + part1 + part2 + part3
    return total


@gluon.jit
def load_part(places, mask, part, parts, stride):
    there = mask & (part < parts)
    return gl.load(places + part * stride, mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def own_rows(first, slot, there, row_slot, num_tokens, ROWS: gl.constexpr, layout: gl.constexpr):
    """ROWS rows from `first` on, and which of the ranks are `there` and of a row's slot."""
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    of_row = gl.load(row_slot + m, mask=m < num_tokens, other=-1)
    return m, there[:, None] & (slot[:, None] == of_row[None, :])


@gluon.jit
def fetch_ranks(a_rows, there, bytes_a_row):
    """Start to bring `bytes_a_row` bytes, a multiple of 16, from each of the addresses `a_rows`
    that is `there` into the cache that the multiprocessors share."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    addresses = gl.convert_layout(a_rows.to(gl.int64), layout)
    lengths = gl.convert_layout(gl.where(there, bytes_a_row, 0), layout)
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.gt.s32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [addresses, lengths],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_own_ranks(
    ranks,
    stacked,
    slot,
    rank,
    there,
    row_slot,
    part,
    num_tokens,
    BLOCK_M: gl.constexpr,
    SHRUNK_STRIDE: gl.constexpr,
    MAX_RANK: gl.constexpr,
):
    """`ranks` [RANKS, BLOCK_M] of A xᵀ to the `part` [T, …] of x A^T: of each row those of its own
    slot."""
    layout: gl.constexpr = product_layout(BLOCK_M, gl.num_warps())
    m, own = own_rows(0, slot, there, row_slot, num_tokens, BLOCK_M, layout)
    places = part + (stacked * MAX_RANK + rank)[:, None] + m[None, :] * SHRUNK_STRIDE
    gl.store(places, ranks, mask=own)


@gluon.jit
def keep_own_ranks(
    acc,
    stacked,
    slot,
    rank,
    there,
    row_slot,
    shrunk,
    arrivals,
    num_tokens,
    shrunk_rows,
    tile,
    split,
    splits,
    layout: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SHRUNK_STRIDE: gl.constexpr,
    MAX_RANK: gl.constexpr,
):
    """Store of the tile `acc` [BLOCK_N, BLOCK_M], one of `splits`, each row's ranks of its own
    slot; the last of the splits to arrive adds them up."""
    MOST: gl.constexpr = ELEMENTS // BLOCK_N
    ROWS: gl.constexpr = BLOCK_M if BLOCK_M < MOST else MOST
    tile_acc = gl.allocate_shared_memory(
        gl.float32, [BLOCK_N, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]), acc
    )
    sums = shrunk + (stacked * MAX_RANK + rank)[:, None]
    stride = shrunk_rows.to(gl.int64) * SHRUNK_STRIDE
    parts = sums + split * stride
    for row in gl.static_range(0, BLOCK_M, ROWS):
        m, own = own_rows(row, slot, there, row_slot, num_tokens, ROWS, layout)
        part = tile_acc.slice(row, ROWS, dim=1).load(layout)
        gl.store(parts + m[None, :] * SHRUNK_STRIDE, part, mask=own)
    if splits > 1:  # noqa: SIM102 - `and` would count the arrival either way
        if arrives_last(arrivals + tile, splits):
            for row in gl.static_range(0, BLOCK_M, ROWS):
                m, own = own_rows(row, slot, there, row_slot, num_tokens, ROWS, layout)
                places = sums + m[None, :] * SHRUNK_STRIDE
                gl.store(places, sum_of_parts(places, own, splits, stride, layout), mask=own)


@gluon.jit
def hopper_shrink_tile(
    x,
    arena,
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    row_slot,
    shrunk,
    arrivals,
    num_tokens,
    max_segments,
    shrunk_rows,
    split_blocks,
    splits,
    program,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SHRUNK_STRIDE: gl.constexpr,
    STACK: gl.constexpr,
    MAX_RANK: gl.constexpr,
    MAX_LORAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """BLOCK_N ranks of x A^T by all rows, over a split of K of `split_blocks` blocks."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    multiplied: gl.constexpr = product_layout(BLOCK_M, NUM_WARPS)
    copied: gl.constexpr = row_layout(BLOCK_K, NUM_WARPS)
    WARPS_N: gl.constexpr = BLOCK_N // 32
    stored: gl.constexpr = gl.BlockedLayout(
        [1, 1], [32, 1], [WARPS_N, NUM_WARPS // WARPS_N], [0, 1]
    )
    tile, split = program // splits, program % splits
    stacked, first = tile % STACK, tile // STACK * BLOCK_N
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, max_segments)
    # Once for the lanes that copy a rank, once for those that store it.
    index = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, copied))
    _slot, rank, there, address = find_ranks(index, stacked, *tables, MAX_RANK, MAX_LORAS)
    out_index = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, stored))
    out_slot, out_rank, out_there, _address = find_ranks(
        out_index, stacked, *tables, MAX_RANK, MAX_LORAS
    )
    if gl.max(there.to(gl.int32), axis=0) != 0:
        a_rows = address.to(gl.pointer_type(arena.dtype.element_ty))
        a_rows = gl.multiple_of(a_rows, 16) + rank * K
        first_k = split * split_blocks * BLOCK_K
        ready = new_barriers(STAGES)
        acc = multiply(
            x,
            None,
            0,
            a_rows,
            there,
            first_k,
            gl.minimum(first_k + split_blocks * BLOCK_K, K),
            gl.zeros([BLOCK_N, BLOCK_M], gl.float32, multiplied),
            ready,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            PDL,
        )
        keep_own_ranks(
            acc,
            stacked,
            out_slot,
            out_rank,
            out_there,
            row_slot,
            shrunk,
            arrivals,
            num_tokens,
            shrunk_rows,
            tile,
            split,
            splits,
            stored,
            BLOCK_M,
            BLOCK_N,
            SHRUNK_STRIDE,
            MAX_RANK,
        )
        end_barriers(ready)
    else:
        wait_for_inputs(PDL)
