"""Expert LoRA pair by pair: launchers against twins, both against merged float64 weights."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu, silu

from kernels.moe_lora_shrink import moe_shrink_split_k
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expert_batch import NAN, OPS, Batch, Case, activations
from tests.kernels.packed_experts import PackedExperts

ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative to the largest value: a few float32 sums' roundings, or one rounding of the dtype."""


CASES = {
    "one_row": Case([1], 6, 2, [4, 3, 5], hidden=1024, splits=1),
    "many_pairs": Case(
        [0] + [-1] * 32, 8, 8, [33, 1], hidden=24, splits=1, skipped=frozenset(range(8, 264))
    ),
    "many_rows": Case(
        [row % 4 - 1 for row in range(70)],
        9,
        8,
        [4, 3, 16, 0, 9, 40],
        disabled=frozenset({1}),
        splits=1,
    ),
    "one_base_row": Case([-1], 6, 2, [4], kind="gelu"),
    "one_expert_of_one": Case([0, 1, 2, 0], 1, 1, [5, 0, 16], max_rank=16, splits=3),
    "mixed": Case(
        [2, -1, 0, 3, 1], 6, 2, [1, 5, 0, 16, 33, 64, 8], 4, disabled=frozenset({3}), kind="gelu"
    ),
    "mixed_bf16": Case([2, -1, 0, 1], 6, 2, [1, 5, 0, 16, 33, 64], 4, dtype=torch.bfloat16),
    "mixed_fp16": Case([0, 0, 3, 1], 7, 3, [24, 0, 8, 64], 4, dtype=torch.float16, splits=1),
    "wide_weights": Case([0, 1], 3, 1, [4, 6], dtype=torch.bfloat16, arena=torch.float32),
    "skipped": Case(
        [0, 1, 2, 0], 6, 2, [8, 16], skipped=frozenset({1, 2, 4, 5}), shared_experts="plain"
    ),
    "one_expert_for_all": Case(
        [1, 0, 1], 8, 1, [16, 3], one_expert=True, kind="gelu_tanh", shared_experts="gated"
    ),
    "shared_outer": Case(
        [0, 1, 2, -1, 2], 6, 2, [5, 16, 40], shared=frozenset({0, 2}), shared_experts="gated"
    ),
    "shared_outer_all": Case([0], 4, 4, [33], shared=frozenset({0}), splits=1),
    "shared_outer_skipped": Case(
        [0, 1], 5, 3, [8, 3], 2, shared=frozenset({0, 1}), skipped=frozenset({0, 4})
    ),
    "ten_of_many": Case([0, -1, 6], 12, 10, [16, 1, 5, 33, 0], 7, 36, 20, shared_experts="plain"),
    "large_ranks": Case([0, 1], 2, 1, [256, 131], 2, 24, 20, 256),
    "odd_widths": Case([0, 1, 2], 3, 2, [3, 7], hidden=391, intermediate=267, max_rank=7, splits=3),
}


def reference_gate_up(batch: Batch) -> torch.Tensor:
    case, ids = batch.case, batch.topk_ids.cpu()
    wide = batch.input("gate_up").double().cpu()
    wide = wide + batch.gate_up.deltas(batch.input("x"), ids, case.enabled_rows)
    gate, up = wide.chunk(2, dim=1)
    return torch.where(ids.view(-1, 1) >= 0, ACTIVATIONS[case.kind](gate) * up, NAN)


def reference_down(batch: Batch) -> torch.Tensor:
    case, ids = batch.case, batch.topk_ids.cpu()
    wide = batch.input("down").double().cpu()
    wide = wide + batch.down.deltas(batch.input("activated"), ids, case.enabled_rows)
    wide = wide.view(*ids.shape, -1) * batch.topk_weights.cpu().double()[..., None]
    total = torch.where(ids[..., None] >= 0, wide, 0).sum(1)
    shared, gate = (t if t is None else t.double().cpu() for t in batch.shared_part().values())
    if shared is not None:
        total += shared if gate is None else shared * gate.sigmoid()
    return total


def written(batch: Batch, packed: PackedExperts) -> torch.Tensor:
    """bool[P, stack * max_rank]: what a shrink writes."""
    case, (stack, _, _) = batch.case, packed.lora_ranks.shape
    mask = torch.zeros(batch.topk_ids.numel(), stack, case.max_rank, dtype=torch.bool)
    for pair, expert in enumerate(batch.topk_ids.flatten().tolist()):
        slot = case.enabled_rows[pair // case.top_k]
        for j in range(stack if slot >= 0 else 0):
            rank = int(packed.lora_ranks[j, slot, expert]) if expert >= 0 else 0
            if packed is batch.gate_up and packed.outer_ranks[j, slot]:
                rank = int(packed.outer_ranks[j, slot]) if pair % case.top_k == 0 else 0
            mask[pair, j, :rank] = True
    return mask.flatten(1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.equal(found.isnan(), expected.isnan()), "wrote other entries"
    largest = float(torch.where(expected.isnan(), 0, expected).abs().max())
    assert largest <= torch.finfo(dtype).max, f"the case is wrong: {dtype} holds no {largest}"
    error = (found.double() - expected.double()).nan_to_num().abs().max()
    assert error <= TOLERANCE[dtype] * largest, float(error)


def check_base_rows(batch: Batch, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Pairs and rows without a delta have the bits of the kernels that know no adapters."""
    plain_pairs = (~written(batch, batch.gate_up)).all(1)
    if batch.case.shared:  # whether the pair has a delta does not show in what a shrink writes
        plain_pairs &= torch.tensor(batch.case.enabled_rows).repeat_interleave(batch.case.top_k) < 0
    plain_pairs &= batch.topk_ids.flatten().cpu() >= 0
    plain_rows = (~written(batch, batch.down)).all(1).view(-1, batch.case.top_k).all(1)
    assert torch.equal(gate_up[plain_pairs], batch.base_gate_up()[plain_pairs])
    assert torch.equal(down[plain_rows], batch.base_down()[plain_rows])


@pytest.mark.parametrize("name", CASES)
def test_twins_equal_merged_weights(name):
    batch = Batch(CASES[name], "torch")
    gate_up, down = batch.run_gate_up(), batch.run_down()
    assert_close(gate_up, reference_gate_up(batch), batch.case.dtype)
    assert_close(down, reference_down(batch), batch.case.dtype)
    check_base_rows(batch, gate_up, down)


def check_kernels(case: Case, device: torch.device) -> None:
    batch, twins = Batch(case, "triton", device), Batch(case, "torch")
    for packed, found, expected in (
        (batch.gate_up, batch.shrunk_gate_up(), twins.shrunk_gate_up()),
        (batch.down, batch.shrunk_down(), twins.shrunk_down()),
    ):
        mask = written(batch, packed)
        assert torch.equal(~found.isnan().cpu(), mask.expand_as(found)), "wrote other entries"
        if mask.any():
            assert_close(found[0].cpu()[mask], expected[0][mask], torch.float32)
    gate_up, down = batch.run_gate_up(), batch.run_down()
    assert_close(gate_up, twins.run_gate_up(), case.dtype)
    assert_close(down, twins.run_down(), case.dtype)
    assert_close(gate_up, reference_gate_up(batch), case.dtype)
    assert_close(down, reference_down(batch), case.dtype)
    check_base_rows(batch, gate_up, down)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which is what it should do
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_twins_and_merged_weights(kernel_device, name):
    check_kernels(CASES[name], kernel_device)


@pytest.mark.kernel
@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("shared", [frozenset(), frozenset({1})])
def test_many_pairs(kernel_device, monkeypatch, max_rank, shared):
    """Whether all ranks are read at once or not."""
    monkeypatch.setattr("kernels.moe_lora_gate_up.MANY_PAIRS", 4)
    ranks = [16, 5, 8, 0, max_rank]
    case = Case([2, -1, 0, 1], 6, 2, ranks, max_rank=max_rank, dtype=torch.float16, shared=shared)
    check_kernels(case, kernel_device)


@pytest.mark.kernel
def test_shared_factors_are_read_once(kernel_device):
    """Through the outer tables: what the tables of their slots' experts hold does not matter."""
    batch = Batch(CASES["shared_outer"], "triton", kernel_device)
    before = batch.shrunk_gate_up().cpu(), batch.run_down()
    slots = list(batch.case.shared)
    batch.gate_up.a_offsets[:, slots] = batch.down.b_offsets[:, slots] = 0  # where NaN lies
    assert torch.equal(batch.shrunk_gate_up().cpu().nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(batch.run_down(), before[1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 17, 130])
@pytest.mark.parametrize("max_loras", [1, 4, 7])
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 2), (60, 4), (96, 10), (128, 8), (160, 1)])
def test_sweep(num_experts, top_k, max_loras, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randint(-1, max_loras, (num_rows,), generator=generator).tolist()
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    case = Case(
        rows,
        num_experts,
        top_k,
        [1, 5, 16, 0, 33, 64],
        max_loras,
        hidden=520,
        intermediate=264,
        splits=moe_shrink_split_k(num_rows * top_k, 520),
        dtype=dtypes[(num_experts + num_rows + max_loras) % 3],
        shared=frozenset({3}),
        disabled=frozenset({2}),
        shared_experts="gated" if max_loras == 4 else "",
    )
    check_kernels(case, torch.device("cuda"))


def check_bits_survive(ops: str, device: torch.device | str, name: str) -> None:
    case = CASES[name]
    batch = Batch(case, ops, device)
    before = batch.run_gate_up(), batch.run_down()
    same = Batch(case, ops, device)
    slot_of = [(slot * 2 + 1) % case.max_loras for slot in range(case.max_loras)]
    if case.max_loras % 2 == 0:
        slot_of = [*range(1, case.max_loras), 0]
    assert sorted(slot_of) == list(range(case.max_loras)) != slot_of
    moved = replace(
        case,
        order=slot_of,
        rows=[slot_of.index(slot) if slot >= 0 else -1 for slot in case.rows],
        disabled=frozenset(slot_of.index(slot) for slot in case.disabled),
    )
    for other in (same, Batch(moved, ops, device)):
        assert torch.equal(before[0].nan_to_num(), other.run_gate_up().nan_to_num())
        assert torch.equal(before[1].nan_to_num(), other.run_down().nan_to_num())
    # Neighbours of NaN: rows share no sums.
    inputs = activations(case)
    for buffer in inputs.values():
        buffer[len(buffer) // len(case.rows) :] = NAN
    alone = Batch(case, ops, device, inputs)
    assert torch.equal(
        before[0][: case.top_k].nan_to_num(), alone.run_gate_up()[: case.top_k].nan_to_num()
    )
    assert torch.equal(before[1][0], alone.run_down()[0])


@pytest.mark.parametrize("name", ["mixed", "shared_outer", "skipped"])
def test_twins_keep_a_rows_bits(name):
    check_bits_survive("torch", "cpu", name)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["mixed", "shared_outer", "skipped"])
def test_kernels_keep_a_rows_bits(kernel_device, name):
    check_bits_survive("triton", kernel_device, name)


def test_split_k_is_a_function_of_shapes():
    splits = {pairs: moe_shrink_split_k(pairs, 2048) for pairs in (1, 8, 16, 17, 64, 128, 129)}
    assert splits == {1: 16, 8: 16, 16: 16, 17: 8, 64: 4, 128: 2, 129: 1}
    assert moe_shrink_split_k(1, 768) == 6
    assert moe_shrink_split_k(1, 40) == 1
    assert all(moe_shrink_split_k(p, 10**6) * p <= max(p, 256) for p in range(1, 600))


def test_launchers_refuse_what_they_cannot_serve():
    batch = Batch(CASES["mixed"], "triton")
    with pytest.raises(AssertionError, match="pairs_per_row is 3"):
        batch.shrink(batch.gate_up, batch.input("x"), 3)
    shared = Batch(CASES["shared_outer"], "triton")
    with pytest.raises(AssertionError, match="a shared A needs"):
        shared.shrink(shared.gate_up, shared.input("activated"), 1)
    with pytest.raises(AssertionError, match="x has shape"):
        batch.shrink(batch.down, batch.input("x"), 1)
    batch.down = replace(batch.down, lora_ranks=batch.down.lora_ranks.long())
    with pytest.raises(AssertionError, match="lora_ranks is"):
        batch.shrunk_down()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "shared"), [(1, frozenset()), (40, frozenset({0}))])
def test_compiles_for_every_target(monkeypatch, num_rows, shared, dtype):
    rows = [row % 2 for row in range(num_rows)]
    parts = {"shared": shared, "shared_experts": "gated" if shared else ""}
    case = Case(rows, 8, 8, [16, 3], 2, 256, 128, dtype=dtype, **parts)
    launched = []

    def compiled(launcher):
        return lambda **arguments: launched.append(compile_launches(launcher, **arguments))

    monkeypatch.setitem(OPS, "compiled", tuple(compiled(launcher) for launcher in OPS["triton"]))
    batch = Batch(case, "compiled")
    batch.run_gate_up()
    batch.run_down()
    assert launched == [1, 1, 1, 1]
