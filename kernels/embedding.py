"""Looking up the rows of an embedding table, scaled."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op

_BLOCK = 1024  # columns a program
_NUM_WARPS = 4


@triton.jit
def _embed_kernel(
    token_ids,  # [T] int32
    weight,  # [V, H]
    out,  # [T, H]
    scale,
    weight_stride,
    out_stride,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    token = tl.minimum(tl.maximum(tl.load(token_ids + row), 0), VOCAB - 1).to(tl.int64)
    value = tl.load(weight + token * weight_stride + column, mask=mask, other=0.0).to(tl.float32)
    result = (value * scale).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, result, mask=mask)


def _check(token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    num_tokens, hidden = out.shape
    assert token_ids.shape == (num_tokens,), f"[{num_tokens}] ids, not {tuple(token_ids.shape)}"
    assert token_ids.dtype == torch.int32, f"token_ids is int32, not {token_ids.dtype}"
    assert token_ids.is_contiguous(), "token_ids is contiguous"
    assert weight.shape[1:] == (hidden,), f"weight is [V, {hidden}], not {tuple(weight.shape)}"
    assert weight.dtype == out.dtype, f"{weight.dtype} and {out.dtype} differ"
    assert weight.stride(1) == out.stride(1) == 1, "rows are contiguous"


def embed_triton(
    token_ids: torch.Tensor, weight: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """`out[t] = scale · weight[token_ids[t]]`, the ids clamped into [0, V).

    token_ids: [T] int32. weight: [V, H], out: [T, H] (written), of one dtype, rows contiguous,
    any row stride. The product is taken in float32 and rounded once, so a `scale` that the dtype
    holds exactly gives the bits of a product in that dtype; 1.0 copies. Moves 2·T·H elements.
    Raises AssertionError on other shapes, dtypes or strides.
    """
    _check(token_ids, weight, out)
    num_tokens, hidden = out.shape
    _embed_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
        token_ids,
        weight,
        out,
        scale,
        weight.stride(0),
        out.stride(0),
        VOCAB=weight.shape[0],
        HIDDEN=hidden,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **dependent_launch(out.device),
    )


def embed_torch(
    token_ids: torch.Tensor, weight: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Twin of `embed_triton`."""
    _check(token_ids, weight, out)
    rows = weight.index_select(0, token_ids.clamp(0, weight.shape[0] - 1))  # [T, H]
    out.copy_(rows if scale == 1.0 else rows.float() * scale)


embed = define_op(embed_triton, embed_torch, mutates=("out",))
