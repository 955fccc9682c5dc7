"""RMS normalisation of rows, alone or after adding a residual.

`y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)`, in float32 throughout and rounded once
to the output's dtype. (Models whose reference rounds the normalised row before the product with
`weight` differ from this by that one rounding, in 16-bit dtypes only.)
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op
from kernels.partials import check_partials, check_rows, sum_partials, sum_partials_torch

_ELEMENTS_PER_THREAD = 8  # one 16-byte load of a 16-bit dtype
_MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x,  # [T, H], or [S, T, H] to be summed over S
    residual,  # [T, H] in place, or None
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + weight_offset  # [H]
    wait_for_inputs(PDL)
    value = sum_partials(x + row * x_stride + column, mask, partial_stride, PARTIALS)  # [H]
    if residual is not None:
        residual_row = residual + row * residual_stride + column
        value += tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual_row, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value) / HIDDEN + eps)
    result = value * inverse_rms * scale
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
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
        num_warps=min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS),
        **dependent_launch(x.device),
    )


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
    _launch(x, None, weight, eps, weight_offset, out)


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
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    """`residual += x`, then `out = rms_norm(residual)` of the sum as rounded to its dtype.

    x, residual, out: [T, H] of one dtype, rows contiguous, any row stride; `residual` and `out`
    are written, `out` may be `x`. Or x is partials of such a matrix, float32 [S, T, H]: then
    `residual` becomes (x[0] + x[1] + ...) + residual, added in float32 in this order. weight: [H]
    of any float dtype. Moves x, 3·T·H elements and the weight. Raises AssertionError on other
    shapes, dtypes or strides.
    """
    _check(weight, residual, out)
    check_partials(x, residual)
    _launch(x, residual, weight, eps, weight_offset, out)


def add_rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    """Twin of `add_rms_norm_triton`."""
    _check(weight, residual, out)
    check_partials(x, residual)
    residual.copy_(sum_partials_torch(x) + residual.float())
    rms_norm_torch(residual, weight, eps, weight_offset, out)


rms_norm = define_op(rms_norm_triton, rms_norm_torch, mutates=("out",))
add_rms_norm = define_op(add_rms_norm_triton, add_rms_norm_torch, mutates=("residual", "out"))
