"""add_expand: kernel against twin, twin against float64; base rows against add_rms_norm."""

import pytest
import torch
from torch.testing import assert_close

from kernels.add_expand import add_expand, add_expand_torch, add_expand_triton
from kernels.lora_arguments import NO_LORA
from kernels.norm import add_rms_norm_triton
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expand_batch import (
    ROWS,
    ExpandBatch,
    same_bits,
    skip_what_the_interpreter_cannot,
)

BF16 = torch.bfloat16
# (batch, dtype of the residual, partials of x; 0: x of the residual's dtype)
CASES = {
    "one_row": (ExpandBatch(ROWS[1], [200]), torch.float32, 2),
    "three_rows": (ExpandBatch(ROWS[3], [136]), torch.float16, 0),
    "few_rows": (ExpandBatch(ROWS[8], [300]), torch.float32, 0),
    "few_rows_bf16": (ExpandBatch(ROWS[8], [72], dtype=BF16), BF16, 2),
    "small_ranks": (ExpandBatch(ROWS[8], [40], [[1, 2, 3, 0, 5]], max_rank=5), torch.float32, 1),
    "disabled": (ExpandBatch(ROWS[8], [40], disabled=frozenset({0, 4})), BF16, 2),
    "one_tile_more": (ExpandBatch(ROWS[17], [40]), torch.float32, 3),
    "tiles": (ExpandBatch(ROWS[40], [136]), torch.float32, 2),
    "tiles_bf16": (ExpandBatch(ROWS[40], [136], dtype=BF16), BF16, 2),
    "tiles_mixed": (ExpandBatch(ROWS[40], [40], disabled=frozenset({2})), BF16, 0),
    "only_base_rows": (ExpandBatch([-1] * 20, [40]), torch.float32, 2),
}


def _inputs(name: str, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual, both with margins of NaN beside their rows."""
    batch, dtype, partials = CASES[name]
    tokens, hidden = len(batch.rows), batch.slice_sizes[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.full((max(partials, 1), tokens, hidden + 8), torch.nan)
    x[..., :hidden] = torch.randn(max(partials, 1), tokens, hidden, generator=generator)
    residual = torch.full((tokens, hidden + 16), torch.nan, dtype=dtype)
    residual[:, :hidden] = torch.randn(tokens, hidden, generator=generator)
    x[..., :hidden:5] = residual[:, :hidden:5] = -0.0
    x = x.to(device) if partials else x[0].to(device, dtype)
    return x[..., :hidden], residual.to(device)[:, :hidden]


@pytest.mark.parametrize("name", CASES)
def test_op_adds_product_and_delta(name):
    batch, dtype, partials = CASES[name]
    x, residual = _inputs(name)
    total = x.double().sum(0) if partials else x.double()
    expected = residual.double() + total + batch.delta()
    add_expand(x, residual, *batch.arguments())
    rtol, atol = (2e-5, 2e-5) if dtype == torch.float32 else (torch.finfo(dtype).eps, 1e-4)
    assert_close(residual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_twin(kernel_device, name):
    batch, dtype, _ = CASES[name]
    skip_what_the_interpreter_cannot(batch, kernel_device)
    x, expected = _inputs(name)
    add_expand_torch(x, expected, *batch.arguments())
    x, residual = _inputs(name, kernel_device)
    before, given = residual.clone(), x.clone()
    add_expand_triton(x, residual, *batch.arguments(kernel_device))
    # Sums in another order, float32 or of 16 bits at least, then one rounding.
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (torch.finfo(dtype).eps, 2e-3)
    assert_close(residual.cpu(), expected, rtol=rtol, atol=atol)
    assert residual._base[:, residual.shape[1] :].isnan().all()
    assert torch.equal(x, given)
    for update in (
        lambda base: add_expand_triton(x, base, *NO_LORA),
        lambda base: add_rms_norm_triton(
            x,
            base,
            *NO_LORA,
            torch.ones(x.shape[-1], device=x.device),
            1e-5,
            0.0,
            torch.empty_like(base),
        ),
    ):
        base = before.clone()
        update(base)
        assert same_bits(residual[batch.base_rows], base[batch.base_rows]), "without a delta"


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["few_rows", "tiles", "tiles_bf16"])
def test_a_row_does_not_depend_on_its_neighbours(kernel_device, name):
    batch = CASES[name][0]
    skip_what_the_interpreter_cannot(batch, kernel_device)
    x, residual = _inputs(name, kernel_device)
    arguments = batch.arguments(kernel_device)
    again = residual.clone()
    add_expand_triton(x, residual, *arguments)
    kept = len(batch.rows) // 2 - 1
    assert kept not in batch.base_rows
    others = [row for row in range(len(batch.rows)) if row != kept]
    for poisoned in (again, arguments[0], x):
        poisoned[..., others, :] = torch.nan
    add_expand_triton(x, again, *arguments)
    assert torch.equal(residual[kept], again[kept])


def test_the_sum_is_rounded_once():
    """1 + 2 ** -9 + 2 ** -8: each of the two alone is lost in bfloat16."""
    batch = ExpandBatch([0], [8], [[1]], max_rank=1)
    arguments = batch.arguments()
    arguments[1].fill_(1.0)
    arguments[4].fill_(1.0)
    arguments[0].fill_(2.0**-8)
    residual, x = torch.ones(1, 8).bfloat16(), torch.full((1, 8), 2.0**-9).bfloat16()
    add_expand(x, residual, *arguments)
    assert torch.equal(residual, torch.full((1, 8), 1 + 2.0**-7).bfloat16())


def test_launcher_refuses_what_the_kernel_does_not_read():
    x, residual = torch.ones(2, 8), torch.ones(2, 8)
    with pytest.raises(AssertionError, match="rows of"):
        add_expand_triton(x.half(), residual, *NO_LORA)
    with pytest.raises(AssertionError, match="partials are float32"):
        add_expand_triton(x.half()[None], residual, *NO_LORA)
    arguments = ExpandBatch([0, 0], [8, 8]).arguments()
    with pytest.raises(AssertionError, match="b_ptrs has shape"):
        add_expand_triton(x, residual, *arguments)


@pytest.mark.parametrize("name", ["few_rows_bf16", "tiles_bf16", "tiles_mixed"])
def test_compiles(name):
    arguments = CASES[name][0].arguments()
    assert compile_launches(add_expand_triton, *_inputs(name), *arguments) == 1
    if name == "few_rows_bf16":
        assert compile_launches(add_expand_triton, *_inputs(name), *NO_LORA) == 1
