"""x A^T of sorted pairs: against the twin, which takes them one by one."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernels.moe_lora_shrink import moe_lora_shrink, moe_lora_shrink_triton
from kernels.moe_lora_shrink_sorted import (
    moe_lora_shrink_sorted,
    moe_lora_shrink_sorted_torch,
    moe_lora_shrink_sorted_triton,
    sorted_shrink_arrivals,
)
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expert_batch import NAN, Batch, Case
from tests.kernels.test_moe_gemm import sorted_pairs

F16, BF16 = torch.float16, torch.bfloat16


@dataclass
class Run:
    """A batch's arguments; the sums start as NaN, as does what lies around them."""

    batch: Batch
    block_size_m: int
    is_down: bool

    def __post_init__(self) -> None:
        batch, case, device = self.batch, self.batch.case, self.batch.device
        packed = batch.down if self.is_down else batch.gate_up
        stack, pairs = packed.lora_ranks.shape[0], batch.topk_ids.numel()
        shape = (case.splits, pairs + 3, stack * case.max_rank)
        self.shrunk = torch.full(shape, NAN, device=device)
        sort = sorted_pairs(batch.topk_ids.cpu(), self.block_size_m, case.num_experts)
        self.sort = [buffer.to(device) for buffer in sort]
        counters = sorted_shrink_arrivals(self.sort[1].numel(), stack)
        self.arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
        outer = (packed.outer_ptrs, packed.outer_ranks) if case.shared else (None, None)
        outer = (None, None) if self.is_down else outer
        rows = (batch.rows["row_adapter"], batch.rows["adapter_enabled"], batch.topk_ids)
        x = batch.input("activated" if self.is_down else "x")
        self.tables = (x, packed.arena, packed.a_ptrs, packed.lora_ranks, *outer, *rows)
        self.outputs = (case.max_rank, self.shrunk[:, :pairs])

    @property
    def arguments(self) -> tuple:
        per_row = 1 if self.is_down else self.batch.case.top_k
        sort = (*self.sort, self.block_size_m, per_row)
        return *self.tables, *sort, *self.outputs, self.arrivals

    def by_pairs(self, op) -> torch.Tensor:
        """The sums of `op`, which takes pairs as they come."""
        per_row = 1 if self.is_down else self.batch.case.top_k
        op(*self.tables, per_row, *self.outputs, self.batch.arrivals)
        return self.sums

    @property
    def sums(self) -> torch.Tensor:
        assert not self.arrivals.any()
        return self.shrunk[0].cpu()


@dataclass(frozen=True)
class Launch:
    case: Case
    block_size_m: int = 16
    is_down: bool = False

    def run(self, device: str | torch.device = "cpu") -> Run:
        return Run(Batch(self.case, "torch", device), self.block_size_m, self.is_down)


MIXED = Case([2, -1, 0, 3, 1], 6, 2, [1, 5, 0, 16, 33, 64], 4, disabled=frozenset({3}))
LAUNCHES = {
    "mixed": Launch(replace(MIXED, hidden=264, splits=2)),
    "one_split": Launch(replace(MIXED, splits=1)),
    "down": Launch(replace(MIXED, dtype=F16, intermediate=136, splits=4), is_down=True),
    "wide_adapters": Launch(replace(MIXED, dtype=F16, arena=torch.float32)),
    "one_row": Launch(Case([1], 6, 2, [4, 3, 5], hidden=1024, splits=4)),
    "base_rows": Launch(Case([-1] * 4, 6, 2, [4])),
    "one_adapter": Launch(Case([0] * 40, 3, 2, [16, 8], hidden=72, dtype=F16, max_rank=16)),
    "many_adapters": Launch(Case([row % 6 for row in range(40)], 2, 1, [4, 16, 7], 6, hidden=72)),
    "skipped": Launch(Case([0, 1, 2, 0], 6, 2, [8, 16], skipped=frozenset({2, 3, 6, 7}))),
    "shared_outer": Launch(
        Case([0, 1, 2, -1, 2], 6, 2, [5, 16, 40], shared=frozenset({0, 2}), dtype=F16, splits=3)
    ),
    "shared_outer_and_own": Launch(Case([0, 1, 1, 0], 4, 4, [33], shared=frozenset({0}))),
    "large_ranks": Launch(Case([0, 1], 2, 1, [256, 131], 2, 24, 20, 256)),
    "larger_blocks": Launch(
        Case([row % 4 - 1 for row in range(80)], 3, 2, [4, 3, 16], hidden=72, dtype=F16), 64
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_twin_is_that_of_single_pairs(name):
    run, alone = LAUNCHES[name].run(), LAUNCHES[name].run()
    moe_lora_shrink_sorted(*run.arguments)
    alone.batch.arrivals = torch.zeros(10000, dtype=torch.int32)
    expected = alone.by_pairs(moe_lora_shrink)
    assert torch.equal(run.sums.nan_to_num(7), expected.nan_to_num(7))


def close_to_twin(launch: Launch, device: torch.device) -> None:
    run, twin = launch.run(device), launch.run()
    moe_lora_shrink_sorted_triton(*run.arguments)
    moe_lora_shrink_sorted_torch(*twin.arguments)
    assert torch.equal(run.sums.isnan(), twin.sums.isnan()), "wrote other entries"
    largest = float(twin.sums.nan_to_num().abs().max())
    assert_close(run.sums, twin.sums, rtol=1e-4, atol=2e-5 * largest, equal_nan=True)
    assert run.shrunk[:, run.batch.topk_ids.numel() :].isnan().all()


@pytest.mark.kernel
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernel_matches_twin(kernel_device, name):
    close_to_twin(LAUNCHES[name], kernel_device)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["many_adapters", "one_adapter", "shared_outer_and_own"])
def test_a_pairs_bits_survive_other_rows(kernel_device, name):
    launch = LAUNCHES[name]
    before, after = launch.run(kernel_device), launch.run(kernel_device)
    moe_lora_shrink_sorted_triton(*before.arguments)
    kept, top_k = len(launch.case.rows) // 2, launch.case.top_k
    others = [row for row in range(len(launch.case.rows)) if row != kept]
    after.tables[0][others] = torch.nan
    moe_lora_shrink_sorted_triton(*after.arguments)
    for pair in range(kept * top_k, (kept + 1) * top_k):
        assert torch.equal(before.sums[pair].nan_to_num(7), after.sums[pair].nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("loras", [1, 8])
@pytest.mark.parametrize("tokens", [33, 64, 128])
def test_a_models_shapes_on_the_gpu(tokens, loras, is_down):
    """Near the twin, whatever the number of adapters, and the same twice."""
    case = Case(
        [row % (loras + 1) - 1 for row in range(tokens)],
        128,
        8,
        [16, 8, 5],
        loras,
        2048,
        768,
        16,
        splits=3 if is_down else 4,
        dtype=BF16,
    )
    launch = Launch(case, 16, is_down)
    close_to_twin(launch, torch.device("cuda"))
    runs = [launch.run("cuda") for _ in range(2)]
    for run in runs:
        moe_lora_shrink_sorted_triton(*run.arguments)
    assert torch.equal(runs[0].sums.nan_to_num(7), runs[1].sums.nan_to_num(7))
    alone = launch.run("cuda")
    counters = torch.zeros(100000, dtype=torch.int32, device="cuda")
    alone.batch.arrivals = counters
    assert_close(
        runs[0].sums, alone.by_pairs(moe_lora_shrink_triton), rtol=1e-3, atol=1e-3, equal_nan=True
    )


@pytest.mark.parametrize(
    "launch",
    [
        Launch(replace(MIXED, dtype=BF16, hidden=2048, splits=4)),
        Launch(replace(MIXED, dtype=F16, intermediate=768, splits=3), is_down=True),
        Launch(replace(MIXED, dtype=BF16, arena=torch.float32), 64),
    ],
)
def test_compiles(launch):
    assert compile_launches(moe_lora_shrink_sorted_triton, *launch.run().arguments) == 1


def test_refuses_what_it_does_not_read():
    run = LAUNCHES["mixed"].run()
    for place, changed, match in (
        (-1, run.arrivals[:1], "arrivals"),
        (9, run.sort[0].long(), "sorted_token_ids is torch.int64"),
        (12, 8, "block_size_m 8"),
    ):
        wrong = list(run.arguments)
        wrong[place] = changed
        with pytest.raises(AssertionError, match=match):
            moe_lora_shrink_sorted_triton(*wrong)
