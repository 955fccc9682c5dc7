"""add_rms_norm that adds a LoRA delta: against its twin, and against add_expand and rms_norm."""

import pytest
import torch
from torch.testing import assert_close

from kernels.add_expand import add_expand_triton
from kernels.lora_arguments import FEW_ROWS, NO_LORA
from kernels.norm import (
    add_rms_norm,
    add_rms_norm_torch,
    add_rms_norm_triton,
    holds_delta,
    rms_norm_triton,
)
from tests.kernels.cross_compile import compile_each, compile_launches, sum_layouts
from tests.kernels.expand_batch import ROWS, ExpandBatch, same_bits

BF16 = torch.bfloat16
EPS = 1e-5
SHORT = [16, 0, 5, 1, 8]
# (batch, dtype of the residual, partials of x; 0: x of the residual's dtype)
CASES = {
    "one_row": (ExpandBatch(ROWS[1], [200]), torch.float32, 2),
    "three_rows": (ExpandBatch(ROWS[3], [136]), torch.float16, 0),
    "higher_ranks": (ExpandBatch(ROWS[8], [300]), torch.float32, 0),
    "bf16": (ExpandBatch(ROWS[8], [72], [SHORT], BF16, max_rank=16), BF16, 2),
    "small_ranks": (ExpandBatch(ROWS[8], [40], [[1, 2, 3, 0, 5]], max_rank=5), torch.float32, 1),
    "disabled": (ExpandBatch(ROWS[8], [40], disabled=frozenset({0, 4})), BF16, 2),
    "many_rows": (ExpandBatch(ROWS[40], [136], [SHORT], BF16, max_rank=16), BF16, 2),
    "parts": (ExpandBatch(ROWS[8], [72], [SHORT], BF16, max_rank=16, parts=8), BF16, 2),
    "parts_of_any_rank": (ExpandBatch(ROWS[8], [300], parts=4), torch.float32, 0),
    "many_parts": (ExpandBatch(ROWS[40], [136], [SHORT], BF16, max_rank=16, parts=32), BF16, 2),
    "only_base_rows": (ExpandBatch([-1] * 20, [40]), torch.float32, 2),
}


def _inputs(name: str, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, residual and weight; beside the rows of the first two are margins of NaN."""
    batch, dtype, partials = CASES[name]
    return _tensors(len(batch.rows), batch.slice_sizes[0], dtype, partials, device)


def _tensors(
    tokens: int, hidden: int, dtype: torch.dtype, partials: int, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.full((max(partials, 1), tokens, hidden + 8), torch.nan)
    x[..., :hidden] = torch.randn(max(partials, 1), tokens, hidden, generator=generator)
    residual = torch.full((tokens, hidden + 16), torch.nan, dtype=dtype)
    residual[:, :hidden] = torch.randn(tokens, hidden, generator=generator)
    x[..., :hidden:5] = residual[:, :hidden:5] = -0.0
    weight = torch.randn(hidden, generator=generator).to(dtype)
    x = x.to(device) if partials else x[0].to(device, dtype)
    return x[..., :hidden], residual.to(device)[:, :hidden], weight.to(device)


def _apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, lora) -> torch.Tensor:
    """The norm after the delta has been added by a launch of its own."""
    out, (shrunk, *tables) = torch.empty_like(residual), lora
    sums = shrunk.sum(dim=1) if shrunk.dim() == 3 else shrunk
    add_expand_triton(x, residual, sums, *tables)
    rms_norm_triton(residual, weight, EPS, 0.0, out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_op_adds_product_and_delta_before_the_norm(name):
    batch, dtype, partials = CASES[name]
    x, residual, weight = _inputs(name)
    total = x.double().sum(0) if partials else x.double()
    expected, out = residual.double() + total + batch.delta(), torch.empty_like(residual)
    add_rms_norm(x, residual, *batch.arguments(), weight, EPS, 0.0, out)
    rtol, atol = (2e-5, 2e-5) if dtype == torch.float32 else (torch.finfo(dtype).eps, 1e-4)
    assert_close(residual.double(), expected, rtol=rtol, atol=atol)
    wide = residual.double()
    normed = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert_close(out.double(), normed, rtol=rtol, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_twin(kernel_device, name):
    batch, dtype, _ = CASES[name]
    x, expected, weight = _inputs(name)
    expected_out = torch.empty_like(expected)
    add_rms_norm_torch(x, expected, *batch.arguments(), weight, EPS, 0.0, expected_out)
    x, residual, weight = _inputs(name, kernel_device)
    out, base = torch.empty_like(residual), residual.clone()
    add_rms_norm_triton(x, residual, *batch.arguments(kernel_device), weight, EPS, 0.0, out)
    # Sums in another order, then one rounding; the interpreter truncates to bfloat16.
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2 * torch.finfo(dtype).eps, 2e-3)
    assert_close(residual.cpu(), expected, rtol=rtol, atol=atol)
    assert_close(out.cpu(), expected_out, rtol=2 * rtol, atol=2 * atol)
    assert residual._base[:, residual.shape[1] :].isnan().all()
    base_out = torch.empty_like(base)
    add_rms_norm_triton(x, base, *NO_LORA, weight, EPS, 0.0, base_out)
    for with_deltas, without in ((residual, base), (out, base_out)):
        assert same_bits(with_deltas[batch.base_rows], without[batch.base_rows])


@pytest.mark.kernel
@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name][0].rows) <= FEW_ROWS])
def test_equals_the_two_ops_apart(kernel_device, name):
    """To the last bits of a sum over ranks, which is added up in two halves here."""
    batch, dtype, _ = CASES[name]
    x, residual, weight = _inputs(name, kernel_device)
    arguments, apart = batch.arguments(kernel_device), residual.clone()
    out = torch.empty_like(residual)
    add_rms_norm_triton(x, residual, *arguments, weight, EPS, 0.0, out)
    expected = _apart(x, apart, weight, arguments)
    eps = torch.finfo(dtype).eps
    slack = 16 if batch.parts == 1 else 64  # parts are added in another order too
    assert_close(residual, apart, rtol=2 * eps, atol=slack * torch.finfo(torch.float32).eps)
    assert_close(out, expected, rtol=4 * eps, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["higher_ranks", "bf16", "many_rows", "many_parts"])
def test_a_row_does_not_depend_on_its_neighbours(kernel_device, name):
    batch = CASES[name][0]
    x, residual, weight = _inputs(name, kernel_device)
    arguments = batch.arguments(kernel_device)
    again, out, out_again = residual.clone(), *(torch.empty_like(residual) for _ in range(2))
    add_rms_norm_triton(x, residual, *arguments, weight, EPS, 0.0, out)
    kept = len(batch.rows) // 2 - 1
    assert kept not in batch.base_rows
    others = [row for row in range(len(batch.rows)) if row != kept]
    arguments[0][others] = torch.nan
    for poisoned in (again, x):
        poisoned[..., others, :] = torch.nan
    add_rms_norm_triton(x, again, *arguments, weight, EPS, 0.0, out_again)
    assert torch.equal(residual[kept], again[kept])
    assert torch.equal(out[kept], out_again[kept])


@pytest.mark.gpu
@pytest.mark.parametrize("partials", [0, 2, 4])
@pytest.mark.parametrize("hidden", [2048, 3072, 4096])
def test_base_rows_keep_their_bits_at_model_widths(hidden, partials):
    """The squares of a row are summed up in the same order with and without deltas."""
    rows = [row % 9 - 1 for row in range(32)]
    batch = ExpandBatch(rows, [hidden], [[16, 8, 5, 16, 0, 1, 16, 4]], BF16, max_rank=16)
    x, residual, weight = _tensors(len(rows), hidden, BF16, partials, "cuda")
    base, out, base_out = residual.clone(), *(torch.empty_like(residual) for _ in range(2))
    add_rms_norm_triton(x, residual, *batch.arguments("cuda"), weight, EPS, 0.0, out)
    add_rms_norm_triton(x, base, *NO_LORA, weight, EPS, 0.0, base_out)
    assert same_bits(residual[batch.base_rows], base[batch.base_rows])
    assert same_bits(out[batch.base_rows], base_out[batch.base_rows])
    assert not torch.equal(out, base_out)


@pytest.mark.parametrize("partials", [0, 2])
@pytest.mark.parametrize("hidden", [2048, 3072, 4096])
def test_squares_are_summed_in_one_order_with_and_without_deltas(hidden, partials):
    """As compiled for Hopper: the same without one."""
    batch = ExpandBatch([0, -1] * 16, [hidden], [[16, 8]], BF16, max_rank=16)
    x, residual, weight = _tensors(len(batch.rows), hidden, BF16, partials, "cpu")
    layouts = []
    for lora in (NO_LORA, batch.arguments()):
        arguments = (x, residual, *lora, weight, EPS, 0.0, torch.empty_like(residual))
        ((_, kernel),) = compile_each(add_rms_norm_triton, *arguments, targets=(90,))
        layouts.append(sum_layouts(kernel))
    assert layouts[0]
    assert layouts[0] <= layouts[1]


def test_a_row_in_registers_is_what_it_is_for():
    assert holds_delta(64, 4096, 16, BF16, False)
    assert not holds_delta(65, 4096, 16, BF16, False), "the library's, which nothing overlaps"
    assert holds_delta(128, 4096, 16, BF16, True)
    assert not holds_delta(129, 4096, 16, BF16, True)
    assert not holds_delta(8, 4096, 17, BF16, True)
    assert not holds_delta(8, 5120, 16, BF16, True)
    assert not holds_delta(8, 2048, 16, torch.float32, True)


@pytest.mark.parametrize(
    "name", ["bf16", "higher_ranks", "many_rows", "parts_of_any_rank", "many_parts"]
)
def test_compiles(name):
    x, residual, weight = _inputs(name)
    arguments = CASES[name][0].arguments()
    out = torch.empty_like(residual)
    launched = compile_launches(add_rms_norm_triton, x, residual, *arguments, weight, EPS, 0.0, out)
    assert launched == 1
