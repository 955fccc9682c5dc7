"""Hopper's product and x A^T: to the bit what Triton's kernels compute, with weights asked for
before the wait."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.hopper_linear import is_for_hopper, launch_hopper_linear, launch_hopper_linear_shrink
from kernels.linear import launch_linear, linear_triton
from kernels.linear_arrangement import Arrangement, rank_programs, splits_in_launch
from kernels.linear_choice import candidates
from kernels.linear_config import H200, LinearConfig, Product, row_bucket, tiles_for
from kernels.linear_shrink import launch_linear_shrink
from tests.kernels.cross_compile import compile_each
from tests.kernels.test_linear_shrink import BF16, F16, Case, Run

CPU = torch.device("cpu")
MIXED = [16, 5, 64, 1, 33, 16]
NARROW = LinearConfig(16, 64, 128, 4, 5)
WIDE = LinearConfig(128, 128, 64, 4, 3)


def rows_of(tokens: int, slots: int) -> list[int]:
    """Of every slot and of none."""
    return [row % (slots + 1) - 1 for row in range(tokens)]


CASES = {
    "one_row": Case([1], [[4, 5]], 64, 512, 8, 3, splits=2),
    "one_base_row": Case([-1], [[4, 5]], 128, 256, 8, 2),
    "qkv": Case(rows_of(8, 6), [MIXED, MIXED[::-1], [0] * 6], 192, 1024, 64, 4),
    "odd_width": Case(rows_of(7, 6), [MIXED], 200, 512, 64, 2, biased=True),
    "odd_depth": Case(rows_of(5, 6), [MIXED], 128, 1032, 64, 3, splits=2, biased=True),
    "more_splits_than_blocks": Case([0, 1], [[3, 9]], 64, 256, 9, 8, splits=4),
    "rank_of_any_number": Case(rows_of(16, 5), [[7, 3, 11, 0, 2]] * 2, 64, 640, 11, 2),
    "one_slot": Case([0] * 16, [[16]] * 3, 64, 512, 16, 4),
    "largest_rank": Case(rows_of(4, 3), [[256, 1, 200]], 64, 512, 256, 4),
    "many_slots": Case([13, 2, 2, 40, -1, 60], [list(range(1, 65))], 64, 512, 64, 4),
    "disabled": Case(rows_of(16, 6), [MIXED] * 2, 64, 512, 64, 2, disabled=(1, 4)),
    "twenty": Case(rows_of(20, 6), [MIXED], 64, 1024, 64, 4, splits=4),
    "sixty": Case(rows_of(60, 6), [MIXED] * 3, 192, 1024, 64, 4),
    "hundred": Case(rows_of(100, 6), [MIXED], 192, 2048, 64, 2, splits=2, biased=True),
    "full": Case(rows_of(128, 6), [MIXED] * 3, 200, 1032, 64, 2),
    "few_of_many": Case([-1] * 120 + [2] * 8, [MIXED], 64, 512, 64, 2),
}
TILES = [(64, 128, 4, 5), (64, 64, 4, 9), (128, 64, 4, 3), (128, 64, 8, 4)]


def config_of(case: Case, tiles: tuple[int, int, int, int]) -> LinearConfig:
    """With as many of its stages as there is room for."""
    config = LinearConfig(max(16, row_bucket(len(case.rows))), *tiles, max(1, case.splits))
    return H200.fitted(config, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_tritons_kernels(name, tiles, dtype, monkeypatch):
    """Whichever programs come first."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper")
    case = replace(CASES[name], dtype=dtype)
    config = config_of(case, tiles)
    runs = [Run.of(case, "cuda") for _ in range(4)]
    assert is_for_hopper(config, runs[0].x, runs[0].weight, runs[0].adapters.arena)
    for rounds, run in zip((0, 1000), runs, strict=False):
        monkeypatch.setattr("kernels.linear_arrangement.SHRINK_ROUNDS", rounds)
        launch_linear_shrink(config, *run.product, *run.lora)
    launch_linear(config, *runs[2].product)
    for module in ("linear", "linear_shrink"):
        monkeypatch.setattr(f"kernels.{module}.is_for_hopper", lambda *_: False)
    launch_linear_shrink(config, *runs[3].product, *runs[3].lora)
    expected = runs[3].results
    for run in runs[:2]:
        for found, known in zip(run.results, expected, strict=True):
            assert torch.equal(found.nan_to_num(7), known.nan_to_num(7))
    assert torch.equal(runs[2].results[0].nan_to_num(7), expected[0].nan_to_num(7))


@pytest.mark.gpu
def test_waits_for_the_kernel_that_writes_x():
    """Behind one of its own kind, in a graph, where it comes up early."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper")
    generator = torch.Generator("cuda").manual_seed(1)
    shape = {"dtype": BF16, "device": "cuda", "generator": generator}
    weights = [torch.randn(4096, 4096, **shape) / 64 for _ in range(12)]
    first = torch.randn(8, 4096, **shape)
    config = tiles_for(8, 4096, 4096, H200)
    rows = [torch.full_like(first, torch.nan) for _ in weights]

    def chain():
        for x, weight, out in zip([first, *rows], weights, rows, strict=False):
            launch_linear(replace(config, splits=1), x, weight, None, out)

    chain()
    torch.cuda.synchronize()
    expected = [out.clone() for out in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for out in rows:
            out.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, rows, expected))


def compiled(case: Case, config: LinearConfig, shrinks: bool, shrink_first: bool = False):
    run = Run.of(case)
    if not shrinks:
        arguments = (launch_hopper_linear, config, *run.product)
    else:
        names = ("seg_indptr", "weight_indices", "row_slot")
        tables = (run.adapters.a_ptrs, run.adapters.lora_ranks)
        tables = (run.adapters.arena, *tables, *(run.segments[name] for name in names))
        arrangement = Arrangement(300, shrink_first, config)
        outputs = (case.max_rank, run.shrunk, run.arrivals)
        arguments = (launch_hopper_linear_shrink, arrangement, *run.product, *tables, *outputs)
    ((_, kernel),) = compile_each(*arguments, targets=(90,))
    return kernel


@pytest.mark.parametrize(
    ("name", "tiles", "shrinks", "dtype"),
    [
        ("one_row", (64, 128, 4, 11), False, BF16),
        ("odd_depth", (64, 128, 4, 5), True, BF16),
        ("sixty", (64, 128, 4, 3), True, F16),
        ("full", (64, 64, 4, 9), True, BF16),
        ("hundred", (128, 64, 4, 3), True, BF16),
        ("odd_width", (128, 64, 8, 12), False, F16),
    ],
)
def test_compiles_into_the_shared_memory_of_its_stages(name, tiles, shrinks, dtype):
    case = replace(CASES[name], dtype=dtype)
    config = config_of(case, tiles)
    kernel = compiled(case, config, shrinks, shrink_first=case.splits > 0)
    barriers = 8 * config.num_stages
    assert config.shared_bytes <= kernel.metadata.shared <= config.shared_bytes + barriers + 16
    assert kernel.metadata.shared <= H200.shared_bytes


def test_asks_for_weights_before_it_waits():
    """Blocks of W in a product's tile, elements of A in an x A^T's: each of all stages but one."""
    config = LinearConfig(16, 64, 128, 4, 5)
    code = compiled(replace(CASES["qkv"], dtype=BF16), config, shrinks=True).asm["ptx"]
    asked = []
    for before in code.split("griddepcontrol.wait")[:-1]:
        tile = before[before.rfind("mbarrier.init") :]
        if "mbarrier.init" in tile and "wgmma.mma_async" not in tile:
            blocks = len(re.findall(r"cp\.async\.bulk\.tensor", tile))
            asked.append((blocks, len(re.findall(r"cp\.async\.cg", tile))))
    ahead, copies = config.num_stages - 1, 64 * 128 // 8 // 128  # of 8 elements a lane
    assert sorted(asked) == [(0, ahead * copies), (ahead, 0)]


@pytest.mark.parametrize("tiles", [(64, 128, 4, 5), (128, 64, 8, 4), (64, 128, 4, 3)])
@pytest.mark.parametrize("name", ["qkv", "sixty", "full"])
def test_stages_are_free_before_anything_else_lies_there(name, tiles):
    """A warp may be through with the last product while another still multiplies."""
    case = replace(CASES[name], dtype=BF16)
    code = compiled(case, config_of(case, tiles), shrinks=True).asm["ptx"]
    last = r"wgmma\.wait_group\.sync\.aligned\s+0"
    ends = [code[match.end() :] for match in re.finditer(last, code)]
    assert len(ends) == 2
    for end in ends:
        first = re.search(r"bar\.sync|st\.shared|stmatrix", end)
        assert first is not None
        assert first.group() == "bar.sync"


@pytest.mark.parametrize("rows", [1, 32, 64, 128])
def test_what_is_measured_compiles(rows, monkeypatch):
    """Every candidate for a product, in partials and not."""
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: True)
    found = {
        replace(config, splits=min(config.splits, 2))
        for shape in ((6144, 4096), (2048, 4096), (28672, 4096))
        for config in candidates(Product(rows, *shape, BF16), H200, takes_partials=True)
    }
    assert len(found) >= 3
    for config in found:
        case = Case([0] * rows, [[1]], 256, 1024, 1, 1, config.splits, dtype=BF16)
        if config.splits == 1:
            case = replace(case, splits=0)
        run = Run.of(case)
        assert is_for_hopper(config, run.x, run.weight)
        kernel = compiled(case, config, shrinks=False)
        assert kernel.metadata.shared <= H200.shared_bytes


def test_what_is_not_for_hopper(monkeypatch):
    config, x, weight = NARROW, torch.empty(4, 64, dtype=BF16), torch.empty(64, 64, dtype=BF16)
    assert not is_for_hopper(config, x, weight)
    monkeypatch.setattr("kernels.hopper_linear.runs_on", lambda device: True)
    assert is_for_hopper(config, x, weight)
    assert is_for_hopper(config, x, weight, torch.empty(1, dtype=BF16))
    assert not is_for_hopper(config, x, weight, torch.empty(1))
    assert not is_for_hopper(config, x[:, 1:], weight)
    assert not is_for_hopper(config, x, torch.empty(64, 68, dtype=BF16)[:, :64])
    assert not is_for_hopper(replace(config, block_n=32), x, weight)
    assert not is_for_hopper(replace(config, block_k=32), x, weight)
    assert not is_for_hopper(replace(config, num_warps=8), x, weight)
    assert not is_for_hopper(replace(config, block_n=32, num_warps=2), x, weight)
    assert not is_for_hopper(replace(config, block_n=256), x, weight)
    assert not is_for_hopper(replace(config, num_stages=1), x, weight)


def test_x_a_t_has_a_launch_of_its_own_where_it_would_come_second():
    def splits(tokens, shape, max_loras, max_rank, card=H200):
        config = tiles_for(tokens, *shape, card)
        partials = config.splits if config else 1
        return splits_in_launch(config, tokens, *shape, partials, 1, max_loras, max_rank, card)

    assert splits(8, (4096, 4096), 8, 64) == 4
    assert splits(128, (4096, 4096), 8, 16) == 2  # 128 programs and 4 on 132 multiprocessors
    assert splits(128, (4096, 4096), 8, 17) == 0
    assert splits(128, (4096, 4096), 9, 16) == 0
    assert splits(128, (6144, 4096), 64, 16) == 2
    assert splits(128, (28672, 4096), 8, 64) == 2  # two programs at once on each
    assert splits(128, (28672, 4096), 64, 256) == 0
    assert splits(128, (6144, 1536), 8, 16) == 1
    assert splits(128, (128256, 4096), 8, 16) == 0
    blackwell = replace(H200, capability=(10, 0))
    assert splits(128, (28672, 4096), 8, 16, blackwell) == 4
    assert splits(128, (4096, 4096), 8, 16, blackwell) == 0


@pytest.mark.parametrize("max_loras", [8, 66, 100, 256])
@pytest.mark.parametrize("shape", [(6144, 4096), (5120, 5120), (28672, 4096)])
def test_how_many_rows_there_are_changes_no_split(shape, max_loras):
    """Up to MAX_ROWS it is `shrink_split_k`, above one number for all that share tiles."""
    found = {
        splits_in_launch(tiles_for(rows, *shape, H200), rows, *shape, 1, 1, max_loras, 16, H200)
        for rows in range(65, 129)
    }
    assert len(found) == 1


def test_many_rows_and_half_of_k_is_the_librarys(monkeypatch):
    """Tiles made for partials are too few where nobody takes partials."""
    config = tiles_for(128, 3072, 2048, H200)
    assert config.splits == 2
    assert config.serves(2)
    assert not config.serves(1)
    assert replace(config, splits=1).serves(1)
    assert tiles_for(8, 3072, 2048, H200).serves(1)
    assert splits_in_launch(config, 128, 3072, 2048, 2, 3, 8, 16, H200) == 2
    assert splits_in_launch(config, 128, 3072, 2048, 1, 3, 8, 16, H200) == 0
    launched = []
    monkeypatch.setattr("kernels.linear.launch_linear", lambda *args: launched.append(args))
    x, weight = torch.ones(128, 2048, dtype=BF16), torch.ones(3072, 2048, dtype=BF16)
    linear_triton(x, weight, None, torch.empty(128, 3072, dtype=BF16))
    assert not launched
    linear_triton(x, weight, None, torch.empty(2, 128, 3072))
    assert len(launched) == 1


def test_ranks_of_several_slots_share_a_tile():
    assert rank_programs(NARROW, 8, 3, 8, 16, 4) == 3 * 2 * 4
    assert rank_programs(NARROW, 3, 1, 8, 16, 1) == 1
    assert rank_programs(WIDE, 128, 2, 8, 16, 2) == 2 * 1 * 2
    assert rank_programs(WIDE, 128, 1, 64, 256, 1) == 128
