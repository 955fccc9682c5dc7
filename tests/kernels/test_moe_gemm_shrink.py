"""The experts' product and x A^T of one launch: against moe_gemm and moe_lora_shrink alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernels.moe_gemm import launch_moe_gemm, moe_gemm_torch, moe_gemm_triton
from kernels.moe_gemm_config import MoeGemmConfig, moe_block_size_m
from kernels.moe_gemm_shrink import (
    launch_moe_gemm_shrink,
    moe_gemm_shrink,
    moe_gemm_shrink_torch,
    moe_gemm_shrink_triton,
    shares_launch,
)
from kernels.moe_lora_shrink import (
    moe_lora_shrink_torch,
    moe_lora_shrink_triton,
    moe_shrink_split_k,
)
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expert_batch import NAN, Batch, Case
from tests.kernels.test_moe_gemm import sorted_pairs

F16, BF16 = torch.float16, torch.bfloat16


@dataclass
class Run:
    """One side of a batch on a device, gate and up or down; outputs start as NaN.

    block_size_m 0: unsorted pairs.
    """

    batch: Batch
    block_size_m: int
    is_down: bool

    def __post_init__(self) -> None:
        batch, case, device = self.batch, self.batch.case, self.batch.device
        pairs, self.packed = batch.topk_ids.numel(), batch.down if self.is_down else batch.gate_up
        self.x = batch.input("activated" if self.is_down else "x")
        width = case.hidden if self.is_down else 2 * case.intermediate
        generator = torch.Generator().manual_seed(3)
        shape = (case.num_experts, width, self.x.shape[1])
        weight = torch.randn(shape, generator=generator) / self.x.shape[1] ** 0.5
        self.weight = weight.to(case.dtype).to(device)
        sort = sorted_pairs(batch.topk_ids.cpu(), self.block_size_m, case.num_experts)
        self.sort = [None if buffer is None else buffer.to(device) for buffer in sort]
        self.out = torch.full((pairs, width + 8), NAN, dtype=case.dtype, device=device)
        stack = self.packed.lora_ranks.shape[0]
        shape = (case.splits, pairs + 3, stack * case.max_rank)
        self.shrunk = torch.full(shape, NAN, device=device)

    @property
    def product(self) -> tuple:
        pairs_per_row = 1 if self.is_down else self.batch.case.top_k
        pairs = (self.batch.topk_ids, *self.sort, self.block_size_m, pairs_per_row)
        return self.x, self.weight, *pairs, self.out[:, :-8]

    @property
    def tables(self) -> tuple:
        packed, rows = self.packed, self.batch.rows
        outer = (None, None)
        if self.batch.case.shared and not self.is_down:
            outer = (packed.outer_ptrs, packed.outer_ranks)
        tables = (packed.arena, packed.a_ptrs, packed.lora_ranks, *outer)
        return *tables, rows["row_adapter"], rows["adapter_enabled"]

    @property
    def sums(self) -> tuple:
        pairs = self.batch.topk_ids.numel()
        return self.batch.case.max_rank, self.shrunk[:, :pairs], self.batch.arrivals

    @property
    def shrink(self) -> tuple:
        pairs_per_row = 1 if self.is_down else self.batch.case.top_k
        return self.x, *self.tables, self.batch.topk_ids, pairs_per_row, *self.sums

    @property
    def both(self) -> tuple:
        return *self.product, *self.tables, *self.sums

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both outputs on the CPU, with what lies around them; of x A^T the sums."""
        assert not self.batch.arrivals.any()
        return self.out.cpu(), self.shrunk[0].cpu()


@dataclass(frozen=True)
class Launch:
    case: Case
    block_size_m: int
    is_down: bool = False

    def run(self, ops: str, device: str | torch.device = "cpu") -> Run:
        return Run(Batch(self.case, ops, device), self.block_size_m, self.is_down)


MIXED = Case([2, -1, 0, 3, 1], 6, 2, [1, 5, 0, 16, 33, 64], 4, disabled=frozenset({3}))
LAUNCHES = {
    "one_row": Launch(Case([1], 6, 2, [4, 3, 5], hidden=1024, splits=4), 0),
    "one_row_down": Launch(Case([1], 6, 2, [4, 3, 5], intermediate=300, splits=2), 0, True),
    "one_base_row": Launch(Case([-1], 6, 2, [4]), 0),
    "unsorted": Launch(replace(MIXED, splits=3, hidden=600), 0),
    "unsorted_bf16": Launch(replace(MIXED, dtype=BF16), 0),
    "unsorted_down": Launch(replace(MIXED, dtype=BF16, intermediate=264), 0, True),
    "mixed": Launch(replace(MIXED, hidden=264, splits=2), 16),
    "mixed_down": Launch(replace(MIXED, dtype=F16), 16, True),
    "one_split": Launch(replace(MIXED, dtype=F16, splits=1), 16),
    "wide_adapters": Launch(replace(MIXED, dtype=F16, arena=torch.float32), 16),
    "skipped": Launch(Case([0, 1, 2, 0], 6, 2, [8, 16], skipped=frozenset({1, 2, 4, 5})), 16),
    "shared_outer": Launch(
        Case([0, 1, 2, -1, 2], 6, 2, [5, 16, 40], shared=frozenset({0, 2}), dtype=F16), 16
    ),
    "shared_outer_unsorted": Launch(Case([0], 4, 4, [33], shared=frozenset({0})), 0),
    "large_ranks": Launch(Case([0, 1], 2, 1, [256, 131], 2, 24, 20, 256), 0),
    "larger_blocks": Launch(
        Case([row % 4 - 1 for row in range(40)], 3, 2, [4, 3, 16], hidden=72, dtype=F16), 64
    ),
    "many_pairs": Launch(Case([0, 1, -1] * 22, 9, 4, [4, 0, 16], max_rank=33, splits=1), 16),
}


def equal(found: Run, expected: Run) -> bool:
    """Bit for bit, and nothing else written."""
    return all(
        torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        for one, other in zip(found.results, expected.results, strict=True)
    )


@pytest.mark.parametrize("name", ["one_row", "mixed_down", "shared_outer", "skipped"])
def test_twin_is_both_twins(name):
    run, alone = LAUNCHES[name].run("torch"), LAUNCHES[name].run("torch")
    moe_gemm_shrink(*run.both)
    moe_gemm_torch(*alone.product)
    moe_lora_shrink_torch(*alone.shrink)
    assert equal(run, alone)


def check_both(launch: Launch, device: torch.device) -> None:
    run, alone, twin = launch.run("triton", device), launch.run("triton", device), launch.run("")
    moe_gemm_shrink_triton(*run.both)
    moe_gemm_triton(*alone.product)
    moe_lora_shrink_triton(*alone.shrink)
    if launch.case.arena == torch.float32 != launch.case.dtype:
        # Products of two dtypes are added up on the ordinary cores, by the threads that loaded
        # them: the order goes by the launch. An engine's adapters have the model's dtype.
        assert torch.equal(run.results[0].nan_to_num(7), alone.results[0].nan_to_num(7))
    else:
        assert equal(run, alone)
    moe_gemm_shrink_torch(*twin.both)
    (out, shrunk), (twin_out, twin_shrunk) = run.results, twin.results
    rtol = 2e-5 if launch.case.dtype == torch.float32 else 2 * torch.finfo(launch.case.dtype).eps
    assert_close(out, twin_out, rtol=rtol, atol=1e-4, equal_nan=True)
    largest = float(twin_shrunk.nan_to_num().abs().max())
    assert_close(shrunk, twin_shrunk, rtol=1e-4, atol=2e-5 * largest, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("name", LAUNCHES)
def test_equals_moe_gemm_and_moe_lora_shrink(kernel_device, name):
    """Bit for bit what either launch writes, and no more; near the twins."""
    check_both(LAUNCHES[name], kernel_device)


@pytest.mark.kernel
@pytest.mark.parametrize("group_blocks", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_other_tiles(kernel_device, group_blocks, swapped):
    config = MoeGemmConfig(32, 32, 4, 2, group_blocks, swapped)
    launch = LAUNCHES["many_pairs"]
    run, alone = launch.run("triton", kernel_device), launch.run("triton", kernel_device)
    launch_moe_gemm_shrink(config, *run.both)
    launch_moe_gemm(config, *alone.product)
    moe_lora_shrink_triton(*alone.shrink)
    assert equal(run, alone)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["unsorted", "mixed"])
def test_bits_survive_other_rows(kernel_device, name):
    before, top_k = LAUNCHES[name].run("triton", kernel_device), MIXED.top_k
    moe_gemm_shrink_triton(*before.both)
    for kept in (0, len(MIXED.rows) - 1):
        after = LAUNCHES[name].run("triton", kernel_device)
        row = after.x[kept].clone()
        after.x.fill_(NAN)
        after.x[kept] = row
        moe_gemm_shrink_triton(*after.both)
        for found, expected in zip(after.results, before.results, strict=True):
            mine = slice(kept * top_k, (kept + 1) * top_k)
            assert torch.equal(found[mine].nan_to_num(7), expected[mine].nan_to_num(7))
            assert not found[mine].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 17, 32])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2)])
def test_larger_shapes_on_the_gpu(num_experts, top_k, tokens, is_down, dtype):
    pairs, width = tokens * top_k, 768 if is_down else 2048
    case = Case(
        [row % 8 - 1 for row in range(tokens)],
        num_experts,
        top_k,
        [16, 1, 5, 64, 0, 33, 8],
        7,
        hidden=2048,
        intermediate=768,
        splits=moe_shrink_split_k(pairs, width),
        dtype=dtype,
        shared=frozenset({2}),
        disabled=frozenset({4}),
    )
    block_size_m = moe_block_size_m(pairs, num_experts) if pairs > 16 else 0
    launch = Launch(case, block_size_m, is_down)
    run, alone = launch.run("triton", "cuda"), launch.run("triton", "cuda")
    assert shares_launch(run.weight, pairs, block_size_m)
    for _ in range(20):  # whichever split is the last
        moe_gemm_shrink_triton(*run.both)
        moe_gemm_triton(*alone.product)
        moe_lora_shrink_triton(*alone.shrink)
        assert equal(run, alone)
    check_both(launch, torch.device("cuda"))


@pytest.mark.parametrize("shared", [frozenset(), frozenset({0})])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "dtype"),
    [(1, 128, BF16), (8, 128, BF16), (32, 128, F16), (32, 8, BF16), (8, 128, torch.float32)],
)
def test_compiles_for_every_target(tokens, num_experts, dtype, is_down, shared):
    rows, pairs = [row % 2 for row in range(tokens)], 8 * tokens
    splits = moe_shrink_split_k(pairs, 128 if is_down else 256)
    case = Case(rows, num_experts, 8, [16], 2, 256, 128, splits=splits, dtype=dtype, shared=shared)
    block_size_m = moe_block_size_m(pairs, num_experts) if pairs > 16 else 0
    run = Launch(case, block_size_m, is_down).run("triton")
    assert compile_launches(moe_gemm_shrink_triton, *run.both) == 1


def test_shares_a_launch_by_shape_alone(monkeypatch):
    weight = torch.empty(128, 1536, 2048, dtype=BF16, device="meta")
    assert all(shares_launch(weight, pairs, 16) for pairs in (1, 8, 16, 17, 64, 256))
    assert not shares_launch(weight.float(), 257, 16), "neither by pairs nor by blocks"
    assert not shares_launch(weight, 256, 64)  # measured with eight warps
    monkeypatch.setattr("kernels.moe_gemm_shrink.MAX_SHARED_PAIRS", 64)
    assert [shares_launch(weight.float(), pairs, 16) for pairs in (64, 65)] == [True, False]


def test_refuses_what_either_refuses():
    run = LAUNCHES["mixed"].run("triton")
    with pytest.raises(AssertionError, match="8 warps"):
        launch_moe_gemm_shrink(MoeGemmConfig(32, 32, 8, 2), *run.both)
    with pytest.raises(AssertionError, match="out has shape"):
        moe_gemm_shrink_triton(*run.product[:-1], run.out, *run.tables, *run.sums)
    _, shrunk, arrivals = run.sums
    with pytest.raises(AssertionError, match="shrunk has shape"):
        moe_gemm_shrink_triton(*run.product, *run.tables, 64, shrunk[:, :-1], arrivals)
    with pytest.raises(AssertionError, match="shrunk has 2 dims"):
        moe_gemm_shrink_triton(*run.product, *run.tables, 64, shrunk[0], arrivals)
    with pytest.raises(AssertionError, match="3 arrivals, 80 needed"):
        moe_gemm_shrink_triton(*run.product, *run.tables, 64, shrunk, arrivals[:3])
