"""The bytes that an op of a mixture of experts must move; see `profiles.op_bytes`.

Of the experts those count that some row's pair has, of the adapters' factors those of a (slot,
expert) that some pair has.
"""

from collections import Counter
from typing import Any

import torch

from kernels.moe_lora_groups import walk_groups
from profiles.op_bytes import size

Tensor = torch.Tensor
Groups = dict[tuple[int, int], int]
"""Pairs of each (slot, expert)."""


def moe_route(
    x: Tensor,
    weight: Tensor,
    row_mask: Tensor | None,
    row_adapter: Tensor | None,
    adapter_enabled: Tensor | None,
    arena: Tensor | None,
    lora_ranks: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **_: Any,
) -> int:
    """The router's weights, and the factors of the adapters on it that some row has."""
    total = size(x, weight, row_mask, row_adapter, topk_weights, topk_ids)
    if row_adapter is not None and arena is not None and lora_ranks is not None:
        ranks = lora_ranks.tolist()
        slots = {slot for slot in _slots(row_adapter, adapter_enabled) if slot >= 0}
        factors = sum(ranks[slot] for slot in slots) * (x.shape[1] + weight.shape[0])
        total += factors * arena.element_size()
    return total


def moe_align_block_size(
    topk_ids: Tensor, block_size_m: int, num_tokens_post_padded: Tensor, **_: Any
) -> int:
    """The ids, then the sorted pairs and an expert for each block of them."""
    entries = int(num_tokens_post_padded.item())
    return size(topk_ids, num_tokens_post_padded) + 4 * (entries + entries // block_size_m)


def moe_lora_align_block_size(
    topk_ids: Tensor,
    req_to_lora: Tensor,
    block_size_m: int,
    num_tokens_post_padded_lora: Tensor,
    lora_ids: Tensor,
    **_: Any,
) -> int:
    lengths, slots = num_tokens_post_padded_lora.tolist(), lora_ids.tolist()
    entries = sum(length for length, slot in zip(lengths, slots, strict=True) if slot >= 0)
    fixed = size(topk_ids, req_to_lora, num_tokens_post_padded_lora, lora_ids)
    return fixed + 4 * (entries + entries // block_size_m)


def moe_gemm(
    x: Tensor, weight: Tensor, topk_ids: Tensor, pairs_per_row: int, out: Tensor, **_: Any
) -> int:
    """Each expert in use once, the rows that have one, and the pairs' outputs."""
    ids = topk_ids.flatten()
    used = ids >= 0
    pairs, experts = int(used.sum()), ids[used].unique().numel()
    rows = int(used.view(-1, pairs_per_row).any(dim=1).sum())
    return (
        size(topk_ids)
        + rows * size(x[0])
        + experts * weight[0].numel() * weight.element_size()
        + pairs * size(out[0])
    )


def moe_lora_shrink(
    x: Tensor,
    arena: Tensor,
    lora_ranks: Tensor,
    outer_ranks: Tensor | None,
    row_adapter: Tensor,
    adapter_enabled: Tensor,
    topk_ids: Tensor,
    pairs_per_row: int,
    x_read: bool = False,
    **_: Any,
) -> int:
    """Less the rows, where they are `x_read` already."""
    groups = _groups(row_adapter, adapter_enabled, topk_ids)
    return _shrink(x, arena, lora_ranks, outer_ranks, groups, pairs_per_row, x_read)


def moe_gemm_shrink(**arguments: Any) -> int:
    """The experts' product, and beside it x Aᵀ; x is the product's and counts once."""
    return moe_gemm(**arguments) + moe_lora_shrink(**arguments, x_read=True)


def moe_lora_shrink_grouped(
    x: Tensor,
    arena: Tensor,
    lora_ranks: Tensor,
    outer_ranks: Tensor | None,
    sorted_token_ids_lora: Tensor,
    expert_ids_lora: Tensor,
    num_tokens_post_padded_lora: Tensor,
    lora_ids: Tensor,
    block_size_m: int,
    pairs_per_row: int,
    shrunk: Tensor,
    **_: Any,
) -> int:
    lists = (sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora, lora_ids)
    groups = _sorted_groups(*lists, block_size_m, shrunk.shape[1])
    return _shrink(x, arena, lora_ranks, outer_ranks, groups, pairs_per_row)


def moe_lora_expand_grouped(
    arena: Tensor,
    lora_ranks: Tensor,
    sorted_token_ids_lora: Tensor,
    expert_ids_lora: Tensor,
    num_tokens_post_padded_lora: Tensor,
    lora_ids: Tensor,
    block_size_m: int,
    slice_sizes: list[int],
    y: Tensor,
    **_: Any,
) -> int:
    lists = (sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora, lora_ids)
    groups = _sorted_groups(*lists, block_size_m, y.shape[0])
    total = _expand(arena, lora_ranks, groups, slice_sizes)
    ranks = lora_ranks.tolist()
    for (slot, expert), pairs in groups.items():
        for stacked, width in enumerate(slice_sizes):
            touched = bool(ranks[stacked][slot][expert])
            total += 2 * pairs * width * y.element_size() if touched else 0
    return total


def moe_lora_gate_up(
    gate_up: Tensor,
    arena: Tensor,
    lora_ranks: Tensor,
    row_adapter: Tensor,
    adapter_enabled: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    **_: Any,
) -> int:
    """What the activation moves, and the adapters' B and x Aᵀ."""
    groups, pairs = _groups(row_adapter, adapter_enabled, topk_ids), int((topk_ids >= 0).sum())
    deltas = _expand(arena, lora_ranks, groups, [out.shape[1]] * 2)
    return size(topk_ids) + pairs * (size(gate_up[0]) + size(out[0])) + deltas


def moe_lora_down(
    down: Tensor,
    arena: Tensor,
    lora_ranks: Tensor,
    outer_ranks: Tensor | None,
    row_adapter: Tensor,
    adapter_enabled: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    out: Tensor,
    **_: Any,
) -> int:
    """What the weighted sum moves, and the adapters' B and x Aᵀ; a shared B counts once a slot."""
    groups = _groups(row_adapter, adapter_enabled, topk_ids)
    deltas = _expand(arena, lora_ranks, groups, [out.shape[1]], outer_ranks)
    return moe_combine(down, topk_ids, topk_weights, shared, shared_gate, out) + deltas


def moe_combine(
    pairs: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    out: Tensor,
    **_: Any,
) -> int:
    used = int((topk_ids >= 0).sum())
    return size(topk_ids, topk_weights, shared, shared_gate, out) + used * size(pairs[0])


def _slots(row_adapter: Tensor, adapter_enabled: Tensor | None) -> list[int]:
    """Each row's slot, -1 where it has none that is enabled."""
    slots = row_adapter.tolist()
    if adapter_enabled is None:
        return slots
    enabled = adapter_enabled.tolist()
    return [slot if 0 <= slot < len(enabled) and enabled[slot] else -1 for slot in slots]


def _groups(row_adapter: Tensor, adapter_enabled: Tensor, topk_ids: Tensor) -> Groups:
    found: Counter[tuple[int, int]] = Counter()
    slots = _slots(row_adapter, adapter_enabled)
    for slot, experts in zip(slots, topk_ids.tolist(), strict=True):
        found.update((slot, expert) for expert in experts if slot >= 0 and expert >= 0)
    return found


def _sorted_groups(
    sorted_ids: Tensor,
    expert_ids: Tensor,
    lengths: Tensor,
    lora_ids: Tensor,
    block_size_m: int,
    num_pairs: int,
) -> Groups:
    found: Counter[tuple[int, int]] = Counter()
    lists = (sorted_ids, expert_ids, lengths, lora_ids)
    for slot, expert, pairs in walk_groups(*lists, block_size_m, num_pairs):
        found[slot, expert] += len(pairs)
    return found


def _shrink(
    x: Tensor,
    arena: Tensor,
    lora_ranks: Tensor,
    outer_ranks: Tensor | None,
    groups: Groups,
    pairs_per_row: int,
    x_read: bool = False,
) -> int:
    """A [rank, K] of each group, or of each slot where it is shared; float32 x Aᵀ of the pairs;
    and unless `x_read` x, of which pairs of a row read the same."""
    ranks, width = lora_ranks.tolist(), x.shape[1]
    outer = outer_ranks.tolist() if outer_ranks is not None else None
    total, adapted, shared_slots = 0, 0, set()
    for (slot, expert), pairs in groups.items():
        any_rank = False
        for stacked in range(lora_ranks.shape[0]):
            if outer is not None and outer[stacked][slot]:
                shared_slots.add((stacked, slot))
                any_rank = True
                continue
            rank = ranks[stacked][slot][expert]
            total += rank * width * arena.element_size() + pairs * rank * 4
            any_rank = any_rank or bool(rank)
        adapted += pairs if any_rank else 0
    for stacked, slot in shared_slots:
        assert outer is not None
        rank = outer[stacked][slot]
        rows = sum(pairs for (s, _), pairs in groups.items() if s == slot) // pairs_per_row
        total += rank * width * arena.element_size() + max(rows, 1) * rank * 4
    return total + (0 if x_read else -(-adapted // pairs_per_row) * size(x[0]))


def _expand(
    arena: Tensor,
    lora_ranks: Tensor,
    groups: Groups,
    slice_sizes: list[int],
    outer_ranks: Tensor | None = None,
) -> int:
    """B [N, rank] of each group, or once a slot where it is shared, and float32 x Aᵀ."""
    ranks = lora_ranks.tolist()
    outer = outer_ranks.tolist() if outer_ranks is not None else None
    total, counted = 0, set()
    for (slot, expert), pairs in groups.items():
        for stacked, width in enumerate(slice_sizes):
            rank = ranks[stacked][slot][expert]
            shared = outer is not None and bool(outer[stacked][slot])
            place = (stacked, slot, -1 if shared else expert)
            total += pairs * rank * 4
            total += rank * width * arena.element_size() if place not in counted else 0
            counted.add(place)
    return total
