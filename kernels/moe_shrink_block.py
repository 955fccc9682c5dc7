"""x A^T of a block of pairs that all name one expert, on the tensor cores.

The pairs of one adapter are a group, which owns BLOCK_R columns of one product over K: so each
group's A is read once a block, whatever rows it serves, and a pair keeps its own group's columns.
What a pair gets depends on its own row and its own adapter, never on the others of its block.
`moe_lora_pairs` says where things lie.
"""

import triton
import triton.language as tl

from kernels.lora_segments import as_weights


@triton.jit
def block_shrink_tile(
    x,  # [P / PAIRS_PER_ROW, K]
    arena,
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    shrunk,  # float32[P, STACK * MAX_RANK]
    num_pairs,
    block,
    stacked,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """The sums of one slice of a block's pairs: GROUPS groups at a time, which nearly always are
    all, and BLOCK_R ranks of each."""
    # No early return: a function that has one is not inlined.
    if block * BLOCK_M < tl.load(num_tokens_post_padded):
        expert = tl.load(expert_ids + block)
        pairs = tl.load(sorted_token_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
        slots = _slots_of(row_adapter, adapter_enabled, pairs, num_pairs, TOP_K, MAX_LORAS)
        numbers = _numbers_of(slots, MAX_LORAS, GROUPS, BLOCK_M)
        own_slots = slots
        if outer_ranks is not None:
            # A shared A works once a row, at its first pair, whether or not the slot has that
            # expert.
            shared = tl.load(outer_ranks + stacked * MAX_LORAS + slots, mask=slots >= 0, other=0)
            own_slots = tl.where((shared > 0) & (pairs % PAIRS_PER_ROW != 0), -1, slots)
        rows = tl.where(own_slots >= 0, pairs // PAIRS_PER_ROW, 0).to(tl.int64)
        x_rows = x + rows * X_STRIDE
        sums = shrunk + pairs.to(tl.int64) * SHRUNK_STRIDE + stacked * MAX_RANK
        for first_group in range(0, 1 if MAX_LORAS <= GROUPS else tl.max(numbers) + 1, GROUPS):
            is_group = (numbers - first_group)[:, None] == tl.arange(0, GROUPS)[None, :]
            groups = tl.max(tl.where(is_group, slots[:, None], -1), axis=0)  # the slot of each
            entry = (stacked * MAX_LORAS + groups) * NUM_EXPERTS + expert
            ranks = tl.load(lora_ranks + entry, mask=groups >= 0, other=0)
            addresses = tl.load(a_ptrs + entry, mask=groups >= 0, other=0)
            if outer_ranks is not None:
                outer_entry = stacked * MAX_LORAS + groups
                outer = tl.load(outer_ranks + outer_entry, mask=groups >= 0, other=0)
                ranks = tl.where(outer > 0, outer, ranks)
                outer_addresses = tl.load(outer_ptrs + outer_entry, mask=groups >= 0, other=0)
                addresses = tl.where(outer > 0, outer_addresses, addresses)
            _store_sums(
                x_rows,
                own_slots,
                arena,
                groups,
                ranks,
                addresses,
                sums,
                K,
                GROUPS,
                BLOCK_M,
                BLOCK_R,
                BLOCK_A,
            )


@triton.jit
def _store_sums(
    x_rows,  # [BLOCK_M]
    slots,
    arena,
    groups,  # [GROUPS]
    ranks,
    addresses,
    sums,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """The sums of those pairs of a block whose slot is one of the groups'."""
    COLUMNS: tl.constexpr = GROUPS * BLOCK_R
    index = tl.arange(0, COLUMNS) % BLOCK_R
    column_slots = _by_column(groups, GROUPS, BLOCK_R)
    column_ranks = _by_column(ranks, GROUPS, BLOCK_R)
    a = as_weights(_by_column(addresses, GROUPS, BLOCK_R), arena)
    has_slot = slots >= 0
    own = has_slot[None, :] & (column_slots[:, None] == slots[None, :])
    for first_rank in range(0, tl.max(ranks), BLOCK_R):
        r = first_rank + index
        inside = r < column_ranks
        a_rows = a[:, None] + r[:, None] * K
        acc = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
        for start in range(0, K, BLOCK_A):
            k = start + tl.arange(0, BLOCK_A)
            a_mask, x_mask = inside[:, None], has_slot[:, None]
            if K % BLOCK_A != 0:
                a_mask, x_mask = a_mask & (k < K)[None, :], x_mask & (k < K)[None, :]
            a_block = tl.load(a_rows + k[None, :], mask=a_mask, other=0.0)
            x_block = tl.load(
                x_rows[:, None] + k[None, :],
                mask=x_mask,
                other=0.0,
                eviction_policy="evict_last",
            )
            acc = tl.dot(a_block, tl.trans(x_block), acc)
        tl.store(sums[None, :] + r[:, None], acc, mask=own & inside[:, None])


@triton.jit
def _slots_of(
    row_adapter,
    adapter_enabled,
    pairs,
    num_pairs,
    TOP_K: tl.constexpr,
    MAX_LORAS: tl.constexpr,
):
    """The enabled slot of each pair [BLOCK_M], -1 for none."""
    slots = tl.load(row_adapter + pairs // TOP_K, mask=pairs < num_pairs, other=-1)
    known = (slots >= 0) & (slots < MAX_LORAS)
    enabled = tl.load(adapter_enabled + slots, mask=known, other=0)
    return tl.where(known & (enabled != 0), slots, -1)


@triton.jit
def _numbers_of(slots, MAX_LORAS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Each pair's group [BLOCK_M], counted from 0; -1 without a slot."""
    if MAX_LORAS <= GROUPS:
        numbers = slots
    else:  # in the order of their first pairs
        place = tl.arange(0, BLOCK_M)
        same = slots[:, None] == slots[None, :]
        first = tl.min(tl.where(same, place[None, :], BLOCK_M), axis=1)
        leads = ((first == place) & (slots >= 0)).to(tl.int32)
        numbers = tl.sum(tl.where(place[None, :] < first[:, None], leads[None, :], 0), axis=1)
        numbers = tl.where(slots >= 0, numbers, -1)
    return numbers


@triton.jit
def _by_column(values, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """[GROUPS] to [GROUPS * BLOCK_R], each value BLOCK_R times."""
    return tl.reshape(tl.broadcast_to(values[:, None], [GROUPS, BLOCK_R]), [GROUPS * BLOCK_R])
