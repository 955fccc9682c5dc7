"""A tile of x A^T: some pairs of one adapter slot, some of a slice's ranks, one split of K.

Shared by the launches that shrink; knows segments and tables of addresses, not what else its
launch computes. Splits write partial sums, and the last of a tile to arrive adds them up in their
order, whichever it is: what reads x A^T next reads one sum, not one for each split.
"""

import torch
import triton
import triton.language as tl

from kernels.arrivals import arrives_last, check_arrivals, sum_in_order
from kernels.dependent_launch import wait_for_inputs
from kernels.lora_segments import as_weights, block_m_for, find_pairs, tile_count


@triton.jit
def shrink_tile(
    x,  # [T, K]
    arena,
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    pair_row,
    num_segments,
    shrunk,  # float32[splits, T, stack * MAX_RANK]; the sums end in the first
    arrivals,  # int32, zero before and after: one for each place and tile
    max_segments,
    shrunk_rows,
    blocks_per_split,
    splits,
    place,
    places,
    split,
    tile,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    """`place` counts the `places` tiles of BLOCK_R ranks through the slices, `tile` those of
    BLOCK_P pairs through the segments; splits take `blocks_per_split` blocks of BLOCK_A elements
    of K. Waits for `x` when it has read where things lie."""
    rank_tiles: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    stacked = place // rank_tiles
    first_rank = place % rank_tiles * BLOCK_R
    slot, first, end = find_pairs(
        seg_indptr,
        weight_indices,
        num_segments,
        max_segments,
        tile,
        BLOCK_P,
        BLOCK_SEGMENTS,
        ONE_TILE,
    )
    there = first < end
    entry = tl.where(there, stacked * MAX_LORAS + slot, 0)
    pairs = first + tl.arange(0, BLOCK_P)
    # All of the tables in one wait, not one wait each; that one passes while the kernel before
    # ends.
    rank = tl.load(lora_ranks + entry, mask=there, other=0)
    address = tl.load(a_ptrs + entry, mask=there, other=0)
    rows = tl.load(pair_row + pairs, mask=pairs < end, other=0).to(tl.int64)
    wait_for_inputs(PDL)
    # No early return: a function that has one is not inlined.
    if first_rank < rank:
        a = as_weights(address, arena)
        ranks = first_rank + tl.arange(0, BLOCK_R)
        x_rows = x + rows[:, None] * X_STRIDE
        a_rows = a + ranks[:, None] * K
        first_k = split * blocks_per_split * BLOCK_A
        last_k = tl.minimum(first_k + blocks_per_split * BLOCK_A, K)
        acc = tl.zeros([BLOCK_P, BLOCK_R], tl.float32)
        for start in range(first_k, last_k, BLOCK_A):
            k = start + tl.arange(0, BLOCK_A)
            x_mask, a_mask = (pairs < end)[:, None], (ranks < rank)[:, None]
            if K % BLOCK_A != 0:
                x_mask, a_mask = x_mask & (k < K)[None, :], a_mask & (k < K)[None, :]
            a_block = tl.load(a_rows + k[None, :], mask=a_mask, other=0.0)  # [BLOCK_R, BLOCK_A]
            x_block = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)  # [BLOCK_P, BLOCK_A]
            if x_block.dtype != a_block.dtype:
                x_block, a_block = x_block.to(tl.float32), a_block.to(tl.float32)
            acc = tl.dot(x_block, tl.trans(a_block), acc, input_precision="ieee")
        sums = shrunk + rows[:, None] * SHRUNK_STRIDE + (stacked * MAX_RANK + ranks)[None, :]
        split_stride = shrunk_rows.to(tl.int64) * SHRUNK_STRIDE
        mask = (pairs < end)[:, None] & (ranks < rank)[None, :]
        tl.store(sums + split * split_stride, acc, mask=mask)
        if splits > 1:  # noqa: SIM102 - `and` would count the arrival either way
            if arrives_last(arrivals + tile * places + place, splits):
                tl.store(sums, sum_in_order(sums, mask, splits, split_stride), mask=mask)


def rank_block(max_rank: int) -> int:
    """Ranks of a slice in a tile."""
    return min(64, max(16, triton.next_power_of_2(max_rank)))


def shrink_programs(
    num_tokens: int, stack: int, max_loras: int, max_rank: int, shrunk_splits: int
) -> int:
    """Tiles of one launch, whatever the step's segments are."""
    places = stack * triton.cdiv(max_rank, rank_block(max_rank))
    return places * shrunk_splits * tile_count(num_tokens, max_loras)


def shrink_arrivals(num_tokens: int, stack: int, max_loras: int, max_rank: int) -> int:
    """How many counters of arrivals a launch of more than one split needs."""
    return shrink_programs(num_tokens, stack, max_loras, max_rank, 1)


def check_splits(
    shrunk: torch.Tensor, arrivals: torch.Tensor, stack: int, max_loras: int, max_rank: int
) -> None:
    assert shrunk.dim() == 3, f"shrunk has {shrunk.dim()} dims, not 3: splits, rows, ranks"
    splits, num_tokens, _ = shrunk.shape
    needed = shrink_arrivals(num_tokens, stack, max_loras, max_rank) if splits > 1 else 0
    check_arrivals(arrivals, needed)


def shrink_arguments(
    x: torch.Tensor,
    arena: torch.Tensor,
    max_loras: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> dict[str, int]:
    """`shrink_tile`'s numbers and constexprs, but those that `x` gives any kernel (K, X_STRIDE)."""
    num_tokens, in_features = x.shape
    wide = x.dtype == torch.float32 or x.dtype != arena.dtype
    block_p = block_m_for(num_tokens)
    block_a = 32 if wide else 128 if block_p == 16 else 64
    return {
        "max_segments": min(num_tokens, max_loras),
        "shrunk_rows": shrunk.stride(0) // shrunk.stride(1),
        "blocks_per_split": triton.cdiv(triton.cdiv(in_features, block_a), shrunk.shape[0]),
        "splits": shrunk.shape[0],
        "SHRUNK_STRIDE": shrunk.stride(1),
        "MAX_RANK": max_rank,
        "MAX_LORAS": max_loras,
        "BLOCK_SEGMENTS": triton.next_power_of_2(max_loras),
        "ONE_TILE": num_tokens <= block_p,
        "BLOCK_P": block_p,
        "BLOCK_R": rank_block(max_rank),
        "BLOCK_A": block_a,
    }
