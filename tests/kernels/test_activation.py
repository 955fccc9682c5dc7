"""Gated activation: kernel against twin, twin against torch's activations."""

import pytest
import torch
from torch.nn.functional import gelu, silu
from torch.testing import assert_close

from kernels.activation import (
    KINDS,
    gated_activation,
    gated_activation_torch,
    gated_activation_triton,
)
from tests.kernels.cross_compile import compile_launches

FORMULAS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


def _gate_up(tokens: int, intermediate: int, dtype: torch.dtype) -> torch.Tensor:
    """Values small and large, among them gates whose exponentials overflow."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(tokens, 2 * intermediate, generator=generator) * 3
    values[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -12.0])
    return values.to(dtype)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which is what it should do
@pytest.mark.parametrize(
    ("tokens", "intermediate", "dtype", "kind"),
    [
        (1, 1536, torch.float32, "silu"),
        (3, 344, torch.float32, "gelu"),
        (2, 1000, torch.float32, "gelu_tanh"),
        (3, 1376, torch.bfloat16, "silu"),
        (1, 192, torch.bfloat16, "gelu"),
        (2, 520, torch.float16, "gelu_tanh"),
    ],
)
def test_kernel_matches_twin(kernel_device, tokens, intermediate, dtype, kind):
    gate_up = _gate_up(tokens, intermediate, dtype)
    expected = torch.full((tokens, intermediate), torch.nan, dtype=dtype)
    gated_activation_torch(gate_up, kind, expected)
    source = torch.full((tokens, 2 * intermediate + 8), torch.nan, dtype=dtype)
    source[:, : 2 * intermediate] = gate_up
    source = source.to(kernel_device)
    wide = torch.full((tokens, intermediate + 16), torch.inf, dtype=dtype, device=kernel_device)
    gated_activation_triton(source[:, : 2 * intermediate], kind, wide[:, :intermediate])
    # One rounding of float32 values a few units apart: the exponentials differ. atol: tanh's
    # form loses relative precision in its far left tail.
    rtol = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close(wide[:, :intermediate].cpu(), expected, rtol=rtol, atol=5e-6)
    assert (wide[:, intermediate:] == torch.inf).all()
    assert torch.equal(source[:, : 2 * intermediate].cpu(), gate_up)


@pytest.mark.parametrize("kind", KINDS)
def test_op_matches_torch(kind):
    gate_up = _gate_up(4, 40, torch.float32)
    out = torch.full((4, 40), torch.nan)
    gated_activation(gate_up, kind, out)
    gate, up = gate_up.double().split(40, dim=1)
    assert_close(out, (FORMULAS[kind](gate) * up).float(), rtol=2e-6, atol=2e-6)


def test_twin_rounds_once():
    gate_up = _gate_up(4, 40, torch.bfloat16)
    out = torch.empty(4, 40, dtype=torch.bfloat16)
    gated_activation(gate_up, "silu", out)
    gate, up = gate_up.float().split(40, dim=1)
    assert torch.equal(out, (silu(gate) * up).bfloat16())


def test_launcher_refuses_what_the_kernel_does_not_read():
    gate_up, out = torch.ones(2, 16), torch.empty(2, 8)
    with pytest.raises(AssertionError, match="kind is one of"):
        gated_activation_triton(gate_up, "relu", out)
    with pytest.raises(AssertionError, match="gate_up is"):
        gated_activation_triton(gate_up, "silu", torch.empty(2, 16))
    with pytest.raises(AssertionError, match="differ"):
        gated_activation_triton(gate_up, "silu", out.half())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("silu", torch.bfloat16), ("gelu", torch.float16), ("gelu_tanh", torch.float32)],
)
def test_compiles(kind, dtype):
    gate_up, out = torch.zeros(2, 1376, dtype=dtype), torch.zeros(2, 688, dtype=dtype)
    assert compile_launches(gated_activation_triton, gate_up, kind, out) == 1
