"""Expert LoRA of few rows, first half: x A^T of each pair, `moe_lora_pairs` says where things lie.

A program multiplies one row with a few rows of one A over one part of K. There is no tile of
rows, since pairs are not sorted: a matrix-vector product on the ordinary cores, whose time is
that of reading A.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import as_weights, weight_view
from kernels.moe_lora_pairs import PAIR_TABLES, check_pairs, check_rows, walk_pairs
from kernels.op import define_op

SPLIT_PAIRS = (16, 32, 64, 128)  # up to each of these, fewer splits of K
_LEAST_K = 128  # columns of A that a program reads at least


def moe_shrink_split_k(num_pairs: int, in_features: int) -> int:
    """How many parts `moe_lora_shrink` should split K into: many for few pairs.

    The workspace `shrunk` takes splits * P * stack * max_rank * 4 bytes; splits * P stays at or
    below max(P, 256), so one of max(P, 256) pairs serves every P up to its own.
    """
    splits = next((256 // limit for limit in SPLIT_PAIRS if num_pairs <= limit), 1)
    return max(1, min(splits, in_features // _LEAST_K))


@triton.jit(
    do_not_specialize=["split_rows", "blocks_per_split"],
    do_not_specialize_on_alignment=PAIR_TABLES,
)
def _moe_lora_shrink_kernel(
    x,
    arena,
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    topk_ids,
    shrunk,
    split_rows,
    blocks_per_split,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    pair = tl.program_id(0)
    stacked = tl.program_id(1) // RANK_PROGRAMS
    first_rank = tl.program_id(1) % RANK_PROGRAMS * BLOCK_R
    split = tl.program_id(2)
    slot = tl.load(row_adapter + pair // TOP_K)
    expert = tl.load(topk_ids + pair)
    known = (slot >= 0) & (slot < MAX_LORAS)
    chosen = known & (expert >= 0) & (expert < NUM_EXPERTS)
    # All that a program may need of the tables in one wait, not one wait each.
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    entry = (stacked * MAX_LORAS + slot) * NUM_EXPERTS + expert
    rank = tl.load(lora_ranks + entry, mask=chosen, other=0)
    address = tl.load(a_ptrs + entry, mask=chosen, other=0)
    if outer_ranks is not None:
        outer_entry = stacked * MAX_LORAS + slot
        outer_rank = tl.load(outer_ranks + outer_entry, mask=known, other=0)
        outer_address = tl.load(outer_ptrs + outer_entry, mask=known, other=0)
        # A shared A works once a row, at its first pair, whether or not the slot has that expert.
        once = tl.where(pair % PAIRS_PER_ROW == 0, outer_rank, 0)
        rank = tl.where(outer_rank > 0, once, rank)
        address = tl.where(outer_rank > 0, outer_address, address)
    if (enabled == 0) | (first_rank >= rank):
        return
    a = as_weights(address, arena)
    x_row = x + (pair // PAIRS_PER_ROW).to(tl.int64) * X_STRIDE
    place = (split * split_rows + pair).to(tl.int64) * SHRUNK_STRIDE + stacked * MAX_RANK
    first_k = split * blocks_per_split * BLOCK_K
    end_k = tl.minimum(first_k + blocks_per_split * BLOCK_K, K)
    for tile in range(first_rank, rank, RANK_PROGRAMS * BLOCK_R):
        ranks = tile + tl.arange(0, BLOCK_R)
        sums = tl.zeros([BLOCK_R], tl.float32)
        for start in range(first_k, end_k, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a_places = a + ranks[:, None] * K + k[None, :]
            a_mask = (ranks < rank)[:, None] & (k < K)[None, :]
            a_block = tl.load(a_places, mask=a_mask, other=0.0)  # [BLOCK_R, BLOCK_K]
            x_block = tl.load(x_row + k, mask=k < K, other=0.0)  # [BLOCK_K]
            sums += tl.sum(a_block.to(tl.float32) * x_block.to(tl.float32)[None, :], axis=1)
        tl.store(shrunk + place + ranks, sums, mask=ranks < rank)


def _check(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    check_pairs(
        arena,
        a_ptrs,
        lora_ranks,
        None,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        max_rank,
        shrunk,
    )
    top_k = topk_ids.shape[1]
    assert pairs_per_row in (1, top_k), f"pairs_per_row is {pairs_per_row}, not 1 or {top_k}"
    assert (outer_ptrs is None) == (outer_ranks is None), "outer_ptrs and outer_ranks go together"
    assert outer_ranks is None or pairs_per_row == top_k, "a shared A needs one row for all pairs"
    check_rows("x", x, (topk_ids.numel() // pairs_per_row, x.shape[1]))


def moe_lora_shrink_triton(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """Shrink: sum over splits of shrunk[:, p, j * max_rank + r] = x[p // pairs_per_row] . A_j[r].

    A_j is that of slice j, of pair p's expert and of its row's slot. x [P // pairs_per_row, K]:
    pairs_per_row is k where a row's pairs read the same x (gate and up), 1 where every pair has
    its own (down); the latter takes None for both outer tables. Writes `shrunk` in place, up to
    the true rank of each pair that has an expert, an enabled slot and a rank; split i covers the
    i-th of shrunk.shape[0] equal ranges of K. Where outer_ranks is not 0, only pair t * k of row
    t is written, with the shared A. Products and sums in float32, no atomics: a pair's sums
    depend on its x, its A and the shapes alone. Reads rank * K elements of A a pair and slice.
    Raises AssertionError on other shapes, dtypes or strides.
    """
    _check(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        pairs_per_row,
        max_rank,
        shrunk,
    )
    stack, max_loras, num_experts = a_ptrs.shape
    num_pairs, in_features, splits = topk_ids.numel(), x.shape[1], shrunk.shape[0]
    block_r = min(16, max(4, triton.next_power_of_2(max_rank)))
    part = triton.cdiv(in_features, splits)
    block_k = 512 if part % 512 == 0 else 256 if part > _LEAST_K else _LEAST_K
    # Few pairs: every tile of ranks has a program. Many: a program takes them all, since most of
    # those programs would find that the true rank ends before their tile.
    rank_programs = triton.cdiv(max_rank, block_r) if num_pairs <= 256 else 1
    _moe_lora_shrink_kernel[(num_pairs, stack * rank_programs, splits)](
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        shrunk,
        shrunk.stride(0) // shrunk.stride(1),
        triton.cdiv(triton.cdiv(in_features, block_k), splits),
        K=in_features,
        X_STRIDE=x.stride(0),
        SHRUNK_STRIDE=shrunk.stride(1),
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        NUM_EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        PAIRS_PER_ROW=pairs_per_row,
        RANK_PROGRAMS=rank_programs,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        **dependent_launch(x.device),
    )


def moe_lora_shrink_torch(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_shrink_triton`; the whole sum goes to the first split."""
    _check(
        x,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        pairs_per_row,
        max_rank,
        shrunk,
    )
    addresses, ranks = a_ptrs.tolist(), lora_ranks.tolist()
    shared = None if outer_ptrs is None else outer_ptrs.tolist()
    shared_ranks = None if outer_ranks is None else outer_ranks.tolist()
    for pair, slot, expert in walk_pairs(row_adapter, adapter_enabled, topk_ids):
        for j in range(len(ranks)):
            rank = ranks[j][slot][expert] if expert >= 0 else 0
            address = addresses[j][slot][expert]
            if shared and shared_ranks and shared_ranks[j][slot]:
                rank = shared_ranks[j][slot] if pair % pairs_per_row == 0 else 0
                address = shared[j][slot]
            if rank:
                a = weight_view(arena, address, rank, x.shape[1])  # [rank, K]
                target = shrunk[:, pair, j * max_rank : j * max_rank + rank]
                target[0] = a @ x[pair // pairs_per_row].float()
                target[1:] = 0


moe_lora_shrink = define_op(moe_lora_shrink_triton, moe_lora_shrink_torch, mutates=("shrunk",))
