"""RMS normalisation of rows, alone or after adding a product, and its LoRA delta, to a residual.

`y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)`, in float32 throughout and rounded once
to the output's dtype. (Models whose reference rounds the normalised row before the product with
`weight` differ from this by that one rounding, in 16-bit dtypes only.) `lora_arguments` says what
the LoRA arguments are, `lora_expand` how a delta is added.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import (
    LORA_TABLES,
    Expand,
    lora_of,
    part_blocks,
    row_blocks,
    row_tensors,
)
from kernels.lora_expand import find_slice, first_ranks, row_delta, row_product, row_sums
from kernels.op import define_op
from kernels.partials import check_partials, check_rows, sum_partials, sum_partials_torch

_ELEMENTS_PER_THREAD = 8  # one 16-byte load of a 16-bit dtype
_MAX_WARPS = 16
_COLUMNS_A_WARP = 256  # 16 ranks of so much of a 16-bit B are 64 registers a thread
_MAX_DELTA_ROWS = 64  # behind any product
_MAX_OWN_DELTA_ROWS = 128  # behind one that lets the norm up before its end


@triton.jit(do_not_specialize_on_alignment=LORA_TABLES)
def _rms_norm_kernel(
    x,  # [T, H], or [S, T, H] to be summed over S
    residual,  # [T, H] in place, or None
    shrunk,  # this and the next tensors None without LoRA
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_slot,
    weight,  # [H]
    out,  # [T, H]
    eps,
    weight_offset,
    partial_stride,
    x_stride,
    residual_stride,
    out_stride,
    PARTIALS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,  # of shrunk
    PART_STRIDE: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    if shrunk is not None:
        slot = tl.load(row_slot + row)
        address, rank, scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 0, MAX_LORAS)
        # In halves, one multiplied after the other: all of it in float32 takes too many registers.
        HALF: tl.constexpr = BLOCK_R // 2
        left = first_ranks(address, arena, rank, column, mask, VECTOR, HALF)
        right = first_ranks(address, arena, rank, column, mask, VECTOR, HALF, SKIP=HALF)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + weight_offset  # [H]
    wait_for_inputs(PDL)
    value = sum_partials(x + row * x_stride + column, mask, partial_stride, PARTIALS)  # [H]
    if residual is not None:
        residual_row = residual + row * residual_stride + column
        value += tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
        if shrunk is not None:
            s_row = shrunk + row * SHRUNK_STRIDE
            left_sums = row_sums(s_row, rank, VECTOR, HALF, 0, PARTS, PART_STRIDE)
            right_sums = row_sums(s_row, rank, VECTOR, HALF, HALF, PARTS, PART_STRIDE)
            delta = row_delta(
                row_product(left, left_sums),
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
                PARTS,
                PART_STRIDE,
            )
            delta += scaling * row_product(right, right_sums)
            value = tl.where(rank > 0, value + delta, value)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual_row, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value) / HIDDEN + eps)
    result = value * inverse_rms * scale
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    lora: Expand | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    num_tokens, hidden = out.shape
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        *row_tensors(lora),
        weight,
        out,
        eps,
        weight_offset,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        PARTIALS=x.shape[0] if x.dim() == 3 else 1,
        HIDDEN=hidden,
        BLOCK=block,
        **row_blocks(lora),
        **part_blocks(lora),
        num_warps=min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS),
        **dependent_launch(x.device),
    )


def holds_delta(
    num_tokens: int, hidden: int, max_rank: int, dtype: torch.dtype, is_own: bool
) -> bool:
    """Whether `add_rms_norm` is the quicker way to add deltas, and not `add_expand` before
    `rms_norm`, which spreads a row over many programs.

    It is where the registers of the row's one program hold all of its B, of `dtype`, which it then
    reads while the base product still runs: with many rows that takes a product which `is_own`, not
    the library's. A rank whose rows of B do not start on 16 bytes is read after it, rank by rank.
    """
    block = triton.next_power_of_2(hidden)
    fits = block <= _MAX_WARPS * _COLUMNS_A_WARP and max_rank <= 16 and dtype.itemsize == 2
    return fits and num_tokens <= (_MAX_OWN_DELTA_ROWS if is_own else _MAX_DELTA_ROWS)


def _check(weight: torch.Tensor, *rows: torch.Tensor) -> None:
    hidden = rows[0].shape[1]
    assert weight.shape == (hidden,), f"weight is [{hidden}], not {tuple(weight.shape)}"
    assert weight.is_contiguous(), "weight is contiguous"
    check_rows(*rows)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor
) -> None:
    """`out = x / sqrt(mean(x²) + eps) · (weight + weight_offset)` by rows.

    x, out: [T, H] of one dtype, rows contiguous, any row stride; `out` is written and may be `x`.
    weight: [H] of any float dtype. One program a row; moves 2·T·H elements and the weight.
    Raises AssertionError on other shapes, dtypes or strides. Method: Zhang and Sennrich, "Root
    Mean Square Layer Normalization" (2019); `weight_offset` is 1 for Gemma's zero-centred weights.
    """
    _check(weight, x, out)
    _launch(x, None, None, weight, eps, weight_offset, out)


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor
) -> None:
    """Twin of `rms_norm_triton`."""
    _check(weight, x, out)
    value = x.float()  # [T, H]
    inverse_rms = torch.rsqrt(value.square().mean(dim=1, keepdim=True) + eps)  # [T, 1]
    out.copy_(value * inverse_rms * (weight.float() + weight_offset))


def add_rms_norm_triton(
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
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    """`residual += x + delta`, then `out = rms_norm(residual)` of the sum as rounded to its dtype.

    x, residual, out: [T, H] of one dtype, rows contiguous, any row stride; `residual` and `out`
    are written, `out` may be `x`. Or x is partials of such a matrix, float32 [S, T, H]: then
    `residual` becomes (x[0] + x[1] + ...) + residual, added in float32 in this order. From shrunk
    to max_rank LoRA of one slice; takes shrunk in parts. weight: [H] of any float dtype. Moves x,
    3·T·H elements, the weight, and H·rank of B for each row with an adapter, all by the row's one
    program: see `holds_delta`. Raises AssertionError on other shapes, dtypes or strides.
    """
    _check(weight, residual, out)
    check_partials(x, residual)
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    tokens = residual.shape[0]
    tables = (b_ptrs, lora_ranks, scalings)
    lora = lora_of(tokens, 1, shrunk, arena, *tables, *rows, max_rank, takes_parts=True)
    _launch(x, residual, lora, weight, eps, weight_offset, out)


def add_rms_norm_torch(
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
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    """Twin of `add_rms_norm_triton`."""
    _check(weight, residual, out)
    check_partials(x, residual)
    tokens, hidden = residual.shape
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    tables = (b_ptrs, lora_ranks, scalings)
    lora = lora_of(tokens, 1, shrunk, arena, *tables, *rows, max_rank, takes_parts=True)
    value = sum_partials_torch(x) + residual.float()
    residual.copy_(value if lora is None else value + lora.delta([hidden]))
    rms_norm_torch(residual, weight, eps, weight_offset, out)


rms_norm = define_op(rms_norm_triton, rms_norm_torch, mutates=("out",))
add_rms_norm = define_op(add_rms_norm_triton, add_rms_norm_torch, mutates=("residual", "out"))
