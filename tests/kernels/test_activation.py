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
from kernels.lora_arguments import NO_LORA
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expand_batch import (
    ROWS,
    ExpandBatch,
    same_bits,
    skip_what_the_interpreter_cannot,
)

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
    gated_activation_torch(gate_up, *NO_LORA, kind, expected)
    source = torch.full((tokens, 2 * intermediate + 8), torch.nan, dtype=dtype)
    source[:, : 2 * intermediate] = gate_up
    source = source.to(kernel_device)
    wide = torch.full((tokens, intermediate + 16), torch.inf, dtype=dtype, device=kernel_device)
    given = source[:, : 2 * intermediate]
    gated_activation_triton(given, *NO_LORA, kind, wide[:, :intermediate])
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
    gated_activation(gate_up, *NO_LORA, kind, out)
    gate, up = gate_up.double().split(40, dim=1)
    assert_close(out, (FORMULAS[kind](gate) * up).float(), rtol=2e-6, atol=2e-6)


def test_twin_rounds_once():
    gate_up = _gate_up(4, 40, torch.bfloat16)
    out = torch.empty(4, 40, dtype=torch.bfloat16)
    gated_activation(gate_up, *NO_LORA, "silu", out)
    gate, up = gate_up.float().split(40, dim=1)
    assert torch.equal(out, (silu(gate) * up).bfloat16())


def test_launcher_refuses_what_the_kernel_does_not_read():
    gate_up, out = torch.ones(2, 16), torch.empty(2, 8)
    with pytest.raises(AssertionError, match="kind is one of"):
        gated_activation_triton(gate_up, *NO_LORA, "relu", out)
    with pytest.raises(AssertionError, match="gate_up is"):
        gated_activation_triton(gate_up, *NO_LORA, "silu", torch.empty(2, 16))
    with pytest.raises(AssertionError, match="differ"):
        gated_activation_triton(gate_up, *NO_LORA, "silu", out.half())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("silu", torch.bfloat16), ("gelu", torch.float16), ("gelu_tanh", torch.float32)],
)
def test_compiles(kind, dtype):
    gate_up, out = torch.zeros(2, 1376, dtype=dtype), torch.zeros(2, 688, dtype=dtype)
    assert compile_launches(gated_activation_triton, gate_up, *NO_LORA, kind, out) == 1


LORA_CASES = {
    "one_row": (ExpandBatch(ROWS[1], [40, 40]), torch.float32, "silu"),
    "three_rows": (ExpandBatch(ROWS[3], [300, 300]), torch.float32, "gelu"),
    "few_rows": (ExpandBatch(ROWS[8], [72, 72]), torch.float32, "gelu_tanh"),
    "few_rows_bf16": (
        ExpandBatch(ROWS[8], [264, 264], dtype=torch.bfloat16),
        torch.bfloat16,
        "silu",
    ),
    "small_ranks": (
        ExpandBatch(ROWS[8], [40, 40], [[1, 2, 3, 4, 5], [5, 0, 0, 0, 1]], max_rank=5),
        torch.float32,
        "silu",
    ),
    "disabled": (
        ExpandBatch(ROWS[8], [40, 40], disabled=frozenset({0, 4})),
        torch.float32,
        "silu",
    ),
    "one_tile_more": (ExpandBatch(ROWS[17], [40, 40]), torch.float32, "silu"),
    "tiles": (ExpandBatch(ROWS[40], [136, 136]), torch.float32, "silu"),
    "tiles_bf16": (
        ExpandBatch(ROWS[40], [136, 136], dtype=torch.bfloat16),
        torch.bfloat16,
        "silu",
    ),
    "tiles_mixed": (
        ExpandBatch(ROWS[40], [40, 40], disabled=frozenset({2})),
        torch.bfloat16,
        "silu",
    ),
}


def _lora_inputs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and an `out` of NaN; unlike `_gate_up`, nothing far out."""
    batch, dtype, _ = LORA_CASES[name]
    shape = (len(batch.rows), sum(batch.slice_sizes))
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(shape, generator=generator).to(dtype)
    gate_up[:, ::5] = -0.0
    return gate_up, torch.full((shape[0], shape[1] // 2), torch.nan, dtype=dtype)


@pytest.mark.parametrize("name", LORA_CASES)
def test_op_adds_the_deltas_to_gate_and_up(name):
    batch, dtype, kind = LORA_CASES[name]
    gate_up, out = _lora_inputs(name)
    gated_activation(gate_up, *batch.arguments(), kind, out)
    gate, up = (gate_up.double() + batch.delta()).chunk(2, dim=1)
    rtol = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close(out, (FORMULAS[kind](gate) * up).to(dtype), rtol=rtol, atol=2e-5)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", LORA_CASES)
def test_kernel_with_deltas_matches_twin(kernel_device, name):
    batch, dtype, kind = LORA_CASES[name]
    skip_what_the_interpreter_cannot(batch, kernel_device)
    gate_up, expected = _lora_inputs(name)
    out = expected.to(kernel_device, copy=True)
    gated_activation_torch(gate_up, *batch.arguments(), kind, expected)
    gate_up = gate_up.to(kernel_device)
    gated_activation_triton(gate_up, *batch.arguments(kernel_device), kind, out)
    # Sums in another order, float32 or of 16 bits at least, then one rounding.
    wide = dtype == torch.float32
    rtol, atol = (1e-5, 2e-5) if wide else (2 * torch.finfo(dtype).eps, 2e-3)
    assert_close(out.cpu(), expected, rtol=rtol, atol=atol)
    base = torch.full_like(out, torch.nan)
    gated_activation_triton(gate_up, *NO_LORA, kind, base)
    assert same_bits(out[batch.base_rows], base[batch.base_rows]), "rows without a delta"


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", ["few_rows", "tiles", "tiles_bf16"])
def test_a_row_with_a_delta_does_not_depend_on_its_neighbours(kernel_device, name):
    batch, _, kind = LORA_CASES[name]
    skip_what_the_interpreter_cannot(batch, kernel_device)
    gate_up, out = (tensor.to(kernel_device) for tensor in _lora_inputs(name))
    arguments = batch.arguments(kernel_device)
    gated_activation_triton(gate_up, *arguments, kind, out)
    kept = len(batch.rows) // 2 - 1
    poisoned = torch.full_like(gate_up, torch.nan)
    poisoned[kept] = gate_up[kept]
    others = [row for row in range(len(batch.rows)) if row != kept]
    arguments[0][others] = torch.nan
    again = torch.empty_like(out)
    gated_activation_triton(poisoned, *arguments, kind, again)
    assert kept not in batch.base_rows
    assert torch.equal(out[kept], again[kept])


def test_launcher_refuses_lora_arguments_that_do_not_fit():
    batch, _, kind = LORA_CASES["few_rows"]
    gate_up, out = _lora_inputs("few_rows")
    for place, wrong, message in (
        (0, torch.zeros(8, 64), "shrunk has shape"),
        (1, None, "adapters without arena"),
        (3, torch.zeros(2, 5), "lora_ranks is"),
        (5, torch.zeros(7, dtype=torch.int32), "row_slot has shape"),
        (10, 300, "max_rank 300"),
    ):
        arguments = batch.arguments()
        arguments[place] = wrong
        with pytest.raises(AssertionError, match=message):
            gated_activation_triton(gate_up, *arguments, kind, out)
    with pytest.raises(AssertionError, match="no adapters"):
        gated_activation_triton(gate_up, *NO_LORA[:-1], 8, kind, out)


@pytest.mark.parametrize("name", ["few_rows_bf16", "tiles_bf16", "tiles_mixed"])
def test_compiles_with_deltas(name):
    batch, _, kind = LORA_CASES[name]
    gate_up, out = _lora_inputs(name)
    arguments = batch.arguments()
    assert compile_launches(gated_activation_triton, gate_up, *arguments, kind, out) == 1
