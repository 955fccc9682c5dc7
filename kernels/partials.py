"""A base product in float32 partials [S, T, H], as it leaves a kernel that splits the sum.

Whoever reads it adds them up in the same order, so that a row gets the same bits from all.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def sum_partials(source, mask, partial_stride, PARTIALS: tl.constexpr):
    """float32 sum, in their order, of the values that lie `partial_stride` apart from `source`."""
    total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTIALS):
        source += partial_stride
        total += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return total


def sum_partials_torch(x: torch.Tensor) -> torch.Tensor:
    """float32 [T, H] of x [T, H], or of partials [S, T, H] added in their order."""
    if x.dim() == 2:
        return x.float()
    total = x[0]
    for partial in x[1:]:
        total = total + partial
    return total


def splits_of(out: torch.Tensor) -> int:
    """How many partials `out` takes; 1: the product itself."""
    return 1 if out.dim() == 2 else out.shape[0]


def rows_a_split(out: torch.Tensor) -> int:
    """How far apart partials lie, in rows of `out`."""
    return 0 if out.dim() == 2 else out.stride(0) // out.stride(1)


def check_rows(*rows: torch.Tensor) -> None:
    """Rows of one shape and dtype, contiguous."""
    num_tokens, hidden = rows[0].shape
    for tensor in rows:
        assert tensor.shape == (num_tokens, hidden), (
            f"rows are [{num_tokens}, {hidden}], not {tuple(tensor.shape)}"
        )
        assert tensor.dtype == rows[0].dtype, f"rows of {rows[0].dtype} and {tensor.dtype}"
        assert tensor.stride(1) == 1, "rows are contiguous"


def check_partials(x: torch.Tensor, residual: torch.Tensor) -> None:
    """What may be added to `residual` [T, H]: its like, or partials float32 [S, T, H] of such."""
    if x.dim() == 2:
        check_rows(residual, x)
        return
    assert x.shape[1:] == residual.shape, (
        f"partials are [S, {residual.shape[0]}, {residual.shape[1]}], not {tuple(x.shape)}"
    )
    assert x.dtype == torch.float32, f"partials are float32, not {x.dtype}"
    assert x.stride(2) == 1, "rows are contiguous"
