"""The product with a base weight: the one place such products go through.

Knows nothing about LoRA, and about how weights are stored only that they are plain matrices
today; a quantised base changes this file.
"""

import torch

from kernels.op import define_op


def linear_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """`out = x Wᵀ + bias`, by the vendor's library on either device.

    x: [T, K], weight: [N, K], bias: [N] or None, out: [T, N] (written; overlaps none of the
    others), of one dtype, rows contiguous, any row stride. The library accumulates in float32.
    Reads N·K weights, the larger part of what a small batch moves. Raises AssertionError on other
    shapes, dtypes or strides.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert weight.shape[1:] == (in_features,), (
        f"weight is [N, {in_features}], not {tuple(weight.shape)}"
    )
    assert out.shape == (num_tokens, out_features), (
        f"out is [{num_tokens}, {out_features}], not {tuple(out.shape)}"
    )
    assert x.dtype == weight.dtype == out.dtype, f"{x.dtype}, {weight.dtype}, {out.dtype} differ"
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1, "rows are contiguous"
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        assert bias.shape == (out_features,), f"bias is [{out_features}], not {tuple(bias.shape)}"
        assert bias.dtype == x.dtype, f"bias is {x.dtype}, not {bias.dtype}"
        torch.addmm(bias, x, weight.t(), out=out)


linear = define_op(linear_torch, linear_torch, mutates=("out",))
