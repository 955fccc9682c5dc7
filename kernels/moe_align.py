"""Pairs sorted by expert and padded to whole blocks: what a grouped GEMM over experts reads.

Token t's top-k experts give it k pairs; pair p belongs to token p // k and to the expert
topk_ids.flat[p]. Knows experts, adapter slots and requests as numbers, never their weights.

A sort of pairs holds, for each of its experts in ascending order, the expert's pairs in ascending
order, then the value P = T * k (no pair) up to a multiple of block_size_m. So block b, the entries
from b * block_size_m on, belongs to one expert, expert_ids[b], and tells padding by its value. No
entry at or beyond num_tokens_post_padded, and no block that starts there, is written.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.moe_top_k import MAX_EXPERTS
from kernels.op import define_op


def max_m_blocks(num_pairs: int, num_experts: int, block_size_m: int) -> int:
    """The most blocks that a sort of `num_pairs` pairs can take, whatever the experts are.

    The first pair of each expert in use opens a block, every block_size_m further ones at most
    one more; and no more experts are in use than there are pairs.
    """
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // block_size_m


def max_tokens_padded(num_pairs: int, num_experts: int, block_size_m: int) -> int:
    """The most entries, padding included, that a sort of `num_pairs` pairs can take."""
    return max_m_blocks(num_pairs, num_experts, block_size_m) * block_size_m


@triton.jit
def _experts_of(
    topk_ids,
    seg_indptr,
    req_to_lora,
    expert_map,
    pairs,
    num_pairs,
    num_requests,
    search_steps,
    slot,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """Each pair's expert (mapped, if there is a map); -1 where the pair is not in this sort."""
    expert = tl.load(topk_ids + pairs, mask=pairs < num_pairs, other=-1)
    expert = tl.where(expert < NUM_EXPERTS, expert, -1)
    if expert_map is not None:
        expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
        expert = tl.where(expert < NUM_EXPERTS, expert, -1)
    if req_to_lora is not None:
        # The last request that starts at or before the token is the one that has it.
        token = pairs // TOP_K
        low = tl.zeros_like(pairs)  # this many bounds are known to be <= token
        high = low + (num_requests + 1)
        for _ in range(search_steps):
            middle = (low + high) // 2
            open_ = low < high
            bound = tl.load(seg_indptr + middle, mask=open_, other=0)
            low = tl.where(open_ & (bound <= token), middle + 1, low)
            high = tl.where(open_ & (bound > token), middle, high)
        request = low - 1
        inside = (request >= 0) & (request < num_requests) & (expert >= 0)
        mine = tl.load(req_to_lora + request, mask=inside, other=-1) == slot
        expert = tl.where(inside & mine, expert, -1)
    return expert


_COUNTS = ["num_pairs", "num_requests", "search_steps", "sorted_stride", "expert_stride"]
_BUFFERS = ["topk_ids", "seg_indptr", "req_to_lora", "adapter_enabled", "expert_map", "lora_ids"]
_BUFFERS += ["sorted_token_ids", "expert_ids", "num_tokens_post_padded"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_BUFFERS)
def _moe_align_kernel(
    topk_ids,
    seg_indptr,
    req_to_lora,
    adapter_enabled,
    expert_map,
    lora_ids,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    num_pairs,
    num_requests,
    search_steps,
    sorted_stride,
    expert_stride,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PADDING: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    own = tl.program_id(0)
    slot = tl.program_id(1)
    if adapter_enabled is not None:
        enabled = tl.load(adapter_enabled + slot)
        if enabled == 0:
            if own == 0:
                tl.store(num_tokens_post_padded + slot, 0)
                tl.store(lora_ids + slot, -1)
            return
    counts = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pairs = first + tl.arange(0, CHUNK)
        expert = _experts_of(
            topk_ids,
            seg_indptr,
            req_to_lora,
            expert_map,
            pairs,
            num_pairs,
            num_requests,
            search_steps,
            slot,
            TOP_K,
            NUM_EXPERTS,
        )
        counts += tl.histogram(tl.maximum(expert, 0), BLOCK_EXPERTS, mask=expert >= 0)
    experts = tl.arange(0, BLOCK_EXPERTS)
    blocks = (counts + (BLOCK_SIZE_M - 1)) // BLOCK_SIZE_M
    if own == 0:
        total = tl.sum(blocks) * BLOCK_SIZE_M
        tl.store(num_tokens_post_padded + slot, total)
        if lora_ids is not None:
            tl.store(lora_ids + slot, tl.where(total > 0, slot, -1))
    count = tl.sum(tl.where(experts == own, counts, 0))
    if count == 0:
        return
    first_block = tl.sum(tl.where(experts < own, blocks, 0))
    num_blocks = tl.sum(tl.where(experts == own, blocks, 0))
    own_ids = expert_ids + slot.to(tl.int64) * expert_stride + first_block
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        tl.store(own_ids + block, own, mask=block < num_blocks)
    run = sorted_token_ids + slot.to(tl.int64) * sorted_stride + first_block * BLOCK_SIZE_M
    place = count + tl.arange(0, BLOCK_PADDING)  # less than a block of padding
    tl.store(run + place, num_pairs, mask=place < num_blocks * BLOCK_SIZE_M)
    placed = 0
    for first in range(0, num_pairs, CHUNK):
        pairs = first + tl.arange(0, CHUNK)
        expert = _experts_of(
            topk_ids,
            seg_indptr,
            req_to_lora,
            expert_map,
            pairs,
            num_pairs,
            num_requests,
            search_steps,
            slot,
            TOP_K,
            NUM_EXPERTS,
        )
        mine = (expert == own).to(tl.int32)
        tl.store(run + placed + tl.cumsum(mine) - mine, pairs, mask=mine != 0)
        placed += tl.sum(mine)


def _launch(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size_m: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    *lora: torch.Tensor | None,
) -> None:
    """`lora`: nothing, or what the kernel takes from seg_indptr to lora_ids."""
    seg_indptr, req_to_lora, adapter_enabled, expert_map, lora_ids = lora or (None,) * 5
    num_pairs = topk_ids.numel()
    num_requests = 0 if req_to_lora is None else req_to_lora.shape[0]
    chunk = 128 if num_pairs <= 128 else 1024 if num_pairs <= 8192 else 4096
    _moe_align_kernel[(num_experts, num_tokens_post_padded.shape[0])](
        topk_ids,
        seg_indptr,
        req_to_lora,
        adapter_enabled,
        expert_map,
        lora_ids,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        num_pairs,
        num_requests,
        (num_requests + 1).bit_length(),
        sorted_token_ids.stride(0),
        expert_ids.stride(0),
        TOP_K=topk_ids.shape[1],
        NUM_EXPERTS=num_experts,
        BLOCK_SIZE_M=block_size_m,
        BLOCK_EXPERTS=max(32, triton.next_power_of_2(num_experts)),
        BLOCK_PADDING=triton.next_power_of_2(block_size_m),
        CHUNK=chunk,
        num_warps=8 if chunk == 4096 else 4,
        **dependent_launch(topk_ids.device),
    )


def _check_int32(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32"
    assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{name}'s last dim is not contiguous"


def _check_sort(
    topk_ids: torch.Tensor, num_experts: int, block_size_m: int, padded: int, blocks: int
) -> None:
    """What both sorts ask: int32 ids, and room for whatever experts the pairs may have."""
    assert 1 <= num_experts <= MAX_EXPERTS, f"{num_experts} experts, not in 1..{MAX_EXPERTS}"
    assert block_size_m >= 1, f"block_size_m {block_size_m} is below 1"
    assert topk_ids.dim() == 2, f"topk_ids is [T, k], not {tuple(topk_ids.shape)}"
    assert topk_ids.dtype == torch.int32, f"topk_ids is {topk_ids.dtype}, not int32"
    assert topk_ids.is_contiguous(), "topk_ids is not contiguous"
    least = max_m_blocks(topk_ids.numel(), num_experts, block_size_m)
    assert blocks >= least, f"{blocks} entries for expert_ids, but {least} blocks may be needed"
    least *= block_size_m
    assert padded >= least, f"{padded} entries for sorted_token_ids, but {least} may be needed"


def moe_align_block_size_triton(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size_m: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
) -> None:
    """Sort the pairs of `topk_ids` by expert, each expert's run padded to whole blocks.

    topk_ids int32[T, k]: ids outside [0, num_experts) give no pair. Written in place, all int32,
    as the module describes: sorted_token_ids[at least max_tokens_padded(T * k, ...)],
    expert_ids[at least max_m_blocks(T * k, ...)], num_tokens_post_padded[1].

    One launch of a program per expert and no atomics on memory: each counts the pairs of all
    experts, which gives the place of its own run, then places its own pairs in their order.
    Reads 8 * T * k bytes a program, from cache. Compiled once per T * k <= 128, <= 8192 and
    above. Raises AssertionError on other shapes or dtypes.
    """
    _check_int32("sorted_token_ids", sorted_token_ids, (sorted_token_ids.numel(),))
    _check_int32("expert_ids", expert_ids, (expert_ids.numel(),))
    _check_int32("num_tokens_post_padded", num_tokens_post_padded, (1,))
    _check_sort(topk_ids, num_experts, block_size_m, sorted_token_ids.shape[0], expert_ids.shape[0])
    sort = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    _launch(topk_ids, num_experts, block_size_m, *sort)


def moe_lora_align_block_size_triton(
    topk_ids: torch.Tensor,
    seg_indptr: torch.Tensor,
    req_to_lora: torch.Tensor,
    num_experts: int,
    block_size_m: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    adapter_enabled: torch.Tensor,
    lora_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """For each adapter slot, sort the pairs of its tokens by expert, padded to whole blocks.

    topk_ids int32[T, k] as in `moe_align_block_size`. Requests are runs of tokens in row order:
    seg_indptr int32[R + 1], not falling, gives request r the tokens seg_indptr[r] up to
    seg_indptr[r + 1], and req_to_lora int32[R] its slot; tokens of no request, and slots outside
    [0, max_loras) such as -1, are in no sort. adapter_enabled int32[max_loras]: a slot at 0 has
    no sort. expert_map int32[num_experts] or None: topk_ids are global experts then, the map
    holds their local ids, which are what is sorted by, and pairs of -1 are dropped.

    Written in place, all int32, row l being slot l's sort as the module describes:
    sorted_token_ids_lora[max_loras, max_num_tokens_padded] and
    expert_ids_lora[max_loras, max_num_m_blocks], both of any row stride and of room for all T * k
    pairs (see `max_tokens_padded`); num_tokens_post_padded_lora[max_loras], 0 where the slot has
    no pair; lora_ids[max_loras], there -1, else the slot itself.

    One launch over (experts, slots), as in `moe_align_block_size`; a disabled slot's programs
    return at once. Raises AssertionError on other shapes or dtypes.
    """
    num_requests = req_to_lora.shape[0]
    assert num_requests >= 1, "req_to_lora holds no request"
    assert max_loras >= 1, f"{max_loras} adapter slots"
    for name, tensor, shape in (
        ("seg_indptr", seg_indptr, (num_requests + 1,)),
        ("req_to_lora", req_to_lora, (num_requests,)),
        ("sorted_token_ids_lora", sorted_token_ids_lora, (max_loras, max_num_tokens_padded)),
        ("expert_ids_lora", expert_ids_lora, (max_loras, max_num_m_blocks)),
        ("num_tokens_post_padded_lora", num_tokens_post_padded_lora, (max_loras,)),
        ("adapter_enabled", adapter_enabled, (max_loras,)),
        ("lora_ids", lora_ids, (max_loras,)),
    ):
        _check_int32(name, tensor, shape)
    if expert_map is not None:
        _check_int32("expert_map", expert_map, (num_experts,))
    _check_sort(topk_ids, num_experts, block_size_m, max_num_tokens_padded, max_num_m_blocks)
    sorts = (sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora)
    lora = (seg_indptr, req_to_lora, adapter_enabled, expert_map, lora_ids)
    _launch(topk_ids, num_experts, block_size_m, *sorts, *lora)


def _sort_pairs(
    expert: torch.Tensor,
    num_experts: int,
    block_size_m: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
) -> int:
    """One sort of the pairs whose `expert` [P] is not -1; the entries it takes."""
    pairs = torch.nonzero(expert >= 0).flatten()
    sorted_experts, order = torch.sort(expert[pairs].long(), stable=True)
    counts = torch.bincount(sorted_experts, minlength=num_experts)
    blocks = (counts + block_size_m - 1) // block_size_m
    total = int(blocks.sum()) * block_size_m
    first_entry = (blocks.cumsum(0) - blocks) * block_size_m
    first_pair = counts.cumsum(0) - counts
    in_run = torch.arange(len(order), device=expert.device) - first_pair[sorted_experts]
    sorted_token_ids[:total] = expert.numel()
    sorted_token_ids[first_entry[sorted_experts] + in_run] = pairs[order].int()
    experts = torch.arange(num_experts, dtype=torch.int32, device=expert.device)
    expert_ids[: total // block_size_m] = experts.repeat_interleave(blocks)
    return total


def _known(expert: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.where((expert >= 0) & (expert < num_experts), expert, -1)


def moe_align_block_size_torch(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size_m: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
) -> None:
    """Torch twin of `moe_align_block_size_triton`: a stable sort."""
    expert = _known(topk_ids.flatten(), num_experts)
    total = _sort_pairs(expert, num_experts, block_size_m, sorted_token_ids, expert_ids)
    num_tokens_post_padded.fill_(total)


def moe_lora_align_block_size_torch(
    topk_ids: torch.Tensor,
    seg_indptr: torch.Tensor,
    req_to_lora: torch.Tensor,
    num_experts: int,
    block_size_m: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    adapter_enabled: torch.Tensor,
    lora_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Torch twin of `moe_lora_align_block_size_triton`: a stable sort for each slot."""
    num_tokens, top_k = topk_ids.shape
    expert = _known(topk_ids.flatten(), num_experts)
    if expert_map is not None:
        local = _known(expert_map[expert.clamp(min=0)], num_experts)
        expert = torch.where(expert >= 0, local, -1)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=topk_ids.device)
    request = torch.searchsorted(seg_indptr, tokens, right=True) - 1
    inside = (request >= 0) & (request < req_to_lora.shape[0])
    slots = torch.where(inside, req_to_lora[request.clamp(0, req_to_lora.shape[0] - 1)], -1)
    pair_slots = slots.repeat_interleave(top_k)
    for slot, enabled in enumerate(adapter_enabled.tolist()):
        own = torch.where((pair_slots == slot) & (enabled != 0), expert, -1)
        sort = (sorted_token_ids_lora[slot], expert_ids_lora[slot])
        total = _sort_pairs(own, num_experts, block_size_m, *sort)
        num_tokens_post_padded_lora[slot] = total
        lora_ids[slot] = slot if total else -1


moe_align_block_size = define_op(
    moe_align_block_size_triton,
    moe_align_block_size_torch,
    mutates=("sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
)
moe_lora_align_block_size = define_op(
    moe_lora_align_block_size_triton,
    moe_lora_align_block_size_torch,
    mutates=("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "lora_ids"),
)
