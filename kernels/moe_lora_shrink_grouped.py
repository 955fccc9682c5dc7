"""Expert LoRA by groups, the shrink: x A^T for many pairs, one slot and one expert at a time.

For prefill and large batches; few pairs are cheaper one by one. A pair p is one of the top_k
experts of row p // top_k, and every block of block_size_m pairs of one slot and expert reads that
expert's A once. Knows no model, only slots, experts and addresses.

    x   [T, K] with pairs_per_row = top_k (gate and up), or [P, K] with pairs_per_row = 1 (down);
        bfloat16, float16 or float32, the last dim contiguous
    arena [flat]   every adapter's weights; its dtype is the weights' dtype
    a_ptrs int64[stack, L, E], lora_ranks int32 likewise
        for L slots and E experts; stack is 2 (gate, up) or 1 (down). At an address lies A [rank,
        K], row-major, of true rank, starting on 16 bytes or more. Rank 0 means that the slot has
        nothing on that expert: its address is never read.
    outer_ptrs int64[stack, L], outer_ranks int32[stack, L]; or None, None
        rank > 0: the slot's A is one for all its experts and lies at the address in outer_ptrs.
        x A^T is then computed once a row, for the row's first pair, whatever that pair's expert.
        Only where pairs_per_row is top_k, and where a row's first pair is in the lists whenever
        another of its pairs is (an expert_map may break that: pass None).
    sorted_token_ids_lora int32[L, ...], expert_ids_lora int32[L, ...],
    num_tokens_post_padded_lora int32[L], lora_ids int32[L]
        from `moe_lora_align_block_size`: list l holds the pairs of slot lora_ids[l] by expert; a
        slot of -1 or a length of 0 means none, a pair of P or more is padding.
    shrunk float32[splits, P, stack * max_rank]   partial sums: pair p, slice j and rank index r at
        [:, p, j * max_rank + r]. What lies beyond a true rank, and pairs without work, are not
        written.

A pair's result depends on its own row of x and its own A and on the shapes, never on neighbours,
its slot or its place in a list. No atomics: a split is one program's sum.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import as_weights, weight_view
from kernels.moe_lora_groups import (
    GROUP_TABLES,
    block_ends,
    block_programs,
    check_groups,
    check_table,
    find_group,
    walk_groups,
)
from kernels.op import define_op


@triton.jit
def _find_a(
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    arena,
    stacked,
    slot,
    entry,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
):
    """A slice's A and rank for a group, and the step between the pairs that it multiplies."""
    place = entry + stacked * (MAX_LORAS * NUM_EXPERTS)
    address = tl.load(a_ptrs + place)
    rank = tl.load(lora_ranks + place)
    step = 1
    if outer_ranks is not None:
        outer_rank = tl.load(outer_ranks + slot + stacked * MAX_LORAS)
        outer_address = tl.load(outer_ptrs + slot + stacked * MAX_LORAS)
        address = tl.where(outer_rank > 0, outer_address, address)
        step = tl.where(outer_rank > 0, PAIRS_PER_ROW, 1)
        rank = tl.where(outer_rank > 0, outer_rank, rank)
    return as_weights(address, arena), rank, step


@triton.jit
def _add_product(x_block, a, ranks, rank, k, acc, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """acc + x_block A[ranks, k]^T."""
    mask = (ranks < rank)[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (k < K)[None, :]
    a_block = tl.load(a + ranks[:, None] * K + k[None, :], mask=mask, other=0.0)
    if x_block.dtype != a_block.dtype:
        x_block, a_block = x_block.to(tl.float32), a_block.to(tl.float32)
    return tl.dot(x_block, tl.trans(a_block), acc, input_precision="ieee")


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "list_stride",
        "blocks_stride",
        "split_rows",
        "blocks_per_split",
    ],
    do_not_specialize_on_alignment=GROUP_TABLES,
)
def _shrink_grouped_kernel(
    x,
    arena,
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    sorted_token_ids_lora,
    expert_ids_lora,
    num_tokens_post_padded_lora,
    lora_ids,
    shrunk,
    num_pairs,
    list_stride,
    blocks_stride,
    split_rows,
    blocks_per_split,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    first_rank = tl.program_id(0) * BLOCK_R
    ranks = first_rank + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    first_k = split * blocks_per_split * BLOCK_K
    end_k = tl.minimum(first_k + blocks_per_split * BLOCK_K, K)
    ends, num_blocks = block_ends(
        num_tokens_post_padded_lora, lora_ids, MAX_LORAS, BLOCK_LORAS, BLOCK_M
    )
    for block in range(tl.program_id(2), num_blocks, tl.num_programs(2)):
        slot, entry, pairs = find_group(
            block,
            ends,
            sorted_token_ids_lora,
            expert_ids_lora,
            lora_ids,
            list_stride,
            blocks_stride,
            NUM_EXPERTS,
            BLOCK_M,
        )
        a0, rank0, step0 = _find_a(
            a_ptrs,
            lora_ranks,
            outer_ptrs,
            outer_ranks,
            arena,
            0,
            slot,
            entry,
            MAX_LORAS,
            NUM_EXPERTS,
            PAIRS_PER_ROW,
        )
        # Newer interpreters mask with tiles of bools alone: a scalar enters through a limit.
        live0 = (pairs < tl.where(first_rank < rank0, num_pairs, 0)) & (pairs % step0 == 0)
        live = live0
        if STACK == 2:
            a1, rank1, step1 = _find_a(
                a_ptrs,
                lora_ranks,
                outer_ptrs,
                outer_ranks,
                arena,
                1,
                slot,
                entry,
                MAX_LORAS,
                NUM_EXPERTS,
                PAIRS_PER_ROW,
            )
            live1 = (pairs < tl.where(first_rank < rank1, num_pairs, 0)) & (pairs % step1 == 0)
            live = live0 | live1
        if tl.max(live.to(tl.int32)) > 0:
            x_rows = x + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * X_STRIDE
            acc0 = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            acc1 = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for start in range(first_k, end_k, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                x_mask = live[:, None]
                if K % BLOCK_K != 0:
                    x_mask = x_mask & (k < K)[None, :]
                x_block = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
                acc0 = _add_product(x_block, a0, ranks, rank0, k, acc0, K, BLOCK_K)
                if STACK == 2:
                    acc1 = _add_product(x_block, a1, ranks, rank1, k, acc1, K, BLOCK_K)
            places = (split * split_rows + pairs).to(tl.int64)[:, None] * SHRUNK_STRIDE
            out = shrunk + places + ranks[None, :]
            tl.store(out, acc0, mask=live0[:, None] & (ranks < rank0)[None, :])
            if STACK == 2:
                tl.store(out + MAX_RANK, acc1, mask=live1[:, None] & (ranks < rank1)[None, :])


def moe_lora_shrink_grouped_triton(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    lora_ids: torch.Tensor,
    block_size_m: int,
    top_k: int,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """Sum over splits of shrunk[split, p, j * max_rank + r] = x[p // pairs_per_row] . A[r].

    A is slice j's of pair p's slot and expert. Writes `shrunk` in place: split i covers the i-th
    of shrunk.shape[0] equal ranges of K. Products in x's dtype where A has the same, else in
    float32; all sums in float32. The slices share one read of x.
    """
    num_pairs = x.shape[0] * pairs_per_row
    check_groups(
        x,
        num_pairs,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ranks,
        sorted_token_ids_lora,
        expert_ids_lora,
        num_tokens_post_padded_lora,
        lora_ids,
        block_size_m,
        top_k,
        max_rank,
        shrunk,
    )
    assert pairs_per_row in (1, top_k), f"{pairs_per_row} pairs a row, not 1 or {top_k}"
    assert (outer_ptrs is None) == (outer_ranks is None), "outer_ptrs and outer_ranks go together"
    if outer_ptrs is not None:
        assert pairs_per_row == top_k, "a shared A multiplies rows, not pairs"
        check_table("outer_ptrs", outer_ptrs, torch.int64, a_ptrs.shape[:2])
    in_features, (stack, max_loras, num_experts) = x.shape[1], a_ptrs.shape
    splits = shrunk.shape[0]
    wide = x.dtype == torch.float32 or x.dtype != arena.dtype
    block_r = min(64, max(16, triton.next_power_of_2(max_rank)))
    block_k = 32 if wide else 128 if block_size_m == 16 else 64
    rank_tiles = triton.cdiv(max_rank, block_r)
    blocks = block_programs(num_pairs, max_loras, num_experts, block_size_m, rank_tiles * splits)
    _shrink_grouped_kernel[(rank_tiles, splits, blocks)](
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        sorted_token_ids_lora,
        expert_ids_lora,
        num_tokens_post_padded_lora,
        lora_ids,
        shrunk,
        num_pairs,
        sorted_token_ids_lora.stride(0),
        expert_ids_lora.stride(0),
        shrunk.stride(0) // shrunk.stride(1),
        triton.cdiv(triton.cdiv(in_features, block_k), splits),
        K=in_features,
        X_STRIDE=x.stride(0),
        SHRUNK_STRIDE=shrunk.stride(1),
        STACK=stack,
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        BLOCK_LORAS=triton.next_power_of_2(max_loras),
        NUM_EXPERTS=num_experts,
        PAIRS_PER_ROW=pairs_per_row,
        BLOCK_M=block_size_m,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x.device),
    )


def moe_lora_shrink_grouped_torch(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    lora_ids: torch.Tensor,
    block_size_m: int,
    top_k: int,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_shrink_grouped_triton`; the whole sum goes to the first split.

    Every product takes all rows of x and keeps the group's: a library product's bits may depend
    on its number of rows, which must not be how many neighbours share an adapter and an expert.
    """
    wide = x.float()
    ranks, addresses = lora_ranks.tolist(), a_ptrs.tolist()
    lists = (sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora, lora_ids)
    for slot, expert, group in walk_groups(*lists, block_size_m, shrunk.shape[1]):
        for stacked in range(a_ptrs.shape[0]):
            pairs, rank = group, ranks[stacked][slot][expert]
            address = addresses[stacked][slot][expert]
            if outer_ranks is not None and outer_ptrs is not None and outer_ranks[stacked, slot]:
                pairs, rank = group[group % top_k == 0], int(outer_ranks[stacked, slot])
                address = int(outer_ptrs[stacked, slot])
            if rank and len(pairs):
                product = wide @ weight_view(arena, address, rank, x.shape[1]).T
                columns = slice(stacked * max_rank, stacked * max_rank + rank)
                shrunk[0, pairs, columns] = product[pairs // pairs_per_row]
                shrunk[1:, pairs, columns] = 0


moe_lora_shrink_grouped = define_op(
    moe_lora_shrink_grouped_triton, moe_lora_shrink_grouped_torch, mutates=("shrunk",)
)
