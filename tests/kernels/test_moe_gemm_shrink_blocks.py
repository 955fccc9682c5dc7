"""The experts' product and x A^T by its blocks of pairs: against moe_gemm and the twin."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from kernels.moe_gemm import moe_gemm_triton
from kernels.moe_gemm_config import MoeGemmConfig
from kernels.moe_gemm_shrink import (
    moe_gemm_shrink_torch,
    moe_gemm_shrink_triton,
    shares_launch,
)
from kernels.moe_gemm_shrink_blocks import serves_blocks
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expert_batch import Case
from tests.kernels.test_moe_gemm_shrink import Launch

F16, BF16 = torch.float16, torch.bfloat16
MIXED = Case(
    [2, -1, 0, 3, 1], 6, 2, [1, 5, 0, 16, 33, 64], 4, splits=1, dtype=F16, disabled=frozenset({3})
)
LAUNCHES = {
    "mixed": Launch(replace(MIXED, hidden=264), 16),
    "mixed_down": Launch(replace(MIXED, intermediate=136), 16, True),
    "two_splits_of_room": Launch(replace(MIXED, splits=2), 16),
    "one_row": Launch(Case([1], 6, 2, [4, 3, 5], hidden=1024, splits=1, dtype=F16), 16),
    "base_rows": Launch(Case([-1] * 4, 6, 2, [4], splits=1, dtype=F16), 16),
    "one_adapter": Launch(
        Case([0] * 40, 3, 2, [16, 8], hidden=72, splits=1, dtype=F16, max_rank=16), 16
    ),
    "many_adapters": Launch(
        Case([row % 20 for row in range(40)], 2, 1, [4, 16, 7], 20, 72, splits=1, dtype=F16), 16
    ),
    "skipped": Launch(
        Case([0, 1, 2, 0], 6, 2, [8, 16], splits=1, dtype=F16, skipped=frozenset({2, 3, 6, 7})), 16
    ),
    "shared_outer": Launch(
        replace(MIXED, rows=[0, 1, 2, -1, 2], ranks=[5, 16, 40], shared=frozenset({0, 2})), 16
    ),
    "shared_outer_and_own": Launch(
        Case([0, 1, 1, 0], 4, 4, [33], shared=frozenset({0}), splits=1, dtype=F16), 16
    ),
    "large_ranks": Launch(Case([0, 1], 2, 1, [256, 131], 2, 24, 20, 256, 1, F16), 16),
}


@pytest.fixture(autouse=True)
def blocks_from_the_first_pair_on(monkeypatch):
    monkeypatch.setattr("kernels.moe_gemm_shrink.MAX_SHARED_PAIRS", 0)


def check(launch: Launch, device: torch.device) -> None:
    run, alone, twin = launch.run("triton", device), launch.run("triton", device), launch.run("")
    moe_gemm_shrink_triton(*run.both)
    moe_gemm_triton(*alone.product)
    moe_gemm_shrink_torch(*twin.both)
    out, sums = run.results
    assert torch.equal(out.nan_to_num(7), alone.results[0].nan_to_num(7))
    _, expected = twin.results
    largest = float(expected.nan_to_num().abs().max())
    assert_close(sums, expected, rtol=1e-4, atol=2e-5 * largest, equal_nan=True)
    assert run.shrunk[1:].isnan().all(), "parts are not used"


@pytest.mark.kernel
@pytest.mark.parametrize("name", LAUNCHES)
def test_writes_the_products_bits_and_the_twins_sums(kernel_device, name):
    """And nothing else."""
    check(LAUNCHES[name], kernel_device)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["one_adapter", "many_adapters", "shared_outer_and_own"])
def test_a_pairs_bits_survive_other_rows(kernel_device, name):
    launch = LAUNCHES[name]
    before, after = launch.run("triton", kernel_device), launch.run("triton", kernel_device)
    kept, top_k = len(launch.case.rows) // 2, launch.case.top_k
    after.x[[row for row in range(len(launch.case.rows)) if row != kept]] = torch.nan
    for run in (before, after):
        moe_gemm_shrink_triton(*run.both)
    mine = slice(kept * top_k, (kept + 1) * top_k)
    for found, expected in zip(after.results, before.results, strict=True):
        assert torch.equal(found[mine].nan_to_num(7), expected[mine].nan_to_num(7))
        assert not found[mine].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize(("tokens", "loras"), [(33, 8), (128, 1), (128, 8), (128, 20)])
def test_a_models_shapes_on_the_gpu(tokens, loras, is_down, dtype):
    """And the same twice."""
    rows = [row % (loras + 1) - 1 for row in range(tokens)]
    shape = {"hidden": 2048, "intermediate": 768, "max_rank": 64, "splits": 1, "dtype": dtype}
    case = Case(rows, 128, 8, [16, 8, 5, 64], loras, shared=frozenset({1}), **shape)
    launch = Launch(case, 16, is_down)
    check(launch, torch.device("cuda"))
    runs = [launch.run("triton", "cuda") for _ in range(2)]
    for run in runs:
        moe_gemm_shrink_triton(*run.both)
    for one, other in zip(runs[0].results, runs[1].results, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("name", ["mixed", "mixed_down", "many_adapters", "shared_outer"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_compiles_for_every_target(name, dtype):
    launch = LAUNCHES[name]
    run = replace(launch, case=replace(launch.case, dtype=dtype)).run("triton")
    assert compile_launches(moe_gemm_shrink_triton, *run.both) == 1


def test_where_blocks_are_taken():
    narrow, grouped = MoeGemmConfig(64, 128, 4, 3), MoeGemmConfig(64, 128, 4, 3, group_blocks=8)
    assert serves_blocks(narrow, 16, 2)
    assert not serves_blocks(narrow, 16, 4), "float32 has no tensor cores"
    assert not serves_blocks(narrow, 64, 2)
    assert not serves_blocks(grouped, 16, 2)
    weight = torch.empty(128, 1536, 2048, dtype=BF16, device="meta")
    assert [shares_launch(weight, 1024, block) for block in (16, 64)] == [True, False]
