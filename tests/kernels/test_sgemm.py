"""sgemm_a and sgemm_b: launchers against twins, both against W + scaling * B A by hand."""

from dataclasses import dataclass

import pytest
import torch

from kernels.lora_segments import shrink_split_k
from kernels.sgemm import (
    sgemm_a_torch,
    sgemm_a_triton,
    sgemm_b_torch,
    sgemm_b_triton,
)
from tests.kernels.cross_compile import compile_launches
from tests.kernels.packed_adapters import PackedAdapters, pack_adapters, segments_of

RANKS = [1, 3, 5, 8, 12, 16, 24, 33, 64]
NAN = float("nan")
OPS = {"triton": (sgemm_a_triton, sgemm_b_triton), "torch": (sgemm_a_torch, sgemm_b_torch)}


@dataclass
class Case:
    """A batch and the adapters it uses: rows[t] is row t's slot, ranks[j][slot] a slice's rank."""

    rows: list[int]
    ranks: list[list[int]]
    in_features: int
    slice_sizes: list[int]
    max_rank: int
    split_k: int
    dtype: torch.dtype = torch.float32


def skewed(num_rows: int) -> list[int]:
    return [
        row // 7 % len(RANKS) if row % 7 == 3 else 8 if row % 5 else -1 for row in range(num_rows)
    ]


QKV_RANKS = [RANKS, [0, *RANKS[:-1]], [RANKS[-1 - slot] if slot % 2 else 0 for slot in range(9)]]
DISTINCT = [8, 1, -1, 3, 2, 0, 7, 5, 4, 6]
CASES = {
    "one_row": Case([2], [[4, 4, 5]], 64, [48], 8, 16),
    "one_base_row": Case([-1], [[4, 4, 5]], 64, [48], 8, 4),
    "qkv_distinct": Case(DISTINCT, QKV_RANKS, 344, [96, 32, 32], 64, 3),
    "qkv_distinct_bf16": Case(DISTINCT, QKV_RANKS, 344, [96, 32, 32], 64, 3, torch.bfloat16),
    "identical": Case([1] * 16, [[3, 24]], 172, [70], 64, 2, torch.float16),
    "odd_widths": Case([0, 1, 0, 2, 1], [[3, 5, 1], [1, 0, 3]], 171, [67, 13], 5, 2),
    "uniform_gate_up": Case([5 * r % 9 for r in range(40)], QKV_RANKS[:2], 96, [130, 130], 64, 1),
    "skewed": Case(skewed(61), QKV_RANKS[:1], 130, [72], 64, 4, torch.float16),
    "rank_above_64": Case([1, 0, 1], [[256, 131]], 40, [24], 256, 2),
    "prefill": Case(skewed(150), QKV_RANKS[:1], 100, [140], 64, 1, torch.float16),
    "prefill_bf16": Case(skewed(150), QKV_RANKS[:1], 100, [140], 64, 1, torch.bfloat16),
    "prefill_runs": Case([0] * 70 + [-1] * 9 + [2] * 81, [[5, 3, 16]], 48, [40], 16, 1),
    "long_prefill": Case([1] * 500 + [0] * 30, [[5, 3]], 24, [20], 16, 1, torch.float16),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative to the largest value: a few float32 sums' roundings, or one rounding of the dtype."""


def runs_here(case: Case, device: torch.device) -> None:
    if case.dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's dot takes bfloat16 for integers")


def packed(case: Case) -> PackedAdapters:
    return pack_adapters(case.ranks, case.in_features, case.slice_sizes, case.dtype)


def activations(case: Case, device) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y as columns of wider buffers, whose margins are NaN."""
    generator = torch.Generator().manual_seed(len(case.rows))
    wide = []
    for width, margin in ((case.in_features, 8), (sum(case.slice_sizes), 16)):
        buffer = torch.full((len(case.rows), width + margin), NAN, dtype=case.dtype)
        buffer[:, :width] = torch.randn(len(case.rows), width, generator=generator)
        wide.append(buffer.to(device)[:, :width])
    return wide[0], wide[1]


def shrink(op, case: Case, adapters: PackedAdapters, x, segments) -> torch.Tensor:
    shape = (case.split_k, len(case.rows), len(case.ranks) * case.max_rank)
    out = torch.full(shape, NAN, device=x.device)
    tables = (adapters.a_ptrs, adapters.lora_ranks)
    arrivals = torch.zeros(64, dtype=torch.int32, device=x.device)
    more = {"max_rank": case.max_rank, "out": out, "arrivals": arrivals}
    op(x, adapters.arena, *tables, **segments, **more)
    assert not arrivals.any()
    return out[0]


def expand(op, case: Case, adapters: PackedAdapters, shrunk, segments, y) -> None:
    tables = (adapters.b_ptrs, adapters.lora_ranks, adapters.scalings)
    sizes = {"max_rank": case.max_rank, "slice_sizes": case.slice_sizes}
    op(shrunk, adapters.arena, *tables, **segments, **sizes, y=y)


def delta_added(ops: str, case: Case, adapters: PackedAdapters, device="cpu") -> torch.Tensor:
    """y after both ops, on the CPU; the margins beside y are checked."""
    adapters = adapters.to(device)
    x, y = activations(case, device)
    segments = segments_of(case.rows, len(case.ranks[0]), device)
    shrunk = shrink(OPS[ops][0], case, adapters, x, segments)
    expand(OPS[ops][1], case, adapters, shrunk, segments, y)
    assert y._base[:, y.shape[1] :].isnan().all()
    return y.cpu()


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected.double()).abs().max()
    assert error <= TOLERANCE[dtype] * expected.abs().max(), float(error)


def written(case: Case) -> torch.Tensor:
    """bool[T, stack * max_rank]: what a shrink writes."""
    mask = torch.zeros(len(case.rows), len(case.ranks), case.max_rank, dtype=torch.bool)
    for row, slot in enumerate(case.rows):
        for j, ranks in enumerate(case.ranks if slot >= 0 else []):
            mask[row, j, : ranks[slot]] = True
    return mask.flatten(1)


@pytest.mark.parametrize("name", CASES)
def test_twins_equal_merged_weights(name):
    case, adapters = CASES[name], packed(CASES[name])
    x, y = activations(case, "cpu")
    expected = adapters.reference(x, case.rows, y)
    found = delta_added("torch", case, adapters)
    assert_close(found, expected, case.dtype)
    base_rows = [row for row, slot in enumerate(case.rows) if slot < 0]
    assert torch.equal(found[base_rows], y[base_rows])


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_twins_and_merged_weights(kernel_device, name):
    case, adapters = CASES[name], packed(CASES[name])
    runs_here(case, kernel_device)
    x, y = activations(case, "cpu")
    segments = segments_of(case.rows, len(case.ranks[0]))
    mask = written(case)
    expected = shrink(sgemm_a_torch, case, adapters, x, segments)
    assert torch.equal(~expected.isnan(), mask), "the twin wrote other entries"
    moved = adapters.to(kernel_device)
    there = segments_of(case.rows, len(case.ranks[0]), kernel_device)
    shrunk = shrink(sgemm_a_triton, case, moved, x._base.to(kernel_device)[:, : x.shape[1]], there)
    assert torch.equal(~shrunk.isnan().cpu(), mask), "wrote other entries"
    if mask.any():
        assert_close(shrunk.cpu()[mask], expected[mask], torch.float32)
    found = delta_added("triton", case, adapters, kernel_device)
    assert_close(found, delta_added("torch", case, adapters), case.dtype)
    assert_close(found, adapters.reference(x, case.rows, y), case.dtype)
    base_rows = [row for row, slot in enumerate(case.rows) if slot < 0]
    assert torch.equal(found[base_rows], y[base_rows])


@pytest.mark.kernel
def test_float32_weights_serve_bfloat16_rows(kernel_device):
    case = CASES["qkv_distinct_bf16"]
    adapters = pack_adapters(case.ranks, case.in_features, case.slice_sizes, torch.float32)
    x, y = activations(case, "cpu")
    for ops in OPS:
        found = delta_added(ops, case, adapters, kernel_device if ops == "triton" else "cpu")
        assert_close(found, adapters.reference(x, case.rows, y), case.dtype)


@pytest.mark.kernel
def test_the_shrunk_sum_stays_wide(kernel_device):
    """256.0625 - 256 through B: a sum rounded to the dtype in between would leave nothing."""
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    case = Case([0], [[2]], 16, [32], 2, 1, dtype)
    adapters = packed(case)
    a, b = torch.zeros(2, 16), torch.tensor([1.0, -1.0]).repeat(32, 1)
    a[0, 0] = a[1, 0] = a[0, 1] = 1
    adapters.arena[adapters.a_offsets[0][0] :][: a.numel()] = a.flatten().to(dtype)
    adapters.arena[adapters.b_offsets[0][0] :][: b.numel()] = b.flatten().to(dtype)
    x = torch.tensor([[256.0, 2**-4] + [0.0] * 14], dtype=dtype, device=kernel_device)
    y = torch.zeros(1, 32, dtype=dtype, device=kernel_device)
    adapters, segments = adapters.to(kernel_device), segments_of(case.rows, 1, kernel_device)
    shrunk = shrink(sgemm_a_triton, case, adapters, x, segments)
    expand(sgemm_b_triton, case, adapters, shrunk, segments, y)
    expected = torch.full((1, 32), 2**-4 * 0.37)
    torch.testing.assert_close(y.cpu().float(), expected, rtol=2**-7, atol=0)


def rearranged(case: Case, slot_of: list[int], row_order: list[int]) -> tuple[Case, PackedAdapters]:
    """The same adapters in other slots (new slot i holds adapter slot_of[i]), rows reordered."""
    ranks = [[row[slot] for slot in slot_of] for row in case.ranks]
    rows = [slot_of.index(case.rows[r]) if case.rows[r] >= 0 else -1 for r in row_order]
    other = Case(**(vars(case) | {"ranks": ranks, "rows": rows}))
    adapters = pack_adapters(ranks, case.in_features, case.slice_sizes, case.dtype, order=slot_of)
    return other, adapters


def bits_on(ops: str, device, case: Case, adapters: PackedAdapters, x, y) -> torch.Tensor:
    adapters, y = adapters.to(device), y.to(device, copy=True)
    segments = segments_of(case.rows, len(case.ranks[0]), device)
    shrunk = shrink(OPS[ops][0], case, adapters, x.to(device), segments)
    expand(OPS[ops][1], case, adapters, shrunk, segments, y)
    return y.cpu()


def check_bits_survive(ops: str, device, name: str) -> None:
    case = CASES[name]
    num_rows, max_loras = len(case.rows), len(case.ranks[0])
    x, y = (buffer.contiguous() for buffer in activations(case, "cpu"))
    before = bits_on(ops, device, case, packed(case), x, y)
    assert torch.equal(before, bits_on(ops, device, case, packed(case), x, y))
    slot_of = [(slot * 2 + 1) % max_loras for slot in range(max_loras)]
    assert sorted(slot_of) == list(range(max_loras)), "needs an odd number of slots"
    # Other slots, and so another order of segments.
    same_rows = list(range(num_rows))
    other, adapters = rearranged(case, slot_of, same_rows)
    assert torch.equal(before, bits_on(ops, device, other, adapters, x, y))
    # Neighbours of NaN, with their adapters and without. What the interpreter multiplies with, as
    # the twin's matmul, may depend on a row's place, so rows move on the GPU alone.
    rows_may_move = device.type == "cuda" and ops == "triton"
    for kept in (0, num_rows // 2, num_rows - 1):
        poisoned = torch.full_like(x, NAN)
        poisoned[kept] = x[kept]
        after = bits_on(ops, device, case, packed(case), poisoned, y)
        assert torch.equal(before[kept], after[kept])
        if rows_may_move or ops == "torch":
            lonely = Case(**(vars(case) | {"rows": [-1] * num_rows}))
            lonely.rows[kept] = case.rows[kept]
            after = bits_on(ops, device, lonely, packed(case), poisoned, y)
            assert torch.equal(before[kept], after[kept])
    if rows_may_move:
        generator = torch.Generator().manual_seed(1)
        row_order = torch.randperm(num_rows, generator=generator).tolist()
        other, adapters = rearranged(case, slot_of, row_order)
        after = bits_on(ops, device, other, adapters, x[row_order], y[row_order])
        assert torch.equal(before[row_order], after)


@pytest.mark.parametrize("name", ["qkv_distinct", "skewed", "prefill"])
def test_twin_bits_survive_other_slots_and_neighbours(name):
    check_bits_survive("torch", torch.device("cpu"), name)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["qkv_distinct", "odd_widths", "prefill", "prefill_bf16"])
def test_kernel_bits_survive_other_slots_rows_and_neighbours(kernel_device, name):
    runs_here(CASES[name], kernel_device)
    check_bits_survive("triton", kernel_device, name)


@pytest.mark.kernel
def test_a_slot_of_rank_64_reused_at_rank_3_shows_nothing_of_the_old(kernel_device):
    case = Case([1, 0, 1, -1], [[8, 64]], 96, [80], 64, 2)
    y_first = delta_added("triton", case, packed(case), kernel_device)
    assert y_first.isfinite().all()
    adapters = packed(case)
    generator = torch.Generator().manual_seed(3)
    new_a, new_b = (torch.randn(shape, generator=generator) for shape in ((3, 96), (80, 3)))
    adapters.arena[adapters.a_offsets[0][1] :][: new_a.numel()] = new_a.flatten()
    adapters.arena[adapters.b_offsets[0][1] :][: new_b.numel()] = new_b.flatten()
    adapters.a[0][1], adapters.b[0][1], adapters.lora_ranks[0, 1] = new_a, new_b, 3
    x, y = activations(case, "cpu")
    for ops in OPS:
        found = delta_added(ops, case, adapters, kernel_device if ops == "triton" else "cpu")
        assert_close(found, adapters.reference(x, case.rows, y), case.dtype)


@pytest.mark.kernel
def test_splits_of_a_larger_workspace(kernel_device):
    """A batch's shrunk buffer may be rows of the largest batch's."""
    case = CASES["qkv_distinct"]
    adapters, segments = packed(case).to(kernel_device), segments_of(case.rows, 9, kernel_device)
    x, y = activations(case, kernel_device)
    workspace = torch.full((case.split_k, 64, 3 * case.max_rank), NAN, device=kernel_device)
    out = workspace[:, : len(case.rows)]
    tables = (adapters.a_ptrs, adapters.lora_ranks)
    arrivals = torch.zeros(27, dtype=torch.int32, device=kernel_device)
    more = {"max_rank": case.max_rank, "out": out, "arrivals": arrivals}
    sgemm_a_triton(x, adapters.arena, *tables, **segments, **more)
    expand(sgemm_b_triton, case, adapters, out[0], segments, y)
    assert torch.equal(y.cpu(), delta_added("triton", case, packed(case), kernel_device))


def test_split_k_is_a_function_of_shapes():
    splits = {t: shrink_split_k(t, 4096) for t in (1, 4, 5, 16, 64, 128, 129, 8192)}
    assert splits == {1: 16, 4: 16, 5: 4, 16: 4, 64: 4, 128: 4, 129: 1, 8192: 1}
    long = {t: shrink_split_k(t, 14336) for t in (1, 8, 32, 128, 129)}
    assert long == {1: 16, 8: 4, 32: 4, 128: 8, 129: 1}
    assert shrink_split_k(1, 576) == 2
    assert shrink_split_k(1, 40) == 1
    assert all(shrink_split_k(t, 10**6) * t <= max(t, 1024) for t in range(1, 600))


def test_launchers_refuse_what_they_cannot_serve():
    case, adapters = CASES["one_row"], packed(CASES["one_row"])
    x, y = activations(case, "cpu")
    segments = segments_of(case.rows, 3)
    tables = (adapters.a_ptrs, adapters.lora_ranks)
    narrow, out = torch.zeros(2, 1, 7), torch.zeros(2, 1, 8)
    counters = torch.zeros(1, dtype=torch.int32)
    more = {"max_rank": 8, "arrivals": counters}
    with pytest.raises(AssertionError, match="shrunk has shape"):
        sgemm_a_triton(x, adapters.arena, *tables, **segments, **more, out=narrow)
    wrong = (adapters.a_ptrs, adapters.lora_ranks.long())
    with pytest.raises(AssertionError, match="lora_ranks is"):
        sgemm_a_triton(x, adapters.arena, *wrong, **segments, **more, out=out)
    with pytest.raises(AssertionError, match="0 arrivals, 1 needed"):
        sgemm_a_triton(
            x, adapters.arena, *tables, **segments, max_rank=8, out=out, arrivals=counters[:0]
        )
    with pytest.raises(AssertionError, match="not 2: rows, ranks"):
        expand(sgemm_b_triton, case, adapters, out, segments, y)
    wrong_case = Case(**(vars(case) | {"slice_sizes": [47]}))
    with pytest.raises(AssertionError, match="do not cover"):
        expand(sgemm_b_triton, wrong_case, adapters, out[0], segments, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [8, 700])
def test_compiles_for_every_target(num_rows, dtype):
    rows = [row % 2 for row in range(num_rows)]
    case = Case(rows, [[16, 3], [8, 8], [8, 0]], 576, [576, 192, 192], 64, 1, dtype)
    case.split_k = shrink_split_k(num_rows, case.in_features)
    adapters, segments = packed(case), segments_of(rows, 2)
    x, y = activations(case, "cpu")
    out = torch.zeros(case.split_k, num_rows, 3 * 64)
    a_tables = (adapters.a_ptrs, adapters.lora_ranks)
    b_tables = (adapters.b_ptrs, adapters.lora_ranks, adapters.scalings)
    arrivals = torch.zeros(64, dtype=torch.int32)
    more = {"max_rank": 64, "out": out, "arrivals": arrivals}
    launched = compile_launches(sgemm_a_triton, x, adapters.arena, *a_tables, **segments, **more)
    sizes = {"max_rank": 64, "slice_sizes": case.slice_sizes}
    launched += compile_launches(
        sgemm_b_triton, out[0], adapters.arena, *b_tables, **segments, **sizes, y=y
    )
    assert launched == 2
