"""What a row's adapters add to its weighted sum of experts, in the registers of one program.

Three ways to the same sum, for few rows, for many, and for one B that all experts share. Knows
pairs, ranks and where B and the shrunk rows lie (`kernels.moe_lora_pairs`), not the base's part.
"""

import triton
import triton.language as tl

from kernels.lora_segments import as_weights
from kernels.moe_lora_pairs import load_b, sum_splits


@triton.jit
def _weighted(
    shrunk, pairs, ranks, factors, r, split_stride, SPLITS: tl.constexpr, STRIDE: tl.constexpr
):
    """[pairs, r] float32: each pair's sum over splits at r, times its factor; 0 beyond its rank."""
    places = pairs.to(tl.int64)[:, None] * STRIDE + r[None, :]
    mask = r[None, :] < ranks[:, None]
    return sum_splits(shrunk, places, mask, split_stride, SPLITS) * factors[:, None]


@triton.jit
def delta_of_pairs(
    shrunk,
    pairs,
    ranks,
    factors,
    split_stride,
    b,
    widest,
    n,
    inside,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[BLOCK_N] float32: sum over pairs p and rank indices r of B_p[n, r] * weighted[p, r]."""
    total = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    for first_rank in range(0, widest, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        s = _weighted(shrunk, pairs, ranks, factors, r, split_stride, SPLITS, STRIDE)
        # As in `load_b`, for all pairs together: one odd rank among them and none is vectorised.
        # Columns come first in the tile: a warp then reads long runs of one B.
        if tl.max(ranks % VECTOR) == 0:
            strides = (ranks // VECTOR * VECTOR)[None, :, None]
            places = n[:, None, None] * strides + r[None, None, :]
            mask = inside[:, None, None] & (r[None, None, :] < strides)
            block = tl.load(b[None, :, None] + places, mask=mask, other=0.0)
        else:
            strides = ranks[None, :, None]
            places = n[:, None, None] * strides + r[None, None, :]
            mask = inside[:, None, None] & (r[None, None, :] < strides)
            block = tl.load(b[None, :, None] + places, mask=mask, other=0.0)
        total += tl.sum(block.to(tl.float32) * s[None, :, :], axis=2)  # [BLOCK_N, BLOCK_P]
    return tl.sum(total, axis=1)


@triton.jit
def delta_of_shared(
    shrunk,
    pairs,
    ranks,
    factors,
    split_stride,
    b,
    rank,
    n,
    inside,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[BLOCK_N] float32: the same with one B of that rank: first over pairs, then B once."""
    total = tl.zeros([BLOCK_N], tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        s = _weighted(shrunk, pairs, ranks, factors, r, split_stride, SPLITS, STRIDE)
        b_block = load_b(b, n, r, rank, inside, VECTOR).to(tl.float32)
        total += tl.sum(b_block * tl.sum(s, axis=0)[None, :], axis=1)
    return total


@triton.jit
def delta_by_pair(
    shrunk,
    first_pair,
    j,
    ranks,
    factors,
    addresses,
    split_stride,
    arena,
    n,
    inside,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[BLOCK_N] float32: the sum of `delta_of_pairs` one pair after the other, in the order of j.

    Takes the time of as many waits as there are pairs, and a fraction of the registers: for so
    many rows that other programs fill the waits.
    """
    total = tl.zeros([BLOCK_N], tl.float32)
    for i in range(TOP_K):
        chosen = j == i
        rank = tl.sum(tl.where(chosen, ranks, 0))
        factor = tl.sum(tl.where(chosen, factors, 0.0))
        b = as_weights(tl.sum(tl.where(chosen, addresses, 0)), arena)
        place = (first_pair + i) * STRIDE
        for first_rank in range(0, rank, BLOCK_R):
            r = first_rank + tl.arange(0, BLOCK_R)
            s = sum_splits(shrunk, place + r, r < rank, split_stride, SPLITS) * factor
            block = load_b(b, n, r, rank, inside, VECTOR).to(tl.float32)
            total += tl.sum(block * s[None, :], axis=1)
    return total
