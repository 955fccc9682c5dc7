"""Segmented GEMM: the LoRA delta of one step's rows, added to the base output in place.

`sgemm_a` shrinks (x A^T), `sgemm_b` expands and adds (y += scaling * shrunk B^T). Each works on
segments, runs of sorted pairs that share an adapter slot (see `lora_metadata`), and finds the
weights through tables of device addresses. Knows no model and no adapter, only slots.

    x [T, K], y [T, sum(slice_sizes)]   bfloat16, float16 or float32; the last dim is contiguous
    arena [flat]                        every adapter's weights; its dtype is the weights' dtype
    a_ptrs, b_ptrs int64[stack, max_loras], lora_ranks int32 and scalings float32 likewise
        stack is 1, 2 or 3 slices (one module each) that read the same x. At a slice's address
        lie A [rank, K] or B [N, rank], row-major, of true rank, starting on 16 bytes or more.
        Rank 0 means that the slot has no such module: its address is never read.
    seg_indptr, weight_indices, pair_row, num_segments   from `lora_metadata`, int32; a row has at
        most one pair
    shrunk float32[T, stack * max_rank]   between the two: row t, slice j and rank index r at
        [t, j * max_rank + r]. What lies beyond a slice's true rank, and rows without a pair, are
        not written and never enter a result.

Both read each used A or B once per row tile and nothing of the others, so cost follows the true
ranks. A row's result depends on its own x, y and adapter and on the shapes, never on its
neighbours, its slot or its segment. Partials are summed in their order, whoever arrives last.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import (
    TABLES,
    as_weights,
    block_m_for,
    check_segments,
    find_pairs,
    tile_count,
    walk_segments,
    weight_view,
)
from kernels.lora_shrink import check_splits, shrink_arguments, shrink_tile
from kernels.op import define_op


@triton.jit(
    do_not_specialize=["max_segments", "shrunk_rows", "blocks_per_split", "splits"],
    do_not_specialize_on_alignment=TABLES,
)
def _sgemm_a_kernel(
    x,
    arena,
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    pair_row,
    num_segments,
    shrunk,
    arrivals,
    max_segments,
    shrunk_rows,
    blocks_per_split,
    splits,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    shrink_tile(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        seg_indptr,
        weight_indices,
        pair_row,
        num_segments,
        shrunk,
        arrivals,
        max_segments,
        shrunk_rows,
        blocks_per_split,
        splits,
        tl.program_id(0),
        tl.num_programs(0),
        tl.program_id(1),
        tl.program_id(2),
        K,
        X_STRIDE,
        SHRUNK_STRIDE,
        MAX_RANK,
        MAX_LORAS,
        BLOCK_SEGMENTS,
        ONE_TILE,
        BLOCK_P,
        BLOCK_R,
        BLOCK_A,
        PDL,
    )


@triton.jit(do_not_specialize=["max_segments"], do_not_specialize_on_alignment=TABLES)
def _sgemm_b_kernel(
    shrunk,
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    seg_indptr,
    weight_indices,
    pair_row,
    num_segments,
    y,
    max_segments,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    tiles1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    tile_n = tl.program_id(0)
    second, third = tile_n >= tiles0, tile_n >= tiles0 + tiles1
    stacked = second.to(tl.int32) + third.to(tl.int32)
    width = tl.where(third, N2, tl.where(second, N1, N0))
    column = tl.where(third, N0 + N1, tl.where(second, N0, 0))
    tile_n -= tl.where(third, tiles0 + tiles1, tl.where(second, tiles0, 0))
    tile = tl.program_id(1)
    slot, first, end = find_pairs(
        seg_indptr,
        weight_indices,
        num_segments,
        max_segments,
        tile,
        BLOCK_M,
        BLOCK_SEGMENTS,
        ONE_TILE,
    )
    if first >= end:
        return
    entry = stacked * MAX_LORAS + slot
    pairs = first + tl.arange(0, BLOCK_M)
    # All of the tables in one wait, not one wait each.
    rank = tl.load(lora_ranks + entry)
    address = tl.load(b_ptrs + entry)
    scaling = tl.load(scalings + entry)
    rows = tl.load(pair_row + pairs, mask=pairs < end, other=0).to(tl.int64)
    if rank == 0:
        return
    b = as_weights(address, arena)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y_mask = (pairs < end)[:, None] & (n < width)[None, :]
    y_places = y + rows[:, None] * Y_STRIDE + (column + n)[None, :]
    base = tl.load(y_places, mask=y_mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        # Rows of B start on 16 bytes only at ranks that are multiples of VECTOR, which is data:
        # said in a way that the compiler can use where it holds.
        if rank % VECTOR == 0:
            stride = rank // VECTOR * VECTOR
            b_mask = (n < width)[:, None] & (r < stride)[None, :]
            b_block = tl.load(b + n[:, None] * stride + r[None, :], mask=b_mask, other=0.0)
        else:
            b_mask = (n < width)[:, None] & (r < rank)[None, :]
            b_block = tl.load(b + n[:, None] * rank + r[None, :], mask=b_mask, other=0.0)
        b_block = tl.trans(b_block)  # [BLOCK_R, BLOCK_N]
        places = rows[:, None] * SHRUNK_STRIDE + (stacked * MAX_RANK + r)[None, :]
        # Whole vectors of 4 are read, what lies beyond the rank in the last is dropped below.
        read = (r < (rank + 3) // 4 * 4) & (r < MAX_RANK)
        s_mask = (pairs < end)[:, None] & read[None, :]
        s = tl.load(shrunk + places, mask=s_mask, other=0.0)  # [BLOCK_M, BLOCK_R]
        s = tl.where((r < rank)[None, :], s, 0.0)
        if b_block.dtype == tl.bfloat16:
            # Two bfloat16 parts keep 16 bits of the float32 sum at tensor core speed.
            high = s.to(tl.bfloat16)
            low = (s - high.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(low, b_block, acc)
            acc = tl.dot(high, b_block, acc)
        else:
            acc = tl.dot(s, b_block.to(tl.float32), acc, input_precision="ieee")
    tl.store(y_places, (base + scaling * acc).to(y.dtype.element_ty), mask=y_mask)


def sgemm_a_triton(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    max_rank: int,
    out: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Shrink: out[0, row, j * max_rank + r] = x[row] . A_j[r].

    Written in place where a row has a pair: `out` float32[split_k, T, stack * max_rank], in the
    first of it the module's `shrunk`; with split_k > 1 program i takes the i-th of split_k equal
    ranges of K, leaves a partial sum in out[i] and counts itself in `arrivals`, int32 of
    `shrink_arrivals` elements at least, which must hold zeros and does so again afterwards; the
    last to arrive, whichever it is, adds the partials up in their order. Products in x's dtype
    where A has the same, else in float32; all sums in float32. Tables and segments must be two
    launches old (`dependent_launch`).
    """
    check_segments(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        seg_indptr,
        weight_indices,
        pair_row,
        num_segments,
        max_rank,
        out,
    )
    stack, max_loras = a_ptrs.shape
    check_splits(out, arrivals, stack, max_loras, max_rank)
    arguments = shrink_arguments(x, arena, max_loras, max_rank, out)
    places = stack * triton.cdiv(max_rank, arguments["BLOCK_R"])
    _sgemm_a_kernel[(places, out.shape[0], tile_count(x.shape[0], max_loras))](
        x,
        arena,
        a_ptrs,
        lora_ranks,
        seg_indptr,
        weight_indices,
        pair_row,
        num_segments,
        out,
        arrivals,
        K=x.shape[1],
        X_STRIDE=x.stride(0),
        **arguments,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x.device),
    )


def sgemm_b_triton(
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    max_rank: int,
    slice_sizes: list[int],
    y: torch.Tensor,
) -> None:
    """Expand: y[row, slice j] += scaling_j * shrunk[row, j] B_j^T.

    Writes `y` in place at row = pair_row[p] of each pair, slice j being slice_sizes[j] columns;
    other rows, and slices of rank 0, keep their bits. Everything in float32 and rounded once to
    y's dtype. Where B is bfloat16 the float32 sum enters the product as two bfloat16 parts, which
    together keep 16 bits of it; otherwise B is widened to float32 and nothing is lost.
    """
    check_segments(
        y,
        arena,
        b_ptrs,
        lora_ranks,
        seg_indptr,
        weight_indices,
        pair_row,
        num_segments,
        max_rank,
        shrunk,
    )
    assert shrunk.dim() == 2, f"shrunk has {shrunk.dim()} dims, not 2: rows, ranks"
    num_tokens, max_loras = y.shape[0], b_ptrs.shape[1]
    assert scalings.dtype == torch.float32, f"scalings is {scalings.dtype}, not float32"
    assert scalings.shape == b_ptrs.shape, (
        f"scalings has shape {tuple(scalings.shape)}, not {tuple(b_ptrs.shape)}"
    )
    assert scalings.is_contiguous(), "scalings is not contiguous"
    assert len(slice_sizes) == b_ptrs.shape[0], (
        f"{len(slice_sizes)} slices, but the tables have {b_ptrs.shape[0]}"
    )
    assert y.shape[1] == sum(slice_sizes), (
        f"slices {slice_sizes} do not cover y's {y.shape[1]} columns"
    )
    exact = arena.dtype != torch.bfloat16
    block_m = block_m_for(num_tokens)
    block_n = 64 if exact or (block_m == 16 and y.shape[1] <= 8192) else 128
    block_r = min(16 if exact else 64, max(16, triton.next_power_of_2(max_rank)))
    tiles = tile_count(num_tokens, max_loras)
    widths = list(slice_sizes) + [0] * (3 - len(slice_sizes))
    _sgemm_b_kernel[(sum(triton.cdiv(width, block_n) for width in slice_sizes), tiles)](
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        seg_indptr,
        weight_indices,
        pair_row,
        num_segments,
        y,
        min(num_tokens, max_loras),
        N0=widths[0],
        N1=widths[1],
        N2=widths[2],
        Y_STRIDE=y.stride(0),
        SHRUNK_STRIDE=shrunk.stride(0),
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        BLOCK_SEGMENTS=triton.next_power_of_2(max_loras),
        ONE_TILE=num_tokens <= block_m,
        VECTOR=16 // arena.element_size(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=8 if block_m == 64 else 4,
        num_stages=1,
        **dependent_launch(y.device),
    )


def sgemm_a_torch(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    max_rank: int,
    out: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Torch twin of `sgemm_a_triton`; leaves all but out[0] alone.

    Every product takes all T rows and keeps the segment's: a library product's bits may depend on
    its number of rows, which must not be how many neighbours share an adapter.
    """
    wide = x.float()  # [T, K]
    tables = (lora_ranks, seg_indptr, weight_indices, pair_row.long(), num_segments)
    for _, rows, _, stacked, address, rank in walk_segments(a_ptrs, *tables):
        a = weight_view(arena, address, rank, x.shape[1])  # [rank, K]
        target = out[0, :, stacked * max_rank : stacked * max_rank + rank]
        target.index_copy_(0, rows, (wide @ a.T).index_select(0, rows))


def sgemm_b_torch(
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    max_rank: int,
    slice_sizes: list[int],
    y: torch.Tensor,
) -> None:
    """Torch twin of `sgemm_b_triton`; as in `sgemm_a_torch`, products take all T rows."""
    delta = torch.full(y.shape, -0.0, dtype=torch.float32, device=y.device)  # -0.0 keeps y's bits
    tables = (lora_ranks, seg_indptr, weight_indices, pair_row.long(), num_segments)
    for _, rows, slot, stacked, address, rank in walk_segments(b_ptrs, *tables):
        b = weight_view(arena, address, slice_sizes[stacked], rank)  # [N, rank]
        product = shrunk[:, stacked * max_rank : stacked * max_rank + rank] @ b.T  # [T, N]
        product = scalings[stacked, slot] * product.index_select(0, rows)
        delta.split(slice_sizes, dim=1)[stacked].index_copy_(0, rows, product)
    y.copy_(y.float() + delta)


sgemm_a = define_op(sgemm_a_triton, sgemm_a_torch, mutates=("out", "arrivals"))
sgemm_b = define_op(sgemm_b_triton, sgemm_b_torch, mutates=("y",))
