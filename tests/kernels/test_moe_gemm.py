"""Grouped GEMM: kernels against twin, twin against each pair's product by hand."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernels import moe_gemm_config as tables
from kernels.moe_gemm import launch_moe_gemm, moe_gemm, moe_gemm_torch, moe_gemm_triton
from kernels.moe_gemm_config import (
    BLOCK_SIZES_M,
    MoeGemmConfig,
    fitted,
    moe_block_size_m,
    moe_gemm_config,
)
from tests.kernels.cross_compile import compile_launches

NAN = torch.nan
EPS = {
    torch.float32: 2e-6,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True)
class Case:
    """block_size_m 0: unsorted. `routing`: any, one (the last expert takes all), half (of them)."""

    tokens: int
    top_k: int
    experts: int
    in_features: int
    out_features: int
    block_size_m: int
    per_pair: bool = False
    routing: str = "any"
    dtype: torch.dtype = torch.float32

    def ids(self) -> torch.Tensor:
        """Distinct experts a row; the last row is padding, one more pair has no expert."""
        generator = torch.Generator().manual_seed(self.tokens)
        allowed = self.experts // 2 if self.routing == "half" else self.experts
        scores = torch.rand(self.tokens, max(allowed, self.top_k), generator=generator)
        ids = scores.argsort(1)[:, : self.top_k].int()
        if self.routing == "one":
            ids = torch.full_like(ids, self.experts - 1)
        if self.tokens > 1:
            ids[-1] = -1
            ids[0, -1] = -1
        return ids

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """(x, weight, topk_ids, pairs_per_row), NaN in weights and beside the rows' ends."""
        generator = torch.Generator().manual_seed(1)
        pairs_per_row = 1 if self.per_pair else self.top_k
        num_rows = self.tokens * self.top_k // pairs_per_row
        x = torch.full((num_rows, self.in_features + 8), NAN, dtype=self.dtype)
        x[:, : self.in_features] = torch.randn(num_rows, self.in_features, generator=generator)
        weight = torch.full(
            (self.experts, self.out_features + 3, self.in_features + 8), NAN, dtype=self.dtype
        )
        shape = (self.experts, self.out_features, self.in_features)
        values = torch.randn(shape, generator=generator) / self.in_features**0.5
        ids = self.ids()
        idle = torch.ones(self.experts, dtype=torch.bool)
        idle[ids[ids >= 0].long()] = False
        values[idle] = NAN  # never read
        weight[:, : self.out_features, : self.in_features] = values
        return (
            x[:, : self.in_features],
            weight[:, : self.out_features, : self.in_features],
            ids,
            pairs_per_row,
        )


def sorted_pairs(ids: torch.Tensor, block_size_m: int, experts: int) -> list:
    """The three buffers as `moe_align_block_size` defines them, entries beyond the end poisoned."""
    if block_size_m == 0:
        return [None, None, None]
    flat, order, block_experts = ids.flatten().tolist(), [], []
    for expert in range(experts):
        run = [pair for pair, e in enumerate(flat) if e == expert]
        run += [len(flat)] * (-len(run) % block_size_m)
        order += run
        block_experts += [expert] * (len(run) // block_size_m)
    used = len(order)
    order += [-7] * block_size_m * 2
    block_experts += [10**6] * 2
    return [torch.tensor(values, dtype=torch.int32) for values in (order, block_experts, [used])]


def product(op, case: Case, device: str | torch.device = "cpu") -> torch.Tensor:
    """`op` on the case, moved; what it did not write is NaN. Margins of the output are checked."""
    x, weight, ids, pairs_per_row = case.inputs()
    buffers = sorted_pairs(ids, case.block_size_m, case.experts)
    # Moved with what lies around them, which keeps the strides.
    x = x._base.to(device)[:, : case.in_features]
    weight = weight._base.to(device)[:, : case.out_features, : case.in_features]
    buffers = [None if buffer is None else buffer.to(device) for buffer in buffers]
    out = torch.full((ids.numel(), case.out_features + 8), NAN, dtype=case.dtype, device=device)
    inside = out[:, : case.out_features]
    op(x, weight, ids.to(device), *buffers, case.block_size_m, pairs_per_row, inside)
    assert out[:, case.out_features :].isnan().all()
    return inside.cpu()


def by_hand(case: Case) -> torch.Tensor:
    x, weight, ids, pairs_per_row = case.inputs()
    expected = torch.full((ids.numel(), case.out_features), NAN, dtype=torch.float64)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            expected[pair] = weight[expert].double() @ x[pair // pairs_per_row].double()
    return expected


def assert_equal_products(found: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    """Within one rounding of the dtype, and float32's of a sum of in_features terms near 1.

    Roundings of the running sum, of 6e-8 each, add up like a random walk; largest of many.
    """
    atol = 2e-6 + 2.5e-7 * case.in_features**0.5
    rtol = EPS[case.dtype]
    assert_close(found.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


CASES = {
    "one_row": Case(1, 8, 60, 40, 24, 16),
    "one_row_unsorted": Case(1, 8, 60, 40, 24, 0),
    "unsorted": Case(3, 2, 6, 600, 33, 0),
    "unsorted_down": Case(4, 10, 12, 96, 48, 0, per_pair=True, dtype=torch.bfloat16),
    "odd": Case(5, 2, 6, 50, 33, 16, dtype=torch.float16),
    "one_expert": Case(9, 1, 1, 64, 40, 16, routing="one"),
    "last_expert": Case(21, 1, 7, 64, 64, 16, routing="one"),
    "half_idle": Case(17, 2, 8, 96, 72, 16, per_pair=True, routing="half", dtype=torch.float16),
    "even": Case(6, 2, 4, 256, 128, 16, dtype=torch.float16),
    "prefill": Case(40, 2, 3, 72, 136, 64, dtype=torch.float16),
    "prefill_down": Case(33, 3, 4, 64, 48, 64, per_pair=True),
    "long_prefill": Case(70, 2, 2, 64, 264, 128, dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_op_equals_each_pairs_product(name):
    assert_equal_products(product(moe_gemm, CASES[name]), by_hand(CASES[name]), CASES[name])


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_twin(kernel_device, name):
    case = CASES[name]
    found = product(moe_gemm_triton, case, kernel_device)
    assert_equal_products(found, product(moe_gemm_torch, case), case)


@pytest.mark.kernel
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("group_blocks", [1, 2, 8])
def test_configurations_change_no_result(kernel_device, group_blocks, swapped):
    """Groups that do not divide the number of blocks, more tiles than one in N and in K."""
    case = Case(37, 2, 6, 72, 80, 16)
    config = MoeGemmConfig(32, 32, 4, 2, group_blocks, swapped)
    found = product(lambda *inputs: launch_moe_gemm(config, *inputs), case, kernel_device)
    assert_equal_products(found, by_hand(case), case)


def check_bits_survive(op, device, case: Case) -> None:
    """A row keeps its bits beside rows of NaN and where other rows have other experts.

    Other experts move a pair within its block, which may change what a library product gives
    (the twin's, the interpreter's): that is asked of unsorted pairs and of the GPU alone.
    """
    pairs_may_move = device.type == "cuda" or not case.block_size_m
    before = product(op, case, device)
    assert torch.equal(before.nan_to_num(), product(op, case, device).nan_to_num())
    x, weight, ids, pairs_per_row = case.inputs()
    weight, rows = weight.nan_to_num().to(device), case.top_k // pairs_per_row
    for kept in (0, case.tokens // 2):
        mine = slice(kept * case.top_k, (kept + 1) * case.top_k)
        alone, others = torch.full_like(x, NAN), ids.clone()
        if pairs_may_move:
            others = (ids + 1) % case.experts
        alone[kept * rows : (kept + 1) * rows] = x[kept * rows : (kept + 1) * rows]
        others[kept] = ids[kept]
        buffers = sorted_pairs(others, case.block_size_m, case.experts)
        buffers = [None if buffer is None else buffer.to(device) for buffer in buffers]
        out = torch.full((ids.numel(), case.out_features), NAN, dtype=case.dtype, device=device)
        inputs = (alone.to(device), weight, others.to(device), *buffers)
        op(*inputs, case.block_size_m, pairs_per_row, out)
        assert torch.equal(before[mine].nan_to_num(), out[mine].cpu().nan_to_num())


@pytest.mark.parametrize("name", ["unsorted", "half_idle", "prefill_down"])
def test_twin_bits_survive_neighbours(name):
    check_bits_survive(moe_gemm_torch, torch.device("cpu"), CASES[name])


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["unsorted", "half_idle", "prefill"])
def test_kernel_bits_survive_neighbours(kernel_device, name):
    check_bits_survive(moe_gemm_triton, kernel_device, CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size_m", [0, *BLOCK_SIZES_M])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "in_features", "out_features"),
    [(1, 8, 12, 2048, 768), (17, 2, 8, 1000, 200), (130, 10, 160, 384, 136), (257, 1, 6, 96, 64)],
)
@pytest.mark.parametrize("per_pair", [False, True])
def test_every_way_on_larger_shapes_matches_twin(
    tokens, top_k, experts, in_features, out_features, block_size_m, per_pair, dtype
):
    case = Case(
        tokens, top_k, experts, in_features, out_features, block_size_m, per_pair, "any", dtype
    )
    found = product(moe_gemm_triton, case, "cuda")
    # The twin on the GPU, whose float32 products are not TF32.
    assert not torch.backends.cuda.matmul.allow_tf32
    assert_equal_products(found, product(moe_gemm_torch, case, "cuda"), case)


def test_block_size_is_a_function_of_shapes():
    sizes = {pairs: moe_block_size_m(pairs, 128) for pairs in (8, 1024, 2049, 16384, 65536)}
    assert sizes == {8: 16, 1024: 16, 2049: 64, 16384: 64, 65536: 128}
    assert moe_block_size_m(2, 1) == 16


def every_config() -> dict[tuple[int, int, int], MoeGemmConfig]:
    """The table's entries, and what stands in where it has none, by (block_size_m, N, K)."""
    configs = {
        (block_m, 200, 1000): moe_gemm_config(block_m, 1000, 200, 2)
        for block_m in (0, *BLOCK_SIZES_M)
    }
    return configs | tables._BY_SHAPE


@pytest.mark.parametrize("place", every_config())
def test_configurations_fit_every_target(place):
    """In shared memory too: 163 KiB a block on sm_80, 227 on the later two."""
    config = every_config()[place]
    block_m = place[0]
    if block_m:
        assert config.shared_bytes(block_m, 2) <= 163 * 1024


def test_configurations_take_what_the_card_has(monkeypatch):
    config, device = MoeGemmConfig(128, 64, 8, 4), torch.device("cpu")
    assert fitted(config, 128, 2, device) == config
    monkeypatch.setattr(tables, "_shared_memory", lambda device: 99 * 1024)
    assert fitted(config, 128, 2, device) == replace(config, num_stages=3)


@pytest.mark.parametrize("place", every_config())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_for_every_target(place, dtype):
    block_size_m, out_features, in_features = place
    if dtype == torch.float32 and (out_features != 200 or block_size_m in (16, 128)):
        pytest.skip("one configuration serves all of float32's shapes and blocks")
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    buffers = sorted_pairs(ids, block_size_m, 2)
    x = torch.zeros(2, in_features, dtype=dtype)
    weight = torch.zeros(2, out_features, in_features, dtype=dtype)
    out = torch.zeros(4, out_features, dtype=dtype)
    assert compile_launches(moe_gemm_triton, x, weight, ids, *buffers, block_size_m, 2, out) == 1


def test_launcher_refuses_what_the_kernels_do_not_read():
    x, weight, ids, pairs_per_row = CASES["odd"].inputs()
    out = torch.zeros(10, 33, dtype=torch.float16)
    buffers = sorted_pairs(ids, 16, 6)
    with pytest.raises(AssertionError, match="x has shape"):
        moe_gemm_triton(x[:-1], weight, ids, *buffers, 16, pairs_per_row, out)
    with pytest.raises(AssertionError, match="out is"):
        moe_gemm_triton(x, weight, ids, *buffers, 16, pairs_per_row, out.float())
    with pytest.raises(AssertionError, match="come together"):
        moe_gemm_triton(x, weight, ids, *buffers[:2], None, 16, pairs_per_row, out)
    with pytest.raises(AssertionError, match="block_size_m 32"):
        moe_gemm_triton(x, weight, ids, *buffers, 32, pairs_per_row, out)
    transposed = torch.zeros(6, 50, 33, dtype=torch.float16).transpose(1, 2)
    with pytest.raises(AssertionError, match="last dim"):
        moe_gemm_triton(x, transposed, ids, *buffers, 16, pairs_per_row, out)
    with pytest.raises(AssertionError, match="pairs, 3 a row"):
        moe_gemm_triton(x, weight, ids, *buffers, 16, 3, out)
