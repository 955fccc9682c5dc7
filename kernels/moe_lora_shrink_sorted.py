"""Expert LoRA of some pairs an expert, first half: x A^T of pairs sorted by expert.

A program holds a block of pairs of one expert and multiplies those of each adapter among them
with that adapter's A, which it reads once for all of them, on the tensor cores. Pair by pair
(`moe_lora_shrink`) every pair reads its own, which with one adapter for all rows is the same A as
often as the expert has pairs. `moe_lora_pairs` says where things lie.
"""

import torch
import triton
import triton.language as tl

from kernels.arrivals import arrives_last, check_arrivals, sum_in_order
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import as_weights
from kernels.moe_gemm_config import BLOCK_SIZES_M
from kernels.moe_lora_pairs import PAIR_TABLES
from kernels.moe_lora_shrink import check_pair_shrink, shrink_pairs_torch
from kernels.op import define_op

_MOST_SPLITS, _LEAST_K = 4, 256  # parts of K, and elements of each


def sorted_shrink_split_k(in_features: int) -> int:
    """How many parts `moe_lora_shrink_sorted` should split K into."""
    return max(1, min(_MOST_SPLITS, in_features // _LEAST_K))


@triton.jit(
    do_not_specialize=["num_pairs", "split_rows", "blocks_per_split", "splits"],
    do_not_specialize_on_alignment=[*PAIR_TABLES, "sorted_token_ids", "expert_ids"],
)
def _moe_lora_shrink_sorted_kernel(
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
    shrunk,  # float32[splits, P, STACK * MAX_RANK]; the sums end in the first
    arrivals,  # int32, zero before and after: one for each block and slice
    num_pairs,
    split_rows,
    blocks_per_split,
    splits,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    block, stacked, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if block * BLOCK_M >= tl.load(num_tokens_post_padded):
        return
    place = tl.arange(0, BLOCK_M)
    expert = tl.load(expert_ids + block)
    pairs = tl.load(sorted_token_ids + block * BLOCK_M + place)
    live = pairs < num_pairs
    slot = tl.load(row_adapter + pairs // TOP_K, mask=live, other=-1)
    known = (slot >= 0) & (slot < MAX_LORAS)
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    entry = (stacked * MAX_LORAS + slot) * NUM_EXPERTS + expert
    rank = tl.load(lora_ranks + entry, mask=known, other=0)
    address = tl.load(a_ptrs + entry, mask=known, other=0)
    if outer_ranks is not None:
        outer_entry = stacked * MAX_LORAS + slot
        outer_rank = tl.load(outer_ranks + outer_entry, mask=known, other=0)
        outer_address = tl.load(outer_ptrs + outer_entry, mask=known, other=0)
        once = tl.where(pairs % PAIRS_PER_ROW == 0, outer_rank, 0)
        rank = tl.where(outer_rank > 0, once, rank)
        address = tl.where(outer_rank > 0, outer_address, address)
    rank = tl.where(enabled != 0, rank, 0)
    rows = tl.where(live, pairs // PAIRS_PER_ROW, 0).to(tl.int64)
    x_rows = x + rows[:, None] * X_STRIDE
    sums = shrunk + tl.where(live, pairs, 0).to(tl.int64) * SHRUNK_STRIDE + stacked * MAX_RANK
    split_stride = split_rows.to(tl.int64) * SHRUNK_STRIDE
    first_k = split * blocks_per_split * BLOCK_A
    end_k = tl.minimum(first_k + blocks_per_split * BLOCK_A, K)
    # One A after the other, each with all of its pairs.
    left = rank
    first = tl.min(tl.where(left > 0, place, BLOCK_M))
    while first < BLOCK_M:
        its_rank = tl.sum(tl.where(place == first, rank, 0))
        its_address = tl.sum(tl.where(place == first, address, 0))
        member = (address == its_address) & (left > 0)
        a = as_weights(its_address, arena)
        for first_rank in range(0, its_rank, BLOCK_R):
            ranks = first_rank + tl.arange(0, BLOCK_R)
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for start in range(first_k, end_k, BLOCK_A):
                k = start + tl.arange(0, BLOCK_A)
                x_mask, a_mask = member[:, None], (ranks < its_rank)[:, None]
                if K % BLOCK_A != 0:
                    x_mask, a_mask = x_mask & (k < K)[None, :], a_mask & (k < K)[None, :]
                a_block = tl.load(a + ranks[:, None] * K + k[None, :], mask=a_mask, other=0.0)
                x_block = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
                if x_block.dtype != a_block.dtype:
                    x_block, a_block = x_block.to(tl.float32), a_block.to(tl.float32)
                acc = tl.dot(x_block, tl.trans(a_block), acc, input_precision="ieee")
            mask = member[:, None] & (ranks < its_rank)[None, :]
            tl.store(sums[:, None] + ranks[None, :] + split * split_stride, acc, mask=mask)
        left = tl.where(member, 0, left)
        first = tl.min(tl.where(left > 0, place, BLOCK_M))
    if splits > 1:  # noqa: SIM102 - `and` would count the arrival either way
        if arrives_last(arrivals + block * STACK + stacked, splits):
            for first_rank in range(0, tl.max(rank), BLOCK_R):
                ranks = first_rank + tl.arange(0, BLOCK_R)
                mask = ranks[None, :] < rank[:, None]
                places = sums[:, None] + ranks[None, :]
                tl.store(places, sum_in_order(places, mask, splits, split_stride), mask=mask)


def sorted_shrink_arrivals(num_blocks: int, stack: int) -> int:
    """How many counters of arrivals a launch of more than one split needs."""
    return num_blocks * stack


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
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size_m: int,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    tables = (a_ptrs, lora_ranks, outer_ptrs, outer_ranks, row_adapter, adapter_enabled)
    check_pair_shrink(x, arena, *tables, topk_ids, pairs_per_row, max_rank, shrunk)
    needed = sorted_shrink_arrivals(expert_ids.numel(), a_ptrs.shape[0])
    check_arrivals(arrivals, needed if shrunk.shape[0] > 1 else 0)
    for name, tensor in (
        ("sorted_token_ids", sorted_token_ids),
        ("expert_ids", expert_ids),
        ("num_tokens_post_padded", num_tokens_post_padded),
    ):
        assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    assert block_size_m in BLOCK_SIZES_M, f"block_size_m {block_size_m}, not one of {BLOCK_SIZES_M}"
    blocks = sorted_token_ids.numel() // block_size_m
    assert expert_ids.numel() >= blocks, f"{expert_ids.numel()} expert_ids, {blocks} blocks"


def moe_lora_shrink_sorted_triton(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size_m: int,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Shrink as `moe_lora_shrink` does, from pairs sorted by `moe_align_block_size`.

    sorted_token_ids, expert_ids, num_tokens_post_padded: as `moe_gemm` takes them, of `topk_ids`.
    Writes shrunk [splits, P, stack * max_rank] in place as `moe_lora_shrink` does, where a pair
    without expert gets nothing: a row whose first pair has none must have none at all, for with
    a shared A that pair holds the row's sums. `arrivals` int32, one for each block and slice where
    there is more than one split, is zero before and after. Products in x's dtype where A has the
    same, else in float32; sums in float32, in an order that neither other pairs nor the pair's
    place change. Reads rank * K elements of A for each adapter in a block and slice. Raises
    AssertionError on other shapes, dtypes or strides.
    """
    tables = (a_ptrs, lora_ranks, outer_ptrs, outer_ranks, row_adapter, adapter_enabled)
    sort = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    _check(
        x,
        arena,
        *tables,
        topk_ids,
        *sort,
        block_size_m,
        pairs_per_row,
        max_rank,
        shrunk,
        arrivals,
    )
    (stack, max_loras, num_experts), in_features = a_ptrs.shape, x.shape[1]
    splits, num_pairs, _ = shrunk.shape
    block_a = 32 if x.dtype == torch.float32 or x.dtype != arena.dtype else 128
    grid = (sorted_token_ids.numel() // block_size_m, stack, splits)
    _moe_lora_shrink_sorted_kernel[grid](
        x,
        arena,
        *tables,
        *sort,
        shrunk,
        arrivals,
        num_pairs,
        shrunk.stride(0) // shrunk.stride(1),
        triton.cdiv(triton.cdiv(in_features, block_a), splits),
        splits,
        K=in_features,
        X_STRIDE=x.stride(0),
        SHRUNK_STRIDE=shrunk.stride(1),
        STACK=stack,
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        NUM_EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        PAIRS_PER_ROW=pairs_per_row,
        BLOCK_M=block_size_m,
        BLOCK_R=min(64, max(16, triton.next_power_of_2(max_rank))),
        BLOCK_A=block_a,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x.device),
    )


def moe_lora_shrink_sorted_torch(
    x: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size_m: int,
    pairs_per_row: int,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_shrink_sorted_triton`; the whole sum goes to the first split."""
    tables = (a_ptrs, lora_ranks, outer_ptrs, outer_ranks, row_adapter, adapter_enabled)
    sort = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    _check(
        x,
        arena,
        *tables,
        topk_ids,
        *sort,
        block_size_m,
        pairs_per_row,
        max_rank,
        shrunk,
        arrivals,
    )
    shrink_pairs_torch(x, arena, *tables, topk_ids, pairs_per_row, max_rank, shrunk)


moe_lora_shrink_sorted = define_op(
    moe_lora_shrink_sorted_triton,
    moe_lora_shrink_sorted_torch,
    mutates=("shrunk", "arrivals"),
)
