"""moe_align: launchers against twins, both against a plain sort of Python tuples.

Outputs are compared whole: whatever a sort leaves alone must still hold the value put there.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from kernels.moe_align import (
    max_m_blocks,
    max_tokens_padded,
    moe_align_block_size,
    moe_align_block_size_torch,
    moe_align_block_size_triton,
    moe_lora_align_block_size,
    moe_lora_align_block_size_torch,
    moe_lora_align_block_size_triton,
)
from tests.kernels.cross_compile import compile_launches

POISON = -77


@dataclass
class Case:
    """Rows of expert ids, and the requests that own them: lengths, slots, enabled slots."""

    topk_ids: list[list[int]]
    num_experts: int
    block_size_m: int = 16
    lengths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    enabled: list[int] = field(default_factory=list)
    expert_map: list[int] | None = None
    first_token: int = 0


def routed(num_tokens: int, top_k: int, experts: list[int], seed: int = 0) -> list[list[int]]:
    """Distinct experts for each token, out of `experts`; every seventh row is padding."""
    generator = torch.Generator().manual_seed(seed + num_tokens * 100 + top_k)
    rows = []
    for row in range(num_tokens):
        order = torch.randperm(len(experts), generator=generator)[:top_k].tolist()
        rows.append([-1] * top_k if row % 7 == 6 else [experts[i] for i in order])
    return rows


def requests(num_tokens: int, max_loras: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Runs of 0 to 9 tokens that cover all but the last tokens, and their slots, some none."""
    generator = torch.Generator().manual_seed(seed + num_tokens + max_loras)
    lengths: list[int] = []
    while sum(lengths) < num_tokens - num_tokens // 8:
        length = int(torch.randint(0, 10, (1,), generator=generator))
        lengths.append(min(length, num_tokens - sum(lengths)))
    slots = torch.randint(-1, max_loras, (len(lengths),), generator=generator).tolist()
    return lengths, slots


def random_case(
    num_experts: int, top_k: int, max_loras: int, num_tokens: int, block_size_m: int
) -> Case:
    top_k = min(top_k, num_experts)
    lengths, slots = requests(num_tokens, max_loras)
    topk_ids = routed(num_tokens, top_k, list(range(num_experts)))
    enabled = [0 if slot % 3 == 1 else 1 for slot in range(max_loras)]
    return Case(topk_ids, num_experts, block_size_m, lengths, slots, enabled)


SWEPT = {
    "experts": (1, 6, 60, 96, 128, 160),
    "top_k": (1, 2, 8, 10),
    "slots": (1, 4, 7),
    "tokens": (1, 5, 17, 257),
    "block": (16, 64, 5),
}
PAIRWISE = [
    (1, 1, 1, 1, 16),
    (1, 1, 4, 257, 64),
    (6, 10, 7, 17, 16),
    (6, 8, 7, 257, 5),
    (60, 10, 1, 17, 16),
    (60, 1, 4, 17, 64),
    (96, 8, 1, 17, 5),
    (96, 2, 1, 5, 64),
    (128, 8, 4, 5, 16),
    (128, 10, 1, 1, 16),
    (160, 2, 1, 17, 16),
    (160, 8, 1, 1, 5),
]


CASES = {"x".join(map(str, numbers)): random_case(*numbers) for numbers in PAIRWISE}
LENGTHS, SLOTS = requests(40, 5)
FORTY = (LENGTHS, SLOTS, [1] * 5)
CASES |= {
    "last_expert": Case([[5]] * 40, 6, 16, *FORTY),
    "half_idle": Case(routed(40, 3, [1, 3, 5, 7]), 8, 16, *FORTY),
    "all_disabled": Case(routed(40, 2, [0, 1, 2]), 3, 16, LENGTHS, SLOTS, [0] * 5),
    "padding_alone": Case([[-1, -1]] * 4, 8, 16, [4], [0], [1]),
    "out_of_range": Case([[9, 0], [-5, 3], [2, 400]], 4, 16, [3], [0], [1]),
    "slots_out_of_range": Case([[0], [1], [2]], 4, 16, [1, 1, 1], [2, -3, 0], [1, 1]),
    "leading_tokens_of_no_request": Case(
        [[0], [1], [2], [1], [0]], 3, 4, [0, 2, 0, 0, 1, 0], [0, 1, 0, 0, 1, 0], [1, 1], None, 2
    ),
    "one_request_a_token": Case(
        routed(12, 2, list(range(6))), 6, 16, [1] * 12, [3, 0, -1, 1] * 3, [1, 1, 1, 1]
    ),
    "more_blocks_than_a_chunk": Case([[1]] * 1100, 2, 1, [1100], [0], [1]),
    "expert_map": Case(
        routed(40, 3, list(range(8))), 8, 16, *FORTY, expert_map=[-1, 3, -1, 0, 2, -1, 1, 9]
    ),
}


def plain_sort(
    topk_ids: list[list[int]],
    block_size_m: int,
    num_experts: int,
    slot_of: list[int] | None = None,
    slot: int = 0,
    expert_map: list[int] | None = None,
) -> tuple[list[int], list[int]]:
    """Sorted and padded pairs, and the expert of each block."""
    pairs: list[tuple[int, int]] = []
    for p, expert in enumerate(itertools.chain.from_iterable(topk_ids)):
        if 0 <= expert < num_experts:
            local = expert if expert_map is None else expert_map[expert]
            wanted = slot_of is None or slot_of[p // len(topk_ids[0])] == slot
            if wanted and 0 <= local < num_experts:
                pairs.append((local, p))
    nothing = len(topk_ids) * len(topk_ids[0])
    sorted_pairs: list[int] = []
    experts: list[int] = []
    for expert, run in itertools.groupby(sorted(pairs), key=lambda pair: pair[0]):
        own = [p for _, p in run]
        own += [nothing] * (-len(own) % block_size_m)
        sorted_pairs += own
        experts += [expert] * (len(own) // block_size_m)
    return sorted_pairs, experts


def slots_of_tokens(case: Case) -> list[int]:
    slots = [-1] * case.first_token
    for length, slot in zip(case.lengths, case.slots, strict=True):
        slots += [slot] * length
    return slots + [-1] * (len(case.topk_ids) - len(slots))


def poisoned(shape: tuple[int, ...], device) -> torch.Tensor:
    """A view of a wider buffer, as smaller batches have of the largest batch's."""
    buffer = torch.full((*shape[:-1], shape[-1] + 3), POISON, dtype=torch.int32, device=device)
    return buffer[..., : shape[-1]]


def whole(tensor: torch.Tensor) -> list:
    return (tensor if tensor._base is None else tensor._base).tolist()


def padded_with_poison(values: list[int], size: int) -> list[int]:
    assert len(values) <= size - 3
    return values + [POISON] * (size - len(values))


def buffer_sizes(case: Case) -> tuple[int, int]:
    num_pairs = len(case.topk_ids) * len(case.topk_ids[0])
    sizes = (num_pairs, case.num_experts, case.block_size_m)
    return max_tokens_padded(*sizes), max_m_blocks(*sizes)


def check_base(op, case: Case, device="cpu") -> None:
    padded, blocks = buffer_sizes(case)
    outputs = [poisoned((n,), device) for n in (padded, blocks)]
    total = torch.full((1,), POISON, dtype=torch.int32, device=device)
    topk_ids = torch.tensor(case.topk_ids, dtype=torch.int32, device=device)
    op(topk_ids, case.num_experts, case.block_size_m, *outputs, total)
    pairs, experts = plain_sort(case.topk_ids, case.block_size_m, case.num_experts)
    assert whole(outputs[0]) == padded_with_poison(pairs, padded + 3)
    assert whole(outputs[1]) == padded_with_poison(experts, blocks + 3)
    assert total.tolist() == [len(pairs)]


def lora_buffers(case: Case, device) -> dict[str, torch.Tensor]:
    max_loras = len(case.enabled)
    shapes = zip(("sorted_token_ids_lora", "expert_ids_lora"), buffer_sizes(case), strict=True)
    buffers = {name: poisoned((max_loras, n), device) for name, n in shapes}
    for name in ("num_tokens_post_padded_lora", "lora_ids"):
        buffers[name] = torch.full((max_loras,), POISON, dtype=torch.int32, device=device)
    return buffers


def sort_for_slots(op, case: Case, device, buffers: dict[str, torch.Tensor]) -> None:
    indptr = [case.first_token, *itertools.accumulate(case.lengths, initial=case.first_token)][1:]
    ints = {
        "topk_ids": case.topk_ids,
        "seg_indptr": indptr,
        "req_to_lora": case.slots,
        "adapter_enabled": case.enabled,
        "expert_map": case.expert_map,
    }
    inputs = {
        name: None if v is None else torch.tensor(v, dtype=torch.int32, device=device)
        for name, v in ints.items()
    }
    padded, blocks = buffer_sizes(case)
    op(
        num_experts=case.num_experts,
        block_size_m=case.block_size_m,
        max_loras=len(case.enabled),
        max_num_tokens_padded=padded,
        max_num_m_blocks=blocks,
        **inputs,
        **buffers,
    )


def check_lora(op, case: Case, device="cpu") -> None:
    padded, blocks = buffer_sizes(case)
    buffers = lora_buffers(case, device)
    sort_for_slots(op, case, device, buffers)
    slot_of = slots_of_tokens(case)
    expected: dict[str, list] = {name: [] for name in buffers}
    for slot, enabled in enumerate(case.enabled):
        pairs, experts = plain_sort(
            case.topk_ids, case.block_size_m, case.num_experts, slot_of, slot, case.expert_map
        )
        if not enabled:
            pairs, experts = [], []
        expected["sorted_token_ids_lora"].append(padded_with_poison(pairs, padded + 3))
        expected["expert_ids_lora"].append(padded_with_poison(experts, blocks + 3))
        expected["num_tokens_post_padded_lora"].append(len(pairs))
        expected["lora_ids"].append(slot if pairs else -1)
    for name, buffer in buffers.items():
        assert whole(buffer) == expected[name], name


@pytest.mark.parametrize("name", CASES)
def test_twins_sort_pairs(name):
    check_base(moe_align_block_size_torch, CASES[name])
    check_lora(moe_lora_align_block_size_torch, CASES[name])


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_sort_pairs(kernel_device, name):
    check_base(moe_align_block_size_triton, CASES[name], kernel_device)
    check_lora(moe_lora_align_block_size_triton, CASES[name], kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("block", SWEPT["block"])
@pytest.mark.parametrize("experts", SWEPT["experts"])
def test_kernels_sort_every_combination(experts, block):
    sweep = itertools.product(SWEPT["top_k"], SWEPT["slots"], SWEPT["tokens"])
    for top_k, slots, tokens in sweep:
        case = random_case(experts, top_k, slots, tokens, block)
        check_base(moe_align_block_size, case, "cuda")
        check_lora(moe_lora_align_block_size, case, "cuda")


@pytest.mark.kernel
def test_kernels_sort_the_longest_prefill(kernel_device):
    num_tokens = 8192 if kernel_device.type == "cuda" else 2000  # past one chunk either way
    topk_ids = [[(7 * t + 3 * t // 11 + j) % 13 for j in range(5)] for t in range(num_tokens)]
    lengths = [num_tokens // 2 - 1, 1, 0, num_tokens // 2]
    case = Case(topk_ids, 13, 64, lengths, [2, -1, 2, 0], [1, 0, 1])
    check_base(moe_align_block_size_triton, case, kernel_device)
    check_lora(moe_lora_align_block_size_triton, case, kernel_device)


@pytest.mark.kernel
def test_slots_may_be_permuted(kernel_device):
    case = CASES["6x10x7x17x16"]
    found = lora_buffers(case, kernel_device)
    sort_for_slots(moe_lora_align_block_size_triton, case, kernel_device, found)
    slot_of = [3, 6, 0, 4, 1, 5, 2]
    slots = [slot_of[slot] if slot >= 0 else slot for slot in case.slots]
    enabled = [case.enabled[slot_of.index(slot)] for slot in range(7)]
    moved = Case(**(vars(case) | {"slots": slots, "enabled": enabled}))
    permuted = lora_buffers(moved, kernel_device)
    sort_for_slots(moe_lora_align_block_size_triton, moved, kernel_device, permuted)
    for name in ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora"):
        for slot in range(7):
            assert torch.equal(found[name][slot], permuted[name][slot_of[slot]]), name


@pytest.mark.kernel
def test_buffers_used_before_leave_no_trace(kernel_device):
    case = CASES["half_idle"]
    buffers = lora_buffers(case, kernel_device)
    sort_for_slots(moe_lora_align_block_size_triton, case, kernel_device, buffers)
    nobody = Case(**(vars(case) | {"slots": [-1] * len(case.slots)}))
    sort_for_slots(moe_lora_align_block_size_triton, nobody, kernel_device, buffers)
    assert buffers["num_tokens_post_padded_lora"].tolist() == [0] * 5
    assert buffers["lora_ids"].tolist() == [-1] * 5


def test_the_bounds_hold_and_are_reached():
    for num_pairs, num_experts, block in itertools.product(range(1, 9), range(1, 4), (1, 2, 3)):
        counts = [
            split
            for split in itertools.product(range(num_pairs + 1), repeat=num_experts)
            if sum(split) == num_pairs
        ]
        most = max(sum(-(-count // block) for count in split) for split in counts)
        assert max_m_blocks(num_pairs, num_experts, block) == most
        assert max_tokens_padded(num_pairs, num_experts, block) == most * block
    assert max_m_blocks(0, 8, 16) == 0


def test_launchers_refuse_wrong_shapes_and_dtypes():
    ids = torch.zeros(2, 2, dtype=torch.int32)
    sorts = [torch.zeros(n, dtype=torch.int32) for n in (64, 4, 1)]
    with pytest.raises(AssertionError, match="topk_ids is"):
        moe_align_block_size_triton(ids.long(), 8, 16, *sorts)
    with pytest.raises(AssertionError, match="but 64 may be needed"):
        moe_align_block_size_triton(ids, 8, 16, sorts[0][:63], *sorts[1:])
    with pytest.raises(AssertionError, match="257 experts"):
        moe_align_block_size_triton(ids, 257, 16, *sorts)
    case = CASES["half_idle"]
    buffers = lora_buffers(case, "cpu") | {"lora_ids": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(AssertionError, match="lora_ids has shape"):
        sort_for_slots(moe_lora_align_block_size_triton, case, "cpu", buffers)


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(8, 8, 128), (2048, 4, 6)])
def test_compiles_for_every_target(num_tokens, top_k, num_experts):
    case = random_case(num_experts, top_k, 4, num_tokens, 64)
    launched = 0
    for expert_map in (None, list(range(num_experts))):
        case.expert_map = expert_map
        buffers = lora_buffers(case, "cpu")

        def launcher(**arguments):
            nonlocal launched
            launched += compile_launches(moe_lora_align_block_size_triton, **arguments)

        sort_for_slots(launcher, case, "cpu", buffers)
    topk_ids = torch.tensor(case.topk_ids, dtype=torch.int32)
    sorts = [torch.zeros(n, dtype=torch.int32) for n in (*buffer_sizes(case), 1)]
    launched += compile_launches(moe_align_block_size_triton, topk_ids, num_experts, 64, *sorts)
    assert launched == 3
