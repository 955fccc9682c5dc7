"""The product and x A^T in parts, by the same programs on Hopper."""

import re
import subprocess
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch.testing import assert_close
from triton.backends.nvidia.compiler import get_ptxas

from kernels.hopper_linear import launch_hopper_linear
from kernels.linear import linear_torch
from kernels.linear_arrangement import (
    bytes_of_ranks,
    parts_in_product,
    product_programs,
    rank_tiles,
)
from kernels.linear_choice import candidates
from kernels.linear_config import (
    BARRIER_BYTES,
    H200,
    LinearConfig,
    Product,
    row_bucket,
    tiles_for,
)
from kernels.linear_shrink_parts import (
    launch_linear_shrink_parts,
    linear_shrink_parts,
    linear_shrink_parts_triton,
)
from tests.kernels.cross_compile import compile_each
from tests.kernels.test_linear_shrink import BF16, F16, Case, Run

MIXED = [16, 5, 64, 1, 33, 16]


def rows_of(tokens: int, slots: int) -> list[int]:
    """Of every slot and of none."""
    return [row % (slots + 1) - 1 for row in range(tokens)]


@dataclass
class PartsRun:
    """A `Run` whose x A^T is in `parts`, with margins around rows and parts; all starts as NaN."""

    run: Run
    shrunk: torch.Tensor

    @staticmethod
    def of(case: Case, device: str = "cpu") -> "PartsRun":
        """`case.shrunk_splits` are the parts."""
        tokens, width = len(case.rows), len(case.ranks) * case.max_rank
        shape = (tokens + 2, case.shrunk_splits + 1, width + 4)
        shrunk = torch.full(shape, torch.nan, device=device)
        run = Run.of(replace(case, shrunk_splits=1), device)
        return PartsRun(run, shrunk[:tokens, : case.shrunk_splits, :width])

    @property
    def arguments(self) -> tuple:
        run = self.run
        tables = (run.adapters.a_ptrs, run.adapters.lora_ranks)
        names = ("seg_indptr", "weight_indices", "pair_row", "num_segments", "row_slot")
        segments = [run.segments[name] for name in names]
        adapters = (run.adapters.arena, *tables, *segments, run.case.max_rank)
        return *run.product, *adapters, self.shrunk

    @property
    def out(self) -> torch.Tensor:
        """With what lies around it."""
        return self.run.results[0]

    @cached_property
    def own(self) -> torch.Tensor:
        """[T, stack * max_rank]: the ranks of a row's own slot."""
        case = self.run.case
        own = torch.zeros(len(case.rows), len(case.ranks), case.max_rank, dtype=torch.bool)
        for row, slot in enumerate(case.rows):
            if slot >= 0 and slot not in case.disabled:
                for stacked, ranks in enumerate(case.ranks):
                    own[row, stacked, : ranks[slot]] = True
        return own.flatten(1)

    def sums(self) -> torch.Tensor:
        """float64 x A^T [T, stack * max_rank] where it is a row's own, else 0."""
        case, adapters = self.run.case, self.run.adapters
        sums = torch.zeros(len(case.rows), len(case.ranks), case.max_rank, dtype=torch.float64)
        x = self.run.x.cpu().double()
        for row, slot in enumerate(case.rows):
            for stacked, ranks in enumerate(case.ranks):
                if slot >= 0 and ranks[slot]:
                    a = adapters.a[stacked][slot].cpu().double()
                    sums[row, stacked, : ranks[slot]] = a @ x[row]
        return torch.where(self.own, sums.flatten(1), 0.0)

    def found(self) -> torch.Tensor:
        """The same from the parts."""
        total = self.shrunk.cpu().double().sum(dim=1)
        return torch.where(self.own, total, 0.0)


CASES = {
    "one_row": Case([1], [[4, 5]], 64, 512, 8, 2, splits=2),
    "one_base_row": Case([-1], [[4, 5]], 128, 256, 8, 1),
    "qkv": Case(rows_of(8, 6), [MIXED, MIXED[::-1], [0] * 6], 2304, 1024, 64, 1),
    "odd_width": Case(rows_of(7, 6), [MIXED], 1544, 512, 64, 2, biased=True),
    "odd_depth": Case(rows_of(5, 6), [MIXED], 1280, 1032, 64, 4, splits=2, biased=True),
    "more_parts_than_blocks": Case([0, 1], [[3, 9]], 640, 256, 9, 8, splits=4),
    "more_parts_than_steps": Case([0, 1], [[3, 9]], 896, 648, 9, 7),
    "rank_of_any_number": Case(rows_of(16, 5), [[7, 3, 11, 0, 2]] * 2, 768, 640, 11, 3),
    "one_slot": Case([0] * 16, [[16]] * 3, 768, 512, 16, 2),
    "largest_rank": Case(rows_of(4, 3), [[256, 1, 200]], 3072, 512, 256, 2),
    "many_slots": Case([13, 2, 2, 40, -1, 60], [list(range(1, 65))], 1544, 512, 64, 2),
    "disabled": Case(rows_of(16, 6), [MIXED] * 2, 1536, 512, 64, 1, disabled=(1, 4)),
    "twenty": Case(rows_of(20, 6), [MIXED], 1536, 1024, 64, 8, splits=4),
    "sixty": Case(rows_of(60, 6), [MIXED] * 3, 4608, 1024, 64, 2),
    "hundred": Case(rows_of(100, 6), [MIXED], 1600, 2048, 64, 4, splits=2, biased=True),
    "full": Case(rows_of(128, 6), [MIXED] * 3, 2600, 1032, 64, 1),
    "few_of_many": Case([-1] * 120 + [2] * 8, [MIXED], 840, 512, 64, 1),
}
TILES = [(64, 128, 4, 5), (64, 64, 4, 9), (128, 64, 4, 3), (128, 64, 8, 4)]


def config_of(case: Case, tiles: tuple[int, int, int, int]) -> LinearConfig:
    """With as many of its stages as there is room for."""
    config = LinearConfig(max(16, row_bucket(len(case.rows))), *tiles, max(1, case.splits))
    return H200.fitted(config, 1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bits, and what is not a number."""
    return torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_product_alone_and_the_sums(hopper, name, tiles, dtype):
    case = replace(CASES[name], dtype=dtype)
    config = config_of(case, tiles)
    run, again, alone = (PartsRun.of(case, "cuda") for _ in range(3))
    launch_linear_shrink_parts(config, *run.arguments)
    launch_linear_shrink_parts(config, *again.arguments)
    launch_hopper_linear(config, *alone.run.product)
    assert same(run.out, alone.out)
    assert same(run.shrunk._base, again.shrunk._base)
    assert_close(run.found(), run.sums(), rtol=1e-5, atol=2e-4)
    elsewhere = run.shrunk._base.cpu()
    inside = elsewhere[: len(case.rows), : case.shrunk_splits, : run.own.shape[1]]
    inside[run.own.unsqueeze(1).expand_as(inside)] = torch.nan
    assert elsewhere.isnan().all(), "wrote other entries"


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", ["qkv", "hundred"])
def test_bits_survive_other_rows_and_slots(hopper, name, tiles):
    """Alone, when its slot's ranks lie elsewhere in a tile, a row has the same bits as in a
    batch."""
    case = replace(CASES[name], dtype=BF16)
    config = config_of(case, tiles)
    before = PartsRun.of(case, "cuda")
    launch_linear_shrink_parts(config, *before.arguments)
    for kept in (1, 3, len(case.rows) - 1):
        slot = case.rows[kept]
        rows = [-1] * len(case.rows)
        rows[kept] = slot
        after = PartsRun.of(replace(case, rows=rows), "cuda")
        row = before.run.x[kept].clone()
        after.run.x.fill_(torch.nan)
        after.run.x[kept] = row
        launch_linear_shrink_parts(config, *after.arguments)
        own = before.own[kept].cuda()
        assert slot < 0 or own.any()
        assert torch.equal(before.shrunk[kept][:, own], after.shrunk[kept][:, own])
        assert torch.equal(before.run.out[..., kept, :], after.run.out[..., kept, :])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 100, 128])
@pytest.mark.parametrize("shape", [(6144, 4096, 3), (4096, 14336, 1), (28672, 4096, 2)])
def test_larger_shapes_on_the_gpu(hopper, rows, shape):
    """Launched as the engine does."""
    out_features, in_features, stack = shape
    config = tiles_for(rows, out_features, in_features, H200)
    splits = config.splits if stack == 1 else 1
    slots = (stack, 8, 16)
    parts = parts_in_product(config, out_features, in_features, splits, *slots, H200)
    ranks = [[16, 8, 5, 16, 0, 16, 1, 16]] * stack
    splits = splits if splits > 1 else 0
    case = Case(rows_of(rows, 8), ranks, out_features, in_features, 16, parts, splits, dtype=BF16)
    run, alone = PartsRun.of(case, "cuda"), PartsRun.of(case, "cuda")
    linear_shrink_parts(*run.arguments)
    launch_hopper_linear(config, *alone.run.product)
    assert same(run.out, alone.out)
    assert_close(run.found(), run.sums(), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("name", ["one_row", "odd_depth", "disabled"])
def test_twin(name):
    run, alone = PartsRun.of(CASES[name]), PartsRun.of(CASES[name])
    linear_shrink_parts(*run.arguments)
    linear_torch(*alone.run.product)
    assert same(run.out, alone.out)
    assert run.own.any()
    assert_close(run.found(), run.sums(), rtol=1e-4, atol=1e-4)


def compiled(case: Case, config: LinearConfig, monkeypatch):
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: True)
    arguments = (launch_linear_shrink_parts, config, *PartsRun.of(case).arguments)
    ((_, kernel),) = compile_each(*arguments, targets=(90,))
    return kernel


@pytest.mark.parametrize(
    ("name", "tiles", "dtype"),
    [
        ("one_row", (64, 128, 4, 11), BF16),
        ("odd_depth", (64, 128, 4, 5), BF16),
        ("sixty", (64, 128, 4, 3), F16),
        ("full", (64, 64, 4, 9), BF16),
        ("hundred", (128, 64, 4, 3), BF16),
        ("few_of_many", (128, 64, 8, 12), F16),
    ],
)
def test_compiles_into_the_shared_memory_of_its_stages(name, tiles, dtype, monkeypatch):
    case = replace(CASES[name], dtype=dtype)
    config = config_of(case, tiles)
    kernel = compiled(case, config, monkeypatch)
    programs = product_programs(config, case.out_features, max(1, case.splits))
    beside = bytes_of_ranks(config)
    most = H200.fitted(config, programs, beside).shared_bytes + beside
    assert most <= kernel.metadata.shared <= most + BARRIER_BYTES
    assert kernel.metadata.shared <= H200.shared_bytes


def test_asks_for_weights_before_it_waits(monkeypatch):
    """Blocks of W of all stages but one, and where a program has ranks one of A by its lanes."""
    config = LinearConfig(16, 64, 128, 4, 5)
    code = compiled(replace(CASES["qkv"], dtype=BF16), config, monkeypatch).asm["ptx"]
    asked = []
    for before in code.split("griddepcontrol.wait")[:-1]:
        tile = before[max(before.rfind("wgmma.wait_group"), before.rfind("mbarrier.init")) :]
        blocks = len(re.findall(r"cp\.async\.bulk\.tensor", tile))
        asked.append((blocks, len(re.findall(r"cp\.async\.cg", tile))))
    ahead, copies = config.num_stages - 1, 64 * 128 // 8 // 128  # of 8 elements a lane
    assert sorted(asked) == [(ahead, 0), (ahead, copies)]


@pytest.mark.parametrize("name", ["one_row", "hundred", "full"])
def test_products_follow_one_another(name, monkeypatch):
    """ptxas warns where it lets each wait for the one before."""
    case = replace(CASES[name], dtype=BF16)
    code = compiled(case, config_of(case, (64, 128, 4, 4)), monkeypatch).asm["ptx"]
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", "-", "-o", "/dev/null"]
    said = subprocess.run(command, input=code, capture_output=True, text=True, check=True).stderr
    assert "registers" in said
    assert "serialized" not in said


def test_waits_for_the_products_whose_stages_are_filled_next(monkeypatch):
    """One step's is left in flight, or of both products one step's each."""
    config = LinearConfig(16, 64, 128, 4, 5)
    code = compiled(replace(CASES["qkv"], dtype=BF16), config, monkeypatch).asm["ptx"]
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)|(griddepcontrol\.wait)", code)
    tiles = " ".join(count or "|" for count, _ in waits).split("|")
    assert sorted(tile.split() for tile in tiles if tile) == [
        ["1", "0"],
        ["1", "0", "2", "0", "1", "0"],
    ]


@pytest.mark.parametrize("tiles", [(64, 128, 4, 5), (128, 64, 8, 4), (64, 128, 4, 3)])
@pytest.mark.parametrize("name", ["qkv", "sixty", "full"])
def test_stages_are_free_before_anything_else_lies_there(name, tiles, monkeypatch):
    """A warp may be through with the last product while another still multiplies."""
    case = replace(CASES[name], dtype=BF16)
    code = compiled(case, config_of(case, tiles), monkeypatch).asm["ptx"]
    last = r"wgmma\.wait_group\.sync\.aligned\s+0"
    ends = [code[match.end() :] for match in re.finditer(last, code)]
    assert len(ends) == 4  # with ranks before and after the steps that multiply them too
    for end in ends:
        first = re.search(r"bar\.sync|st\.shared|stmatrix", end)
        assert first is not None
        assert first.group() == "bar.sync"


def parts_of(rows, shape, stack, max_loras, max_rank, partials=0, card=H200):
    config = tiles_for(rows, *shape, card)
    partials = partials or (config.splits if config else 1)
    return parts_in_product(config, *shape, partials, stack, max_loras, max_rank, card)


def test_how_many_parts_there_are():
    assert parts_of(128, (6144, 4096), 3, 8, 16) == 8
    assert parts_of(128, (4096, 4096), 1, 8, 16) == 8  # of which each split has four
    assert parts_of(128, (4096, 14336), 1, 8, 16) == 32  # 28 of which have something to do
    assert parts_of(128, (28672, 4096), 2, 8, 16) == 8
    assert parts_of(128, (4096, 28672), 1, 8, 16) == 32, "not more than can be read"
    assert parts_of(128, (6144, 4096), 3, 8, 64) == 4, "a program has one part of one tile"
    assert parts_of(128, (6144, 4096), 3, 64, 256) == 0
    assert parts_of(128, (4096, 4096), 1, 200, 16) == 4, "not more segments than rows"
    assert parts_of(64, (4096, 4096), 1, 8, 16) == 0, "programs of its own"
    assert parts_of(200, (4096, 4096), 1, 8, 16) == 0, "the library's"
    assert parts_of(128, (4096, 4096), 1, 8, 16, card=replace(H200, capability=(10, 0))) == 0
    assert parts_of(128, (3072, 2048), 3, 8, 16, partials=1) == 0, "the library's there"
    narrow = LinearConfig(128, 32, 128, 4, 3)
    assert parts_in_product(narrow, 4096, 4096, 1, 1, 8, 16, H200) == 0


@pytest.mark.parametrize("max_rank", [1, 16, 100, 256])
@pytest.mark.parametrize("max_loras", [1, 8, 66, 256])
@pytest.mark.parametrize("shape", [(3, 6144, 4096), (1, 2048, 6144), (2, 28672, 4096), (1, 64, 64)])
def test_each_part_has_a_program_and_all_rows_one_number_of_them(shape, max_loras, max_rank):
    stack, *size = shape
    for partials in (1, 2, 4):
        (parts,) = {
            parts_of(rows, size, stack, max_loras, max_rank, partials) for rows in range(65, 129)
        }
        assert parts in (0, 1, 2, 4, 8, 16, 32)
        assert parts % partials == 0
        if parts:
            config = tiles_for(128, *size, H200)
            tiles = rank_tiles(config, min(128, max_loras), stack, max_rank)
            assert parts * tiles <= product_programs(config, size[0], partials)


@pytest.mark.parametrize("hidden", [2048, 2304, 3584, 4096])
def test_measured_choices_have_room_for_blocks_of_a(hidden):
    """Or no parts."""
    found = []
    for width in (4096, 14336):
        for config in candidates(Product(128, hidden, width, BF16), H200, takes_partials=True):
            shape = (hidden, width, config.splits)
            found.append(parts_in_product(config, *shape, 1, 8, 16, H200))
            programs = product_programs(config, hidden, config.splits)
            stages = H200.fitted(config, programs, beside=bytes_of_ranks(config)).num_stages
            assert stages >= 2 or found[-1] == 0
    assert any(found)


def test_refuses_tiles_without_room(monkeypatch):
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: True)
    case = Case([0] * 100, [[16] * 8], 4096, 4096, 16, 8, splits=4, dtype=BF16)
    config = LinearConfig(128, 64, 128, 4, 2, 4)
    with pytest.raises(AssertionError, match="no room for A"):
        launch_linear_shrink_parts(config, *PartsRun.of(case).arguments)
    slots = (1, 8, 16)
    assert parts_in_product(config, 4096, 4096, 4, *slots, H200) == 0


def test_refuses_what_is_not_hoppers(monkeypatch):
    run = PartsRun.of(replace(CASES["one_row"], dtype=BF16))
    with pytest.raises(AssertionError, match="use linear and sgemm_a"):
        linear_shrink_parts_triton(*run.arguments)
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: True)
    for change, words in (
        ({"shrunk": run.shrunk[:, :, :-1]}, "shrunk has shape"),
        ({"shrunk": run.shrunk[:, 0]}, "shrunk has 2 dims"),
        ({"shrunk": run.shrunk[:, :1]}, "shrunk has 1 parts, out 2 splits"),
        ({"shrunk": torch.zeros(1, 64, 8)}, "64 parts of tiles of x A.T, but 2 programs"),
    ):
        with pytest.raises(AssertionError, match=words):
            linear_shrink_parts_triton(*replace(run, **change).arguments)
    wide = PartsRun.of(replace(CASES["one_row"], dtype=BF16, arena_dtype=torch.float32))
    with pytest.raises(AssertionError, match="float32 adapters"):
        linear_shrink_parts_triton(*wide.arguments)
