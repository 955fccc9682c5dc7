"""RMS norm: kernel against twin, twin against the formulas of Hugging Face models."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.lora_arguments import NO_LORA
from kernels.norm import (
    add_rms_norm,
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
)
from tests.kernels.cross_compile import compile_launches

EPS = 1e-5
CASES = [
    (1, 576, torch.float32, 0.0),
    (5, 192, torch.bfloat16, 1.0),
    (3, 344, torch.float16, 0.0),
    (2, 4096, torch.bfloat16, 0.0),
    (2, 16384, torch.float32, 1.0),
    (3, 1, torch.float32, 0.0),
]


def _rows(tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of a wider matrix: their stride exceeds their width, what lies between is NaN."""
    wide = torch.full((tokens, hidden + 24), torch.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    wide[:, :hidden] = torch.randn(tokens, hidden, generator=generator) * 3
    return wide[:, :hidden]


def _on(device: torch.device, rows: torch.Tensor) -> torch.Tensor:
    """A copy on `device` with the same row stride and the same NaNs between rows."""
    tokens, hidden = rows.shape
    wide = torch.full((tokens, hidden + 24), torch.nan, dtype=rows.dtype, device=device)
    wide[:, :hidden] = rows
    return wide[:, :hidden]


def _assert_rounded_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 sums in another order, then one rounding: at most one unit in the last place."""
    rtol = 4e-6 if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
    assert_close(actual.cpu(), expected, rtol=rtol, atol=1e-6)


def _assert_only_rows_written(rows: torch.Tensor) -> None:
    tokens, hidden = rows.shape
    between = rows.as_strided((tokens, 24), rows.stride(), rows.storage_offset() + hidden)
    assert between.isnan().all()


@pytest.mark.kernel
@pytest.mark.parametrize(("tokens", "hidden", "dtype", "offset"), CASES)
def test_rms_norm_matches_twin(kernel_device, tokens, hidden, dtype, offset):
    x = _rows(tokens, hidden, dtype, seed=0)
    weight = _rows(1, hidden, dtype, seed=1)[0].contiguous()
    expected = torch.full_like(x, torch.nan)
    rms_norm_torch(x, weight, EPS, offset, expected)
    out = _on(kernel_device, torch.full_like(x, torch.nan))
    given = _on(kernel_device, x)
    rms_norm_triton(given, weight.to(kernel_device), EPS, offset, out)
    _assert_rounded_alike(out, expected)
    _assert_only_rows_written(out)
    assert torch.equal(given.cpu(), x)
    rms_norm_triton(given, weight.to(kernel_device), EPS, offset, given)
    assert torch.equal(given, out), "in place differs"


@pytest.mark.kernel
@pytest.mark.parametrize(("tokens", "hidden", "dtype", "offset"), CASES)
def test_add_rms_norm_matches_twin(kernel_device, tokens, hidden, dtype, offset):
    x = _rows(tokens, hidden, dtype, seed=0)
    residual = _rows(tokens, hidden, dtype, seed=2)
    weight = _rows(1, hidden, torch.float32, seed=1)[0].contiguous()
    updated = _on(kernel_device, residual)
    out = _on(kernel_device, torch.full_like(x, torch.nan))
    given = _on(kernel_device, x)
    add_rms_norm_triton(given, updated, *NO_LORA, weight.to(kernel_device), EPS, offset, out)
    expected = torch.full_like(x, torch.nan)
    add_rms_norm_torch(x, residual, *NO_LORA, weight, EPS, offset, expected)
    # One rounded addition has one result; but Triton's interpreter truncates to bfloat16.
    truncated = kernel_device.type == "cpu" and dtype == torch.bfloat16
    rtol = torch.finfo(dtype).eps if truncated else 0
    assert_close(updated.cpu(), residual, rtol=rtol, atol=0)
    if truncated:
        rms_norm_torch(updated, weight, EPS, offset, expected)
    _assert_rounded_alike(out, expected)
    _assert_only_rows_written(out)
    _assert_only_rows_written(updated)
    assert torch.equal(given.cpu(), x)


def _partials(splits: int, tokens: int, hidden: int) -> torch.Tensor:
    """Partials whose strides exceed their extents, NaN between them."""
    wide = torch.full((splits, tokens + 1, hidden + 8), torch.nan)
    generator = torch.Generator().manual_seed(splits)
    wide[:, :tokens, :hidden] = torch.randn(splits, tokens, hidden, generator=generator)
    return wide[:, :tokens, :hidden]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("splits", "tokens", "hidden", "dtype"),
    [(1, 3, 344, torch.float32), (2, 2, 4096, torch.bfloat16), (5, 1, 192, torch.float16)],
)
def test_add_rms_norm_of_partials_matches_twin(kernel_device, splits, tokens, hidden, dtype):
    x, weight = _partials(splits, tokens, hidden), torch.linspace(-1, 2, hidden)
    residual = _rows(tokens, hidden, dtype, seed=2)
    updated = _on(kernel_device, residual)
    out = _on(kernel_device, torch.full_like(residual, torch.nan))
    given = torch.empty_strided(x.shape, x.stride(), device=kernel_device).copy_(x)
    add_rms_norm_triton(given, updated, *NO_LORA, weight.to(kernel_device), EPS, 0.0, out)
    expected = torch.full_like(residual, torch.nan)
    add_rms_norm_torch(x, residual, *NO_LORA, weight, EPS, 0.0, expected)
    # The order of additions is part of the contract; Triton's interpreter truncates to bfloat16.
    truncated = kernel_device.type == "cpu" and dtype == torch.bfloat16
    assert_close(updated.cpu(), residual, rtol=torch.finfo(dtype).eps if truncated else 0, atol=0)
    if truncated:
        rms_norm_torch(updated, weight, EPS, 0.0, expected)
    _assert_rounded_alike(out, expected)
    _assert_only_rows_written(out)
    _assert_only_rows_written(updated)


def test_partials_are_added_in_their_order_and_rounded_once():
    x = torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(3, 1, 1).repeat(1, 1, 8)
    residual, out = torch.full((1, 8), 3.0), torch.empty(1, 8)
    add_rms_norm(x, residual, *NO_LORA, torch.ones(8), EPS, 0.0, out)
    assert torch.equal(residual, torch.full((1, 8), 3.0)), "2 ** 24 + 1 is 2 ** 24"
    x = torch.full((2, 1, 8), 2.0**-9)
    residual, out = torch.ones(1, 8).bfloat16(), torch.empty(1, 8).bfloat16()
    add_rms_norm(x, residual, *NO_LORA, torch.ones(8), EPS, 0.0, out)
    assert torch.equal(residual, torch.ones(1, 8).bfloat16())
    x[1] = 2.0**-8
    add_rms_norm(x, residual, *NO_LORA, torch.ones(8), EPS, 0.0, out)
    assert torch.equal(residual, torch.full((1, 8), 1 + 2.0**-7).bfloat16())


@pytest.mark.kernel
def test_a_row_does_not_depend_on_its_neighbours(kernel_device):
    x = _rows(4, 576, torch.float32, seed=0).to(kernel_device)
    weight = torch.ones(576, device=kernel_device)
    alone = torch.empty(1, 576, device=kernel_device)
    rms_norm_triton(x[2:3], weight, EPS, 0.0, alone)
    x[[0, 1, 3]] = torch.nan
    out = torch.empty(4, 576, device=kernel_device)
    rms_norm_triton(x, weight, EPS, 0.0, out)
    assert torch.equal(out[2:3], alone)


@pytest.mark.parametrize(("module", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
@torch.no_grad()
def test_op_matches_hugging_face(module, offset):
    reference = module(192, eps=EPS)
    reference.weight.copy_(torch.randn(192))
    x, residual = torch.randn(5, 192), torch.randn(5, 192)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, reference.weight, EPS, offset, out)
    assert_close(out, reference(x), rtol=2e-6, atol=1e-6)
    total = x + residual
    add_rms_norm(x, residual, *NO_LORA, reference.weight, EPS, offset, out)
    assert torch.equal(residual, total)
    assert_close(out, reference(total), rtol=2e-6, atol=1e-6)


def test_eps_keeps_a_row_of_zeros_finite():
    out = torch.full((1, 8), torch.nan)
    rms_norm(torch.zeros(1, 8), torch.ones(8), EPS, 0.0, out)
    assert torch.equal(out, torch.zeros(1, 8))


def test_the_norm_sees_the_residual_as_rounded():
    x, residual = torch.full((1, 8), 2.0**-9), torch.ones(1, 8)
    x, residual = x.bfloat16(), residual.bfloat16()
    residual[0, 0] = 3.0
    out = torch.empty_like(x)
    add_rms_norm(x, residual, *NO_LORA, torch.ones(8), EPS, 0.0, out)
    assert torch.equal(residual[0], torch.tensor([3.0] + [1.0] * 7).bfloat16())
    expected = residual.float() / (2.0 + EPS) ** 0.5  # mean(x²) = (9 + 7) / 8
    assert torch.equal(out, expected.bfloat16())


def test_launchers_refuse_what_the_kernel_does_not_read():
    x, weight, out = torch.ones(2, 8), torch.ones(8), torch.empty(2, 8)
    with pytest.raises(AssertionError, match="weight is"):
        rms_norm_triton(x, torch.ones(7), EPS, 0.0, out)
    with pytest.raises(AssertionError, match="rows are contiguous"):
        rms_norm_triton(torch.ones(8, 2).t(), weight, EPS, 0.0, out)
    with pytest.raises(AssertionError, match="rows of"):
        add_rms_norm_triton(x, x.half(), *NO_LORA, weight, EPS, 0.0, out)
    with pytest.raises(AssertionError, match="partials are float32"):
        add_rms_norm_triton(x.half()[None], x, *NO_LORA, weight, EPS, 0.0, out)
    with pytest.raises(AssertionError, match="partials are \\[S, 2, 8\\]"):
        add_rms_norm_triton(x[None, :, :4], x, *NO_LORA, weight, EPS, 0.0, out)


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(576, torch.float32), (4096, torch.bfloat16), (344, torch.float16), (16384, torch.bfloat16)],
)
def test_compiles(hidden, dtype):
    x, residual, out = (torch.zeros(2, hidden, dtype=dtype) for _ in range(3))
    weight = torch.zeros(hidden, dtype=dtype)
    if hidden != 344:
        assert compile_launches(rms_norm_triton, x, weight, EPS, 0.0, out) == 1
    assert compile_launches(add_rms_norm_triton, x, residual, *NO_LORA, weight, EPS, 0.0, out) == 1
    if hidden == 4096:
        x = torch.zeros(2, 2, hidden)
        assert (
            compile_launches(add_rms_norm_triton, x, residual, *NO_LORA, weight, EPS, 0.0, out) == 1
        )
