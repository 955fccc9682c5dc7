"""A base product and its LoRA delta, added to the residual.

`lora_arguments` says what the LoRA arguments are, `lora_expand` how a delta is added.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import (
    FEW_ROWS,
    LORA_TABLES,
    lora_of,
    row_blocks,
    row_columns,
    row_tiles,
    tile_blocks,
)
from kernels.lora_expand import (
    find_rows,
    find_slice,
    first_ranks,
    row_delta,
    row_product,
    row_sums,
    tile_delta,
    tile_sums,
)
from kernels.op import define_op
from kernels.partials import check_partials, check_rows, sum_partials, sum_partials_torch


@triton.jit(do_not_specialize_on_alignment=LORA_TABLES)
def _add_expand_kernel(
    x,  # [T, H], or [S, T, H] to be summed over S
    residual,  # [T, H] in place
    shrunk,  # this and the next tensors None without LoRA
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_slot,
    partial_stride,
    x_stride,
    residual_stride,
    PARTIALS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    if shrunk is not None:
        slot = tl.load(row_slot + row)
        address, rank, scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 0, MAX_LORAS)
        first = first_ranks(address, arena, rank, column, mask, VECTOR, BLOCK_R)
    wait_for_inputs(PDL)
    if shrunk is not None:
        s_row = shrunk + row * SHRUNK_STRIDE
        sums = row_sums(s_row, rank, VECTOR, BLOCK_R)
    target = residual + row * residual_stride + column
    value = sum_partials(x + row * x_stride + column, mask, partial_stride, PARTIALS)
    value += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if shrunk is not None:
        delta = row_delta(
            row_product(first, sums),
            address,
            arena,
            rank,
            scaling,
            s_row,
            column,
            mask,
            VECTOR,
            BLOCK_R,
            ONE_BLOCK,
        )
        value = tl.where(rank > 0, value + delta, value)
    tl.store(target, value.to(residual.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens", "max_segments"],
    do_not_specialize_on_alignment=LORA_TABLES,
)
def _add_expand_tile_kernel(
    x,  # [T, H], or [S, T, H] to be summed over S
    residual,  # [T, H] in place
    shrunk,
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_order,
    seg_indptr,
    weight_indices,
    num_segments,
    partial_stride,
    x_stride,
    residual_stride,
    num_tokens,
    max_segments,
    PARTIALS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    slot, rows, live, any_live = find_rows(
        row_order,
        seg_indptr,
        weight_indices,
        num_segments,
        num_tokens,
        max_segments,
        tl.program_id(1),
        BLOCK_M,
        BLOCK_SEGMENTS,
    )
    address, rank, scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 0, MAX_LORAS)
    first = first_ranks(address, arena, rank, column, inside, VECTOR, BLOCK_R)
    wait_for_inputs(PDL)
    if not any_live:
        return
    s_rows = shrunk + rows * SHRUNK_STRIDE
    first_s = tile_sums(s_rows, live, rank, VECTOR, BLOCK_R)
    mask = live[:, None] & inside[None, :]
    source = x + rows[:, None] * x_stride + column[None, :]
    target = residual + rows[:, None] * residual_stride + column[None, :]
    value = sum_partials(source, mask, partial_stride, PARTIALS)  # [BLOCK_M, BLOCK_N]
    value += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    delta = tile_delta(
        first,
        first_s,
        address,
        arena,
        rank,
        scaling,
        s_rows,
        live,
        column,
        inside,
        VECTOR,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
    )
    value = tl.where(rank > 0, value + delta, value)
    tl.store(target, value.to(residual.dtype.element_ty), mask=mask)


def add_expand_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    shrunk: torch.Tensor | None,
    arena: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    row_slot: torch.Tensor | None,
    row_order: torch.Tensor | None,
    seg_indptr: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    num_segments: torch.Tensor | None,
    max_rank: int,
) -> None:
    """`residual += x + delta`, all in float32 and rounded once.

    residual: [T, H] (written). x: [T, H] of residual's dtype, or partials of such a matrix,
    float32 [S, T, H], added up in their order first, as `add_rms_norm` does: rows without a delta
    get the same bits from both. Rows contiguous, any row stride. From shrunk to max_rank LoRA of
    one slice. Moves x, 2·T·H elements, and H·rank of B for each row up to FEW_ROWS rows, for each
    tile of rows of one slot above. Raises AssertionError on other shapes, dtypes or strides.
    """
    check_rows(residual)
    check_partials(x, residual)
    num_tokens, hidden = residual.shape
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    lora = lora_of(num_tokens, 1, shrunk, arena, b_ptrs, lora_ranks, scalings, *rows, max_rank)
    partials, partial_stride = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    if lora is not None and num_tokens > FEW_ROWS:
        blocks = tile_blocks(lora)
        column_tiles = triton.cdiv(hidden, blocks["BLOCK_N"])
        _add_expand_tile_kernel[(column_tiles, row_tiles(lora, blocks["BLOCK_M"]))](
            x,
            residual,
            shrunk,
            arena,
            b_ptrs,
            lora_ranks,
            scalings,
            row_order,
            seg_indptr,
            weight_indices,
            num_segments,
            partial_stride,
            x.stride(-2),
            residual.stride(0),
            PARTIALS=partials,
            HIDDEN=hidden,
            **blocks,
            num_warps=4,
            num_stages=1,
            **dependent_launch(x.device),
        )
        return
    block, num_warps = row_columns(num_tokens)
    _add_expand_kernel[(num_tokens, triton.cdiv(hidden, block))](
        x,
        residual,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        row_slot,
        partial_stride,
        x.stride(-2),
        residual.stride(0),
        PARTIALS=partials,
        HIDDEN=hidden,
        BLOCK=block,
        **row_blocks(lora),
        num_warps=num_warps,
        **dependent_launch(x.device),
    )


def add_expand_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    shrunk: torch.Tensor | None,
    arena: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    row_slot: torch.Tensor | None,
    row_order: torch.Tensor | None,
    seg_indptr: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    num_segments: torch.Tensor | None,
    max_rank: int,
) -> None:
    """Twin of `add_expand_triton`."""
    check_rows(residual)
    check_partials(x, residual)
    num_tokens, hidden = residual.shape
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    lora = lora_of(num_tokens, 1, shrunk, arena, b_ptrs, lora_ranks, scalings, *rows, max_rank)
    value = sum_partials_torch(x) + residual.float()
    residual.copy_(value if lora is None else value + lora.delta([hidden]))


add_expand = define_op(add_expand_triton, add_expand_torch, mutates=("residual",))
