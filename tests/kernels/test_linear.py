"""The base product: twin and kernel against float64, in tiles that do not divide the shapes."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernels.linear import launch_linear, linear, linear_torch, linear_triton
from kernels.linear_config import (
    H200,
    MAX_ROWS,
    LinearConfig,
    linear_config,
    linear_splits,
    tiles_for,
)
from tests.kernels.cross_compile import compile_launches

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """`splits` 0: out is [T, N] of the dtype; otherwise so many partials."""

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.float16
    biased: bool = False
    splits: int = 0

    def inputs(self, device: str | torch.device = "cpu") -> list[torch.Tensor | None]:
        """x, weight and bias as parts of wider buffers, with NaN where none of them lies."""
        generator = torch.Generator().manual_seed(self.tokens)
        x = torch.full((self.tokens + 1, self.in_features + 8), torch.nan, dtype=self.dtype)
        values = torch.randn(self.tokens, self.in_features, generator=generator)
        x[:-1, : self.in_features] = values
        weight = torch.full(
            (self.out_features + 1, self.in_features + 16), torch.nan, dtype=self.dtype
        )
        values = torch.randn(self.out_features, self.in_features, generator=generator)
        weight[:-1, : self.in_features] = values / self.in_features**0.5
        bias = torch.full((self.out_features + 1,), torch.nan, dtype=self.dtype)
        bias[:-1] = torch.randn(self.out_features, generator=generator)
        return [
            x.to(device)[:-1, : self.in_features],
            weight.to(device)[:-1, : self.in_features],
            bias.to(device)[:-1] if self.biased else None,
        ]

    def by_hand(self) -> torch.Tensor:
        x, weight, bias = self.inputs()
        expected = x.double() @ weight.double().t()
        return expected if bias is None else expected + bias.double()

    def poisoned_out(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """[..., T, N] with a margin of rows and columns: see `product`."""
        rows, columns = self.tokens + 2, self.out_features + 8
        if self.splits:
            return torch.full((self.splits, rows, columns), torch.nan, device=device)
        return torch.full((rows, columns), torch.nan, dtype=self.dtype, device=device)


def product(op, case: Case, device: str | torch.device = "cpu", inputs=None) -> torch.Tensor:
    """What `op` writes, on the CPU; that it leaves the margins alone is checked."""
    wide = case.poisoned_out(device)
    op(*(inputs or case.inputs(device)), wide[..., : case.tokens, : case.out_features])
    assert wide[..., case.tokens :, :].isnan().all()
    assert wide[..., case.out_features :].isnan().all()
    return wide[..., : case.tokens, : case.out_features].cpu()


def assert_is_product(found: torch.Tensor, case: Case) -> None:
    """Within float32's roundings of the sum, and one of the dtype unless left in partials."""
    rounded = torch.float32 if case.splits else case.dtype
    rtol = 1e-5 if rounded == torch.float32 else torch.finfo(rounded).eps
    atol = 1e-5 + 1e-6 * case.in_features**0.5
    found = found.double().sum(0) if case.splits else found.double()
    assert_close(found, case.by_hand(), rtol=rtol, atol=atol)


def small_tiles(case: Case) -> LinearConfig:
    """Narrow enough that small shapes have several tiles, and blocks of K."""
    width = case.out_features if case.tokens <= MAX_ROWS else 28672  # of the few that have any
    config = tiles_for(case.tokens, width, 1024, H200)
    assert config is not None
    return replace(config, block_n=32, block_k=32)


def in_small_tiles(case: Case):
    return lambda *arguments: launch_linear(small_tiles(case), *arguments)


def runs_here(case: Case, device: torch.device) -> None:
    if case.dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's dot takes bfloat16 for integers")


F32, BF16 = torch.float32, torch.bfloat16
TWIN_CASES = {
    "one_row": Case(1, 56, 96, F32),
    "bias": Case(5, 56, 96, F32, biased=True),
    "one_row_bf16": Case(1, 56, 96, BF16, biased=True),
    "bf16": Case(7, 56, 96, BF16),
    "f16": Case(3, 56, 96, biased=True),
    "many_rows": Case(70, 56, 96, F32),
    "partials": Case(3, 56, 96, splits=3, biased=True),
    "partials_bf16": Case(3, 56, 96, BF16, splits=2),
    "one_partial": Case(3, 56, 96, F32, splits=1),
}
CASES = {
    "one_row": Case(1, 64, 128),
    "one_row_bf16": Case(1, 64, 128, BF16, biased=True, splits=2),
    "odd_width": Case(8, 77, 160, biased=True),
    "odd_depth": Case(3, 64, 104),
    "odd_both": Case(16, 45, 72, BF16, biased=True),
    "bias": Case(5, 96, 64, biased=True),
    "seventeen": Case(17, 70, 64),
    "thirty_two": Case(32, 33, 96),
    "thirty_three": Case(33, 64, 40, biased=True),
    "sixty_four": Case(64, 50, 64, BF16),
    "a_hundred": Case(100, 40, 96, biased=True),
    "one_partial": Case(4, 64, 96, splits=1),
    "two_partials": Case(8, 40, 128, biased=True, splits=2),
    "uneven_partials": Case(6, 64, 104, biased=True, splits=3),
    "four_partials": Case(40, 64, 256, splits=4),
    "more_partials_than_blocks": Case(2, 32, 64, splits=4),
}


@pytest.mark.parametrize("name", TWIN_CASES)
def test_twin_matches_float64(name):
    assert_is_product(product(linear, TWIN_CASES[name]), TWIN_CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one_row", "bias", "one_row_bf16", "bf16", "f16", "many_rows"])
def test_matches_float64_on_the_gpu(name):
    assert_is_product(product(linear, TWIN_CASES[name], "cuda"), TWIN_CASES[name])


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_twin_and_float64(kernel_device, name):
    case = CASES[name]
    runs_here(case, kernel_device)
    found = product(in_small_tiles(case), case, kernel_device)
    assert_is_product(found, case)
    twin = product(linear_torch, case)
    if case.splits:
        found, twin = found.sum(0), twin.sum(0)
    # Neighbours of the dtype at most: both are one rounding away from the same sum.
    eps = 1e-5 if case.splits else torch.finfo(case.dtype).eps
    assert_close(found.double(), twin.double(), rtol=2 * eps, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "case", [Case(8, 130, 256, biased=True), Case(33, 100, 512, splits=2), Case(64, 64, 136)]
)
def test_launcher_in_its_own_tiles(kernel_device, case):
    if kernel_device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the library's there")
    assert_is_product(product(linear_triton, case, kernel_device), case)


@pytest.mark.kernel
def test_partials_are_products_over_equal_ranges(kernel_device):
    case = Case(3, 40, 128, biased=True, splits=2)
    x, weight, bias = case.inputs()
    found = product(in_small_tiles(case), case, kernel_device).double()
    first = x[:, :64].double() @ weight[:, :64].double().t() + bias.double()
    assert_close(found[0], first, rtol=1e-5, atol=1e-5)
    second = x[:, 64:].double() @ weight[:, 64:].double().t()
    assert_close(found[1], second, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("case", [Case(9, 70, 96, biased=True), Case(40, 64, 128, splits=2)])
def test_bits_survive_neighbours_and_stages(kernel_device, case):
    """A row keeps its bits beside rows of NaN; on the GPU also in another place."""
    before = product(in_small_tiles(case), case, kernel_device)
    shallow = replace(small_tiles(case), num_stages=1)
    again = product(lambda *arguments: launch_linear(shallow, *arguments), case, kernel_device)
    assert torch.equal(before, again)
    x, weight, bias = case.inputs(kernel_device)
    for kept in (0, case.tokens // 2, case.tokens - 1):
        alone = torch.full_like(x, torch.nan)
        alone[kept] = x[kept]
        inputs = [alone, weight, bias]
        after = product(in_small_tiles(case), case, kernel_device, inputs)
        assert torch.equal(before[..., kept, :], after[..., kept, :])
    if kernel_device.type == "cuda":
        order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(1))
        inputs = [x[order.to(kernel_device)], weight, bias]
        after = product(in_small_tiles(case), case, kernel_device, inputs)
        assert torch.equal(before[..., order, :], after)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "out_features", "in_features"),
    [(1, 6144, 4096), (8, 2048, 4096), (20, 4096, 4096), (64, 1000, 1032), (5, 40000, 512)],
)
@pytest.mark.parametrize("partials", [False, True])
def test_larger_shapes_on_the_gpu(tokens, out_features, in_features, dtype, partials):
    device = torch.device("cuda", torch.cuda.current_device())
    splits = linear_splits(tokens, out_features, in_features, dtype, device) if partials else 0
    if linear_config(tokens, out_features, in_features, dtype, device) is None:
        pytest.skip("the library's here")
    case = Case(tokens, out_features, in_features, dtype, biased=True, splits=splits)
    assert_is_product(product(linear_triton, case, device), case)


SHAPES = [(6144, 4096), (4096, 4096), (2048, 4096), (4096, 14336), (28672, 4096), (576, 576)]
BLACKWELL = replace(H200, capability=(10, 0))


def test_configuration_is_a_function_of_shapes():
    def tiles(tokens, card):
        configs = [tiles_for(tokens, *shape, card) for shape in SHAPES]
        return [c and (c.block_n, c.num_stages, c.splits) for c in configs]

    few = [(64, 5, 1), (64, 5, 2), (64, 5, 4), (64, 5, 2), (64, 4, 1), (64, 5, 1)]
    assert tiles(8, BLACKWELL) == few
    assert tiles(128, BLACKWELL) == [None, None, None, None, (128, 5, 1), None]
    few = [(64, 11, 1), (64, 11, 2), (64, 11, 4), (64, 11, 2), (64, 5, 1), (64, 11, 1)]
    assert tiles(8, H200) == few
    many = [(64, 4, 1), (64, 4, 2), (64, 4, 4), (64, 4, 2), (128, 3, 1), None]
    assert tiles(65, H200) == tiles(128, H200) == many
    assert tiles(129, H200) == tiles(129, BLACKWELL) == [None] * 6
    for tokens, card in ((65, H200), (65, BLACKWELL)):
        assert tiles_for(tokens, 128256, 4096, card) is None
    rows = [tiles_for(tokens, 4096, 4096, H200) for tokens in (1, 16, 17, 33, 64, 65)]
    assert [config.block_m for config in rows if config] == [16, 16, 32, 64, 64, 128]
    assert tiles_for(8, 4096, 4092, H200) is None
    assert tiles_for(8, 4096, 4096, replace(H200, capability=(8, 9))) is None
    small = tiles_for(64, 4096, 4096, replace(H200, shared_bytes=99 * 1024))
    assert small is not None
    assert small.shared_bytes <= 99 * 1024
    assert linear_config(8, 4096, 4096, torch.float32, CPU) is None
    assert linear_splits(8, 4096, 4096, torch.float32, CPU) == 1
    assert linear_splits(8, 4096, 4096, torch.bfloat16, CPU) == 2


def test_stages_let_programs_run_at_once():
    config = LinearConfig(64, 64, 128, 4, 5)
    assert H200.fitted(config, 132).num_stages == 5
    halved = H200.fitted(config, 133)
    assert halved.num_stages == 3
    assert 2 * (halved.shared_bytes + 1024) <= H200.shared_bytes + 1024


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 130, 256, BF16, biased=True),
        Case(32, 64, 1024, splits=1),
        Case(64, 128, 2048, BF16, splits=2),
    ],
)
def test_compiles_for_every_target(case):
    out = case.poisoned_out()[..., : case.tokens, : case.out_features]
    assert compile_launches(linear_triton, *case.inputs(), out) == 1


def test_refuses_what_does_not_fit():
    x, weight, out = torch.ones(2, 8), torch.ones(4, 8), torch.empty(2, 4)
    with pytest.raises(AssertionError, match="weight is"):
        linear(x, torch.ones(4, 9), None, out)
    with pytest.raises(AssertionError, match="out is"):
        linear(x, weight, None, torch.empty(2, 5))
    with pytest.raises(AssertionError, match="bias is"):
        linear(x, weight, torch.ones(5), out)
    with pytest.raises(AssertionError, match="differ"):
        linear(x, weight.half(), None, out)
    with pytest.raises(AssertionError, match="out is"):
        linear(x.half(), weight.half(), None, torch.empty(2, 2, 4, dtype=torch.float16))
    with pytest.raises(AssertionError, match="the library computes"):
        linear_triton(x, weight, None, torch.empty(2, 2, 4))
    with pytest.raises(AssertionError, match="rows, but tiles"):
        launch_linear(LinearConfig(1, 32, 32, 4, 1), x, weight, None, out)
