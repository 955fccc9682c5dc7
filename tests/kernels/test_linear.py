"""The base product: against float64, on strided rows, with poisoned outputs."""

import pytest
import torch
from torch.testing import assert_close

from kernels.linear import linear


def _check_against_float64(tokens: int, dtype: torch.dtype, biased: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 100, generator=generator).to(dtype)[:, :96]
    weight = (torch.randn(56, 96, generator=generator) / 96**0.5).to(dtype)
    bias = torch.randn(56, generator=generator).to(dtype) if biased else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    wide = torch.full((tokens, 72), torch.nan, dtype=dtype, device=device)
    on_device = bias if bias is None else bias.to(device)
    linear(x.to(device), weight.to(device), on_device, wide[:, :56])
    # 96 float32 additions, then one rounding to the dtype.
    rtol = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close(wide[:, :56].double().cpu(), expected, rtol=rtol, atol=rtol)
    assert wide[:, 56:].isnan().all()


CASES = [
    (1, torch.float32, False),
    (5, torch.float32, True),
    (1, torch.bfloat16, True),
    (7, torch.bfloat16, False),
    (3, torch.float16, True),
]


@pytest.mark.parametrize(("tokens", "dtype", "biased"), CASES)
def test_matches_float64(tokens, dtype, biased):
    _check_against_float64(tokens, dtype, biased, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "dtype", "biased"), CASES)
def test_matches_float64_on_the_gpu(tokens, dtype, biased):
    _check_against_float64(tokens, dtype, biased, "cuda")


def test_refuses_what_does_not_fit():
    x, weight, out = torch.ones(2, 8), torch.ones(4, 8), torch.empty(2, 4)
    with pytest.raises(AssertionError, match="weight is"):
        linear(x, torch.ones(4, 9), None, out)
    with pytest.raises(AssertionError, match="out is"):
        linear(x, weight, None, torch.empty(2, 5))
    with pytest.raises(AssertionError, match="bias is"):
        linear(x, weight, torch.ones(5), out)
    with pytest.raises(AssertionError, match="differ"):
        linear(x, weight.half(), None, out)
