"""Expert LoRA by groups, the expand: many pairs' deltas added to the base output in place.

The second half of `moe_lora_shrink_grouped`: y += scaling * shrunk B^T, one slot and one expert
at a time, every block of block_size_m pairs reading that expert's B once. Slots, experts, lists
of pairs, lora_ranks and `shrunk` are as described there.

    y [P, sum(slice_sizes)]   bfloat16, float16 or float32, the last dim contiguous
    b_ptrs int64[stack, L, E], scalings float32[stack, L, E]   at an address lies B [N, rank],
        row-major, of true rank, starting on 16 bytes or more; rank 0: its address is never read
    outer_ranks int32[stack, L], or None   rank > 0: the slot's A is one for all its experts, and
        what belongs to any pair of a row stands in `shrunk` at the row's first pair

A pair's result depends on its own row of `shrunk` and y and its own B and on the shapes, never on
neighbours, its slot or its place in a list. No atomics: partials are summed in their order.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import weight_view, weights_at
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


@triton.jit(
    do_not_specialize=["num_pairs", "list_stride", "blocks_stride", "split_rows"],
    do_not_specialize_on_alignment=GROUP_TABLES,
)
def _expand_grouped_kernel(
    shrunk,
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    outer_ranks,
    sorted_token_ids_lora,
    expert_ids_lora,
    num_tokens_post_padded_lora,
    lora_ids,
    y,
    num_pairs,
    list_stride,
    blocks_stride,
    split_rows,
    N0: tl.constexpr,
    N1: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    stacked = (tl.program_id(0) >= tiles0).to(tl.int32)
    width = tl.where(stacked == 1, N1, N0)
    n = (tl.program_id(0) - stacked * tiles0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ends, num_blocks = block_ends(
        num_tokens_post_padded_lora, lora_ids, MAX_LORAS, BLOCK_LORAS, BLOCK_M
    )
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
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
        entry += stacked * (MAX_LORAS * NUM_EXPERTS)
        rank = tl.load(lora_ranks + entry)
        if rank > 0:
            scaling = tl.load(scalings + entry)
            b = weights_at(b_ptrs, entry, arena)
            live = pairs < num_pairs
            y_mask = live[:, None] & (n < width)[None, :]
            y_rows = y + pairs.to(tl.int64)[:, None] * Y_STRIDE
            y_places = y_rows + (stacked * N0 + n)[None, :]
            base = tl.load(y_places, mask=y_mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
            source = pairs
            if outer_ranks is not None:
                shared = tl.load(outer_ranks + stacked * MAX_LORAS + slot) > 0
                source -= pairs % tl.where(shared, TOP_K, 1)
            s_rows = shrunk + source.to(tl.int64)[:, None] * SHRUNK_STRIDE + stacked * MAX_RANK
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first_rank in range(0, rank, BLOCK_R):
                r = first_rank + tl.arange(0, BLOCK_R)
                # Rows of B start on 16 bytes only at ranks that are multiples of VECTOR, which is
                # data: said in a way that the compiler can use where it holds.
                if rank % VECTOR == 0:
                    stride = rank // VECTOR * VECTOR
                    b_mask = (n < width)[:, None] & (r < stride)[None, :]
                    b_block = tl.load(b + n[:, None] * stride + r[None, :], mask=b_mask, other=0.0)
                else:
                    b_mask = (n < width)[:, None] & (r < rank)[None, :]
                    b_block = tl.load(b + n[:, None] * rank + r[None, :], mask=b_mask, other=0.0)
                b_block = tl.trans(b_block)  # [BLOCK_R, BLOCK_N]
                # Whole vectors of 4 are read, what lies beyond the rank in the last is dropped.
                read = (r < (rank + 3) // 4 * 4) & (r < MAX_RANK)
                s_mask = live[:, None] & read[None, :]
                s = tl.load(s_rows + r[None, :], mask=s_mask, other=0.0)  # [BLOCK_M, BLOCK_R]
                for split in tl.static_range(1, SPLITS):
                    skipped = (split * split_rows).to(tl.int64) * SHRUNK_STRIDE
                    s += tl.load(s_rows + skipped + r[None, :], mask=s_mask, other=0.0)
                s = tl.where((r < rank)[None, :], s, 0.0)
                if b_block.dtype == tl.bfloat16:
                    # Two bfloat16 parts keep 16 bits of the float32 sum at tensor core speed.
                    high = s.to(tl.bfloat16)
                    low = (s - high.to(tl.float32)).to(tl.bfloat16)
                    acc = tl.dot(low, b_block, acc)
                    acc = tl.dot(high, b_block, acc)
                else:
                    acc = tl.dot(s, b_block.to(tl.float32), acc, input_precision="ieee")
            tl.store(y_places, (base + scaling * acc).to(y.dtype.element_ty), mask=y_mask)


def moe_lora_expand_grouped_triton(
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ranks: torch.Tensor | None,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    lora_ids: torch.Tensor,
    block_size_m: int,
    top_k: int,
    max_rank: int,
    slice_sizes: list[int],
    y: torch.Tensor,
) -> None:
    """y[p, slice j] += scaling * (sum over splits of shrunk[:, p, j]) B^T.

    B and scaling are slice j's of pair p's slot and expert. Writes `y` in place, slice j being
    slice_sizes[j] columns; pairs in no list, and slices of rank 0, keep their bits. Everything in
    float32 and rounded once to y's dtype. Where B is bfloat16 the float32 sum enters the product
    as two bfloat16 parts, which together keep 16 bits of it; otherwise B is widened to float32.
    """
    check_groups(
        y,
        y.shape[0],
        arena,
        b_ptrs,
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
    check_table("scalings", scalings, torch.float32, b_ptrs.shape)
    (num_pairs, width), (stack, max_loras, num_experts) = y.shape, b_ptrs.shape
    assert len(slice_sizes) == stack, f"{len(slice_sizes)} slices, but the tables have {stack}"
    assert width == sum(slice_sizes), f"slices {slice_sizes} do not cover y's {width} columns"
    exact = arena.dtype != torch.bfloat16
    block_r = min(16 if exact else 64, max(16, triton.next_power_of_2(max_rank)))
    block_n = 64  # at 128 the registers leave room for one program a multiprocessor
    tiles = sum(triton.cdiv(size, block_n) for size in slice_sizes)
    blocks = block_programs(num_pairs, max_loras, num_experts, block_size_m, tiles)
    _expand_grouped_kernel[(tiles, blocks)](
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ranks,
        sorted_token_ids_lora,
        expert_ids_lora,
        num_tokens_post_padded_lora,
        lora_ids,
        y,
        num_pairs,
        sorted_token_ids_lora.stride(0),
        expert_ids_lora.stride(0),
        shrunk.stride(0) // shrunk.stride(1),
        N0=slice_sizes[0],
        N1=slice_sizes[1] if stack == 2 else 0,
        Y_STRIDE=y.stride(0),
        SPLITS=shrunk.shape[0],
        SHRUNK_STRIDE=shrunk.stride(1),
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        BLOCK_LORAS=triton.next_power_of_2(max_loras),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        VECTOR=16 // arena.element_size(),
        BLOCK_M=block_size_m,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=8 if block_size_m == 128 else 4,
        num_stages=1,
        **dependent_launch(y.device),
    )


def moe_lora_expand_grouped_torch(
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ranks: torch.Tensor | None,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    lora_ids: torch.Tensor,
    block_size_m: int,
    top_k: int,
    max_rank: int,
    slice_sizes: list[int],
    y: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_expand_grouped_triton`; products take all P pairs, as its shrink."""
    s = shrunk.sum(0)  # [P, stack * max_rank]
    first_of_row = torch.arange(y.shape[0], device=y.device) // top_k * top_k
    ranks, addresses = lora_ranks.tolist(), b_ptrs.tolist()
    delta = torch.full(y.shape, -0.0, dtype=torch.float32, device=y.device)  # -0.0 keeps y's bits
    parts = delta.split(slice_sizes, dim=1)
    lists = (sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora, lora_ids)
    for slot, expert, pairs in walk_groups(*lists, block_size_m, y.shape[0]):
        for stacked, width in enumerate(slice_sizes):
            rank = ranks[stacked][slot][expert]
            if rank:
                b = weight_view(arena, addresses[stacked][slot][expert], width, rank)  # [N, rank]
                own = s[:, stacked * max_rank : stacked * max_rank + rank]
                if outer_ranks is not None and outer_ranks[stacked, slot]:
                    own = own[first_of_row]
                product = scalings[stacked, slot, expert] * (own @ b.T)[pairs]
                parts[stacked].index_copy_(0, pairs, product)
    y.copy_(y.float() + delta)


moe_lora_expand_grouped = define_op(
    moe_lora_expand_grouped_triton, moe_lora_expand_grouped_torch, mutates=("y",)
)
