"""Grouped expert LoRA: launchers against twins, both against merged matrices by hand."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernels import moe_lora_groups
from kernels.moe_align import moe_lora_align_block_size_torch
from tests.kernels.cross_compile import compile_launches
from tests.kernels.expert_batches import (
    NAN,
    Case,
    activations,
    assert_close,
    check_result,
    delta_added,
    empty_shrunk,
    expand,
    lists_of,
    packed,
    shrink,
    written,
)

CASES = {
    "one_pair": Case(1, 1, 1, 2, (4,)),
    "one_row": Case(6, 2, 1, 2, (16, 0, 5), splits=3, in_features=130),
    "many_experts": Case(60, 8, 4, 4, (16, 5, 0, 33, 1), splits=2, dtype=torch.float16),
    "many_experts_bf16": Case(60, 8, 4, 17, (16, 8, 0, 33, 1), dtype=torch.bfloat16),
    "down": Case(60, 8, 4, 3, (5, 64, 0, 8), stack=1, splits=2, in_features=100),
    "down_holes": Case(6, 2, 7, 65, (3, 16, 0), stack=1, routing="holes", block_size_m=64),
    "last_expert": Case(96, 1, 7, 50, (5, 16, 0, 8), routing="last", dtype=torch.float16),
    "half_idle": Case(6, 2, 4, 130, (8, 0, 33), routing="half", block_size_m=64),
    "prefill_bf16": Case(6, 2, 4, 130, (8, 0, 33), block_size_m=64, dtype=torch.bfloat16),
    "disabled": Case(6, 2, 4, 17, (1, 16), disabled=frozenset({0, 2}), routing="holes"),
    "ranks_above_64": Case(3, 2, 2, 9, (131, 0, 256, 7), out_features=20),
    "shared": Case(6, 2, 4, 33, (5, 16, 0, 5), shared=frozenset({1, 3}), splits=2),
    "shared_by_64": Case(8, 8, 3, 40, (0, 16, 7), shared=frozenset({0, 1, 2}), block_size_m=64),
    "shared_top_1": Case(3, 1, 3, 20, (8, 0, 3), shared=frozenset({0, 2})),
    "shared_bf16": Case(
        16, 4, 4, 50, (5, 16, 0, 5), shared=frozenset({1, 3}), dtype=torch.bfloat16
    ),
}


def runs_here(case: Case, device: torch.device) -> None:
    if case.dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's dot takes bfloat16 for integers")


@pytest.mark.parametrize("name", CASES)
def test_twins_equal_merged_weights(name):
    case, experts = CASES[name], packed(CASES[name])
    x, y = activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    shrunk = empty_shrunk(case)
    shrink("torch", case, experts, x, lists, shrunk)
    assert torch.equal(~shrunk.isnan(), written(case, experts).expand_as(shrunk))
    found = delta_added("torch", case, experts, x, y, lists)
    check_result(case, experts, x, y, found)


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_twins_and_merged_weights(kernel_device, name):
    case, experts = CASES[name], packed(CASES[name])
    runs_here(case, kernel_device)
    x, y = activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    there = lists_of(case.topk_ids(), case.row_adapter(), case, device=kernel_device)
    expected, shrunk = empty_shrunk(case), empty_shrunk(case, kernel_device)
    shrink("torch", case, experts, x, lists, expected)
    shrink("triton", case, experts.to(kernel_device), x.to(kernel_device), there, shrunk)
    expected, shrunk = expected.sum(0), shrunk.cpu()
    mask = written(case, experts)
    assert mask.any()
    assert torch.equal(~shrunk.isnan(), mask.expand_as(shrunk)), "wrote other entries"
    assert_close(shrunk.sum(0)[mask], expected[mask], torch.float32)
    found = delta_added("triton", case, experts, x, y, lists, kernel_device)
    assert_close(found, delta_added("torch", case, experts, x, y, lists), case.dtype)
    check_result(case, experts, x, y, found)


def delta_of(ops, case: Case, device, rows: list[int], x, y, **layout) -> torch.Tensor:
    """y after both ops where row t has slot rows[t]; `layout` moves slots and lists."""
    order = layout.pop("order", None)
    lists = lists_of(case.topk_ids(), rows, case, **layout)
    return delta_added(ops, case, packed(case, order), x, y, lists, device)


def check_bits_survive(ops: str, device, case: Case) -> None:
    rows, slots = case.row_adapter(), list(range(case.slots))
    x, y = activations(case)
    before = delta_of(ops, case, device, rows, x, y)
    assert torch.equal(before, delta_of(ops, case, device, rows, x, y))
    # Each slot's list elsewhere.
    assert torch.equal(before, delta_of(ops, case, device, rows, x, y, lora_ids=slots[::-1]))
    # Each adapter in another slot, and so its pairs in another list.
    order = slots[1:] + slots[:1]
    moved = [order.index(slot) if slot >= 0 else -1 for slot in rows]
    assert torch.equal(before, delta_of(ops, case, device, moved, x, y, order=order))
    # Neighbours of NaN, with their adapters.
    for kept in (0, case.num_tokens // 2, case.num_tokens - 1):
        per_row = case.top_k // case.pairs_per_row
        own = slice(kept * per_row, (kept + 1) * per_row)
        poisoned = torch.full_like(x, NAN)
        poisoned[own] = x[own]
        pairs = slice(kept * case.top_k, (kept + 1) * case.top_k)
        after = delta_of(ops, case, device, rows, poisoned, y)
        assert torch.equal(before[pairs], after[pairs])
        # Neighbours without adapters. What the interpreter multiplies with may depend on a
        # pair's place in its block, so pairs move on the GPU alone.
        if ops == "torch" or device.type == "cuda":
            lonely = [slot if row == kept else -1 for row, slot in enumerate(rows)]
            after = delta_of(ops, case, device, lonely, poisoned, y)
            assert torch.equal(before[pairs], after[pairs])


@pytest.mark.parametrize("name", ["many_experts", "down", "shared", "prefill_bf16"])
def test_twin_bits_survive_other_slots_and_neighbours(name):
    check_bits_survive("torch", torch.device("cpu"), CASES[name])


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["few", "shared", "many_experts_bf16", "prefill_bf16"])
def test_kernel_bits_survive_other_slots_and_neighbours(kernel_device, name):
    if name == "few":
        case = Case(4, 2, 2, 3, (5, 16, 0), in_features=20, out_features=24)
    elif name == "shared":
        case = replace(CASES[name], num_tokens=5, slots=3, out_features=24)
    else:
        case = CASES[name]
    runs_here(case, kernel_device)
    check_bits_survive("triton", kernel_device, case)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["half_idle", "shared"])
def test_few_programs_take_many_blocks_in_turn(kernel_device, name):
    case, experts = CASES[name], packed(CASES[name])
    case = replace(case, num_tokens=40)
    x, y = activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    before = delta_added("triton", case, experts, x, y, lists, kernel_device)
    with mock.patch.object(moe_lora_groups, "MAX_PROGRAMS", 6):
        after = delta_added("triton", case, experts, x, y, lists, kernel_device)
    assert torch.equal(before, after)
    check_result(case, experts, x, y, after)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["shared", "shared_top_1", "shared_by_64"])
def test_a_shared_a_may_be_ignored(kernel_device, name):
    """The experts' own addresses and ranks say the same, product by product."""
    case = replace(CASES[name], num_tokens=6)
    experts, (x, y) = packed(case), activations(case)
    assert experts.outer_ranks.any()
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    for ops, device in (("torch", torch.device("cpu")), ("triton", kernel_device)):
        found = delta_added(ops, case, experts, x, y, lists, device, outer=False)
        check_result(case, experts, x, y, found)


@pytest.mark.kernel
def test_float32_weights_serve_bfloat16_rows(kernel_device):
    case = replace(CASES["shared"], num_tokens=5)
    experts = packed(case)
    case = replace(case, dtype=torch.bfloat16)
    x, y = activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    for ops, device in (("torch", torch.device("cpu")), ("triton", kernel_device)):
        found = delta_added(ops, case, experts, x, y, lists, device)
        check_result(case, experts, x, y, found)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_shrunk_sum_stays_wide(kernel_device, dtype):
    """256.0625 - 256 through B: a sum rounded to the dtype in between would leave nothing."""
    case = Case(1, 1, 1, 2, (2,), stack=1, dtype=dtype)
    runs_here(case, kernel_device)
    experts = packed(case)
    offset = int(experts.b_offsets[0, 0, 0])
    experts.arena[offset : offset + 2 * case.out_features] = 1.0
    experts.scalings[:] = 1.0
    lists = lists_of(case.topk_ids(), [0, 0], case, device=kernel_device)
    shrunk = torch.tensor([[[256.0625, -256.0], [-256.0, 256.125]]], device=kernel_device)
    y = torch.zeros(2, case.out_features, dtype=dtype, device=kernel_device)
    expand("triton", case, experts.to(kernel_device), shrunk, lists, y)
    expected = torch.tensor([[0.0625], [0.125]]).expand(2, case.out_features)
    assert torch.equal(y.float().cpu(), expected)


@pytest.mark.kernel
def test_workspaces_of_a_larger_batch(kernel_device):
    """A batch's `shrunk` and lists may be columns and rows of the largest batch's."""
    case = replace(CASES["shared"], num_tokens=5)
    experts, (x, y) = packed(case), activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    expected = delta_added("triton", case, experts, x, y, lists, kernel_device)
    for name in ("sorted_token_ids_lora", "expert_ids_lora"):
        wide = torch.zeros(case.slots, lists[name].shape[1] + 37, dtype=torch.int32)
        wide[:, : lists[name].shape[1]] = lists[name]
        lists[name] = wide[:, : lists[name].shape[1]]
    lists = {
        name: t.to(kernel_device) if t._base is None else t._base.to(kernel_device)[:, : t.shape[1]]
        for name, t in lists.items()
    }
    experts, x, y = experts.to(kernel_device), x.to(kernel_device), y.to(kernel_device, copy=True)
    workspace = torch.full((case.splits, 64, 2 * case.max_rank), NAN, device=kernel_device)
    shrunk = workspace[:, : case.num_pairs]
    shrink("triton", case, experts, x, lists, shrunk)
    expand("triton", case, experts, shrunk, lists, y)
    assert torch.equal(y.cpu(), expected)
    assert workspace[:, case.num_pairs :].isnan().all()


@pytest.mark.parametrize("name", ["disabled", "shared_by_64", "down_holes"])
def test_lists_are_what_the_alignment_writes(name):
    """So that a result for these lists is one for its buffers; here a request is a row."""
    case = CASES[name]
    topk_ids, rows = case.topk_ids(), case.row_adapter()
    expected = lists_of(topk_ids, rows, case)
    lists = {key: torch.full_like(tensor, -7) for key, tensor in expected.items()}
    enabled = [int(slot not in case.disabled) for slot in range(case.slots)]
    moe_lora_align_block_size_torch(
        topk_ids,
        torch.arange(case.num_tokens + 1, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
        case.num_experts,
        case.block_size_m,
        case.slots,
        lists["sorted_token_ids_lora"].shape[1],
        lists["expert_ids_lora"].shape[1],
        **lists,
        adapter_enabled=torch.tensor(enabled, dtype=torch.int32),
        expert_map=None,
    )
    for key in ("num_tokens_post_padded_lora", "lora_ids"):
        assert torch.equal(lists[key], expected[key])
    for owner, length in enumerate(expected["num_tokens_post_padded_lora"].tolist()):
        for key, used in (
            ("sorted_token_ids_lora", length),
            ("expert_ids_lora", length // case.block_size_m),
        ):
            assert torch.equal(lists[key][owner, :used], expected[key][owner, :used])


def test_launchers_refuse_what_they_cannot_serve():
    case, experts = CASES["shared"], packed(CASES["shared"])
    x, y = activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    shrunk = torch.zeros(1, case.num_pairs, 2 * case.max_rank)
    with pytest.raises(AssertionError, match="activations are"):
        shrink("triton", case, experts, x.double(), lists, shrunk)
    by_pair, x_by_pair = replace(case, x_by_pair=True), x.repeat(2, 1)
    with pytest.raises(AssertionError, match="a shared A multiplies rows"):
        shrink("triton", by_pair, experts, x_by_pair, lists, shrunk)
    with pytest.raises(AssertionError, match="blocks of 48"):
        shrink("triton", replace(case, block_size_m=48), experts, x, lists, shrunk)
    with pytest.raises(AssertionError, match="do not cover"):
        expand("triton", replace(case, out_features=69), experts, shrunk, lists, y)
    with pytest.raises(AssertionError, match="shrunk has shape"):
        expand("triton", case, experts, shrunk[:, 1:], lists, y)
    wrong = lists | {"expert_ids_lora": lists["expert_ids_lora"].long()}
    with pytest.raises(AssertionError, match="expert_ids_lora is"):
        expand("triton", case, experts, shrunk, wrong, y)


VARIANTS = [(16, 2, torch.bfloat16), (64, 2, torch.bfloat16), (64, 1, torch.bfloat16)]


@pytest.mark.parametrize(("block_size_m", "stack", "dtype"), [*VARIANTS, (64, 2, torch.float32)])
def test_compiles_for_every_target(block_size_m, stack, dtype):
    shared = frozenset({1} if stack == 2 else ())
    case = Case(8, 2, 2, 3, (16, 3, 64), stack=stack, in_features=768, out_features=192)
    case = replace(case, block_size_m=block_size_m, dtype=dtype, shared=shared)
    experts, (x, y) = packed(case), activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    shrunk = torch.zeros(case.splits, case.num_pairs, stack * case.max_rank)
    launched = compile_launches(shrink, "triton", case, experts, x, lists, shrunk)
    launched += compile_launches(expand, "triton", case, experts, shrunk, lists, y)
    assert launched == 2


SWEEP = [
    (num_experts, top_k, slots, num_tokens)
    for turn, num_experts in enumerate((6, 60, 96, 128, 160))
    for step, top_k in enumerate((1, 2, 8, 10))
    if top_k <= num_experts
    for slots, num_tokens in [
        ((1, 4, 7)[(turn + step) % 3], (1, 17, 130, 5)[(turn + 2 * step) % 4]),
        ((7, 1, 4)[(turn + step) % 3], (257, 130, 64, 17)[(2 * turn + step) % 4]),
    ]
]


@pytest.mark.gpu
@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("block_size_m", [16, 64])
@pytest.mark.parametrize(("num_experts", "top_k", "slots", "num_tokens"), SWEEP)
def test_every_shape(num_experts, top_k, slots, num_tokens, block_size_m, stack):
    case = Case(
        num_experts,
        top_k,
        slots,
        num_tokens,
        (1, 5, 0, 16, 33, 64, 0),
        stack=stack,
        routing=("any", "last", "half", "holes")[(num_experts + num_tokens) % 4],
        shared=frozenset({0, 2} if stack == 2 else ()),
        in_features=136,
        out_features=72,
        block_size_m=block_size_m,
        splits=1 + num_tokens % 2,
        dtype=torch.bfloat16,
    )
    experts, (x, y) = packed(case), activations(case)
    lists = lists_of(case.topk_ids(), case.row_adapter(), case)
    found = delta_added("triton", case, experts, x, y, lists, torch.device("cuda"))
    assert_close(found, delta_added("torch", case, experts, x, y, lists), case.dtype)
    check_result(case, experts, x, y, found)
