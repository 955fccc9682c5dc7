"""The product and x A^T of one launch: against linear and sgemm_a, each by itself."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernels.linear import launch_linear, linear_torch
from kernels.linear_choice import candidates
from kernels.linear_config import (
    H200,
    MAX_ROWS,
    LinearConfig,
    Product,
    card,
    linear_config,
    row_bucket,
    tiles_for,
)
from kernels.linear_shrink import (
    launch_linear_shrink,
    linear_shrink,
    linear_shrink_torch,
    linear_shrink_triton,
)
from kernels.lora_segments import shrink_split_k
from kernels.sgemm import sgemm_a_torch, sgemm_a_triton
from tests.kernels.cross_compile import compile_launches
from tests.kernels.packed_adapters import PackedAdapters, metadata_of, pack_adapters

F16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """rows[t] is row t's slot, ranks[j][slot] a slice's rank; `splits` 0: out is no partials."""

    rows: list[int]
    ranks: list[list[int]]
    out_features: int
    in_features: int
    max_rank: int
    shrunk_splits: int
    splits: int = 0
    biased: bool = False
    dtype: torch.dtype = F16
    arena_dtype: torch.dtype | None = None
    disabled: tuple[int, ...] = ()

    @property
    def config(self) -> LinearConfig:
        """Tiles narrow enough that there are several, in N and in K."""
        width = self.out_features if len(self.rows) <= MAX_ROWS else 28672
        config = tiles_for(len(self.rows), width, 1024, H200)
        assert config is not None
        return replace(config, block_n=32, block_k=32)


@dataclass
class Run:
    """A case's tensors on a device; outputs start as NaN."""

    case: Case
    adapters: PackedAdapters
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    segments: dict[str, torch.Tensor]
    out: torch.Tensor
    shrunk: torch.Tensor
    arrivals: torch.Tensor

    @staticmethod
    def of(case: Case, device: str | torch.device = "cpu") -> "Run":
        generator = torch.Generator().manual_seed(2)
        tokens, stack = len(case.rows), len(case.ranks)
        widths = [4] * stack  # of B, which nothing here reads
        arena_dtype = case.arena_dtype or case.dtype
        adapters = pack_adapters(case.ranks, case.in_features, widths, arena_dtype)
        x = torch.full((tokens, case.in_features + 8), torch.nan, dtype=case.dtype)
        x[:, : case.in_features] = torch.randn(tokens, case.in_features, generator=generator)
        weight = torch.randn(case.out_features, case.in_features, generator=generator)
        bias = torch.randn(case.out_features, generator=generator).to(case.dtype)
        enabled = [-1 if slot in case.disabled else slot for slot in case.rows]
        shape = (case.splits, tokens) if case.splits else (tokens,)
        out_dtype = torch.float32 if case.splits else case.dtype
        out = torch.full((*shape, case.out_features + 8), torch.nan, dtype=out_dtype)
        shrunk = torch.full((case.shrunk_splits, tokens + 3, stack * case.max_rank), torch.nan)
        return Run(
            case,
            adapters.to(torch.device(device)),
            x.to(device)[:, : case.in_features],
            (weight / case.in_features**0.5).to(case.dtype).to(device),
            bias.to(device) if case.biased else None,
            metadata_of(enabled, len(case.ranks[0]), device),
            out.to(device)[..., : case.out_features],
            shrunk.to(device)[:, :tokens],
            torch.zeros(64, dtype=torch.int32, device=device),
        )

    @property
    def product(self) -> tuple:
        return self.x, self.weight, self.bias, self.out

    @property
    def lora(self) -> tuple:
        """What `linear_shrink` takes beside the product."""
        return self._lora("row_slot")

    @property
    def shrink(self) -> tuple:
        """What `sgemm_a` takes beside x."""
        return self._lora()

    def _lora(self, *more: str) -> tuple:
        tables = (self.adapters.a_ptrs, self.adapters.lora_ranks)
        names = ("seg_indptr", "weight_indices", "pair_row", "num_segments", *more)
        segments = [self.segments[name] for name in names]
        outputs = self.shrunk, self.arrivals
        return self.adapters.arena, *tables, *segments, self.case.max_rank, *outputs

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both outputs on the CPU, with what lies around them; of x A^T the sums."""
        assert not self.arrivals.any()
        return self.out._base.cpu(), self.shrunk._base[0].cpu()


def fused(case: Case, device: str | torch.device) -> Run:
    run = Run.of(case, device)
    launch_linear_shrink(case.config, *run.product, *run.lora)
    return run


def runs_here(case: Case, device: torch.device) -> None:
    if BF16 in (case.dtype, case.arena_dtype) and device.type == "cpu":
        pytest.skip("the interpreter's dot takes bfloat16 for integers")


MIXED = [16, 1, 5, 64]
CASES = {
    "one_row": Case([1], [[4, 5]], 64, 96, 8, 3, splits=2),
    "one_base_row": Case([-1], [[4, 5]], 40, 64, 8, 2),
    "qkv": Case([3, 1, -1, 0, 2], [MIXED, [0, 1, 5, 64], [8] * 4], 77, 128, 64, 2, biased=True),
    "qkv_bf16": Case([2, 1, 1], [[16] * 3] * 3, 64, 128, 16, 4, dtype=BF16),
    "gate_up": Case([row % 3 for row in range(20)], [[3, 16, 9]] * 2, 64, 96, 16, 1),
    "identical": Case([1] * 40, [[1, 64]], 33, 64, 64, 2, splits=4, biased=True),
    "disabled": Case([0, 1, 2, 1], [[4, 8, 16]], 32, 72, 16, 1, disabled=(1,)),
    "wide_adapters": Case([0, 1, -1], [[5, 16]], 64, 64, 16, 2, arena_dtype=torch.float32),
    "two_rank_tiles": Case([0, 1], [[70, 3]], 32, 64, 100, 1),
    "sixty_four": Case([row % 5 - 1 for row in range(64)], [MIXED] * 2, 40, 64, 64, 1, splits=1),
    "many_programs": Case([row % 9 - 1 for row in range(16)], [[2] * 8] * 3, 64, 384, 4, 12),
    "a_hundred": Case([row % 5 - 1 for row in range(100)], [[5, 2, 4, 8]] * 2, 40, 64, 8, 2),
}


@pytest.mark.parametrize("name", ["one_row", "qkv_bf16", "disabled", "wide_adapters"])
def test_twin_is_both_twins(name):
    run, alone = Run.of(CASES[name]), Run.of(CASES[name])
    linear_shrink(*run.product, *run.lora)
    linear_torch(*alone.product)
    sgemm_a_torch(alone.x, *alone.shrink)
    for found, expected in zip(run.results, alone.results, strict=True):
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_equals_linear_and_sgemm_a(kernel_device, name):
    """Bit for bit what either launch writes, and no more; x A^T near its twin's."""
    case = CASES[name]
    runs_here(case, kernel_device)
    run, alone, twin = fused(case, kernel_device), Run.of(case, kernel_device), Run.of(case)
    launch_linear(case.config, *alone.product)
    sgemm_a_triton(alone.x, *alone.shrink)
    linear_shrink_torch(*twin.product, *twin.lora)
    (out, shrunk), (alone_out, alone_shrunk) = run.results, alone.results
    assert torch.equal(out.nan_to_num(7), alone_out.nan_to_num(7))
    assert torch.equal(shrunk.nan_to_num(7), alone_shrunk.nan_to_num(7))
    twin_out, twin_shrunk = twin.results
    assert torch.equal(shrunk.isnan(), twin_shrunk.isnan()), "wrote other entries"
    assert_close(shrunk, twin_shrunk, rtol=1e-5, atol=2e-5, equal_nan=True)
    if case.splits:
        out, twin_out = out.sum(0), twin_out.sum(0)
    rtol = 1e-5 if case.splits else 2 * torch.finfo(case.dtype).eps
    assert_close(out, twin_out, rtol=rtol, atol=1e-5, equal_nan=True)


@pytest.mark.kernel
def test_either_order_of_programs_writes_the_same(kernel_device, monkeypatch):
    runs = []
    for rounds in (0, 1000):  # shrinks first, and last
        monkeypatch.setattr("kernels.linear_arrangement.SHRINK_ROUNDS", rounds)
        runs.append(fused(CASES["qkv"], kernel_device).results)
    for first, last in zip(*runs, strict=True):
        assert torch.equal(first.nan_to_num(7), last.nan_to_num(7))


@pytest.mark.kernel
def test_bits_survive_other_rows(kernel_device):
    case = CASES["gate_up"]
    before = fused(case, kernel_device)
    for kept in (0, 7, 19):
        after = Run.of(case, kernel_device)
        row = after.x[kept].clone()
        after.x.fill_(torch.nan)
        after.x[kept] = row
        launch_linear_shrink(case.config, *after.product, *after.lora)
        assert torch.equal(before.out[kept], after.out[kept])
        live = ~before.shrunk[0, kept].isnan()
        assert live.any()
        assert torch.equal(before.shrunk[0, kept][live], after.shrunk[0, kept][live])


@pytest.mark.kernel
def test_launcher_in_its_own_tiles(kernel_device):
    if kernel_device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the library's there")
    case = replace(CASES["qkv"], in_features=512, out_features=100)
    run, twin = Run.of(case, kernel_device), Run.of(case)
    linear_shrink_triton(*run.product, *run.lora)
    linear_shrink_torch(*twin.product, *twin.lora)
    rtol = 2 * torch.finfo(case.dtype).eps
    for found, expected in zip(run.results, twin.results, strict=True):
        found, expected = (t.sum(0) if t.dim() == 3 else t for t in (found, expected))
        assert_close(found, expected, rtol=rtol, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tokens", [1, 8, 20, 64])
@pytest.mark.parametrize(("stack", "out_features", "splits"), [(3, 6144, 0), (1, 2048, 4)])
def test_larger_shapes_on_the_gpu(tokens, stack, out_features, splits, dtype):
    rows = [row % 7 - 1 for row in range(tokens)]
    splits_of_k = shrink_split_k(tokens, 4096)
    case = Case(rows, [[16, 5, 64, 1, 33, 16]] * stack, out_features, 4096, 64, splits_of_k, splits)
    case = replace(case, dtype=dtype, biased=True)
    run, alone = Run.of(case, "cuda"), Run.of(case, "cuda")
    linear_shrink_triton(*run.product, *run.lora)
    config = linear_config(tokens, out_features, 4096, dtype, run.x.device)
    launch_linear(config, *alone.product)
    sgemm_a_triton(alone.x, *alone.shrink)
    for found, expected in zip(run.results, alone.results, strict=True):
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    linear_shrink_torch(*alone.product, *alone.lora)
    (_, shrunk), twin_shrunk = run.results, alone.results[1]
    assert_close(shrunk, twin_shrunk, rtol=1e-4, atol=2e-3, equal_nan=True)
    # Not the twin, which is the library here: it may sum its parts in 16 bits.
    x, weight, bias, found = run.product
    found = found.sum(0) if splits else found
    expected = x.double() @ weight.double().T + bias.double()
    rtol = 1e-4 if splits else torch.finfo(dtype).eps
    assert_close(found.double(), expected, rtol=rtol, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 20, 64, 100])
@pytest.mark.parametrize(("stack", "out_features"), [(2, 28672), (1, 4096)])
def test_every_candidate_has_the_bits_of_both_ops(tokens, stack, out_features):
    """Whichever of them is measured to be the best, x A^T beside it stays `sgemm_a`'s."""
    product = Product(row_bucket(tokens), out_features, 4096, BF16)
    found = candidates(product, card(torch.device("cuda", 0)), takes_partials=stack == 1)
    for config in found:
        rows = [row % 7 - 1 for row in range(tokens)]
        shrunk_splits, splits = shrink_split_k(tokens, 4096), config.splits
        ranks = [[16, 5, 64, 1, 33, 16]] * stack
        out_splits = splits if splits > 1 else 0
        case = Case(rows, ranks, out_features, 4096, 64, shrunk_splits, out_splits, dtype=BF16)
        run, alone = Run.of(case, "cuda"), Run.of(case, "cuda")
        launch_linear_shrink(config, *run.product, *run.lora)
        launch_linear(config, *alone.product)
        sgemm_a_triton(alone.x, *alone.shrink)
        for together, apart in zip(run.results, alone.results, strict=True):
            assert torch.equal(together.nan_to_num(7), apart.nan_to_num(7)), config


@pytest.mark.parametrize(
    "case",
    [
        Case([0, 1] * 4, [[16, 16]] * 3, 256, 512, 16, 2, biased=True, dtype=BF16),
        Case([0, 1] * 16, [[16, 16]], 128, 2048, 64, 4, splits=2, dtype=F16),
        Case([0, 1] * 32, [[64, 16]] * 2, 100, 512, 64, 4, dtype=BF16, arena_dtype=torch.float32),
    ],
)
def test_compiles_for_every_target(case):
    run = Run.of(case)
    assert compile_launches(linear_shrink_triton, *run.product, *run.lora) == 1


@pytest.mark.parametrize(("tokens", "splits"), [(16, 2), (64, 0), (100, 4)])
def test_measured_tiles_compile(tokens, splits):
    """Those of eight warps, whatever the number of rows."""
    config = LinearConfig(max(16, row_bucket(tokens)), 128, 64, 8, 5, max(1, splits))
    case = Case([0, 1] * (tokens // 2), [[16, 16]], 256, 1024, 16, 2, splits, dtype=BF16)
    run = Run.of(case)
    assert compile_launches(launch_linear_shrink, config, *run.product, *run.lora) == 1


def test_refuses_what_has_no_kernel():
    run = Run.of(replace(CASES["one_row"], dtype=torch.float32))
    with pytest.raises(AssertionError, match="use linear and sgemm_a"):
        linear_shrink_triton(*run.product, *run.lora)
    run = Run.of(CASES["one_row"])
    narrow = replace(run, shrunk=run.shrunk[:, :, :-1])
    with pytest.raises(AssertionError, match="shrunk has shape"):
        linear_shrink_triton(*narrow.product, *narrow.lora)
