"""What a row's adapters add to its weighted sum of experts, in the registers of one program.

Three ways to the same sum, for few rows, for many, and for one B that all experts share. For few
rows a program asks for the first ranks of B before the products are complete: `first_of_pairs`
comes before `wait_for_inputs`, `sums_of_pairs` and `delta_of_pairs` after it. Knows pairs, ranks
and where B and the shrunk rows lie (`kernels.moe_lora_pairs`), not the base's part.
"""

import triton
import triton.language as tl

from kernels.lora_expand import first_ranks, row_delta, row_product, row_sums, whole_ranks
from kernels.lora_segments import as_weights


@triton.jit
def _block_of_pairs(addresses, arena, whole, n, r, inside):
    """B of every pair, its dtype [n, pairs, r], where `whole` is its rank; zeros beyond it.

    Columns come first in the tile: a warp then reads long runs of one B.
    """
    strides = whole[None, :, None]
    places = n[:, None, None] * strides + r[None, None, :]
    mask = inside[:, None, None] & (r[None, None, :] < strides)
    return tl.load(as_weights(addresses, arena)[None, :, None] + places, mask=mask, other=0.0)


@triton.jit
def _weighted(shrunk, pairs, ranks, factors, r, STRIDE: tl.constexpr):
    """[pairs, r] float32: each pair's x A^T at r, times its factor; 0 beyond its rank."""
    places = pairs.to(tl.int64)[:, None] * STRIDE + r[None, :]
    mask = r[None, :] < ranks[:, None]
    return tl.load(shrunk + places, mask=mask, other=0.0) * factors[:, None]


@triton.jit
def first_of_pairs(addresses, arena, ranks, n, inside, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr):
    """B[n, :BLOCK_R] of every pair in its dtype [n, pairs, BLOCK_R]; zeros where rows of B do not
    start on 16 bytes: `delta_of_pairs` reads such a B from its first rank."""
    r = tl.arange(0, BLOCK_R)
    return _block_of_pairs(addresses, arena, whole_ranks(ranks, VECTOR), n, r, inside)


@triton.jit
def sums_of_pairs(
    shrunk,
    pairs,
    ranks,
    factors,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Every pair's x A^T times its factor [pairs, BLOCK_R], for `first_of_pairs`."""
    whole = whole_ranks(ranks, VECTOR)
    return _weighted(shrunk, pairs, whole, factors, tl.arange(0, BLOCK_R), STRIDE)


@triton.jit
def delta_of_pairs(
    first,  # [N, pairs, BLOCK_R] from `first_of_pairs`
    sums,  # [pairs, BLOCK_R] from `sums_of_pairs`
    shrunk,
    pairs,
    ranks,
    factors,
    addresses,
    arena,
    n,
    inside,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[N] float32: sum over pairs p and rank indices r of B_p[n, r] * weighted[p, r]."""
    whole = whole_ranks(ranks, VECTOR)
    total = tl.sum(first.to(tl.float32) * sums[None, :, :], axis=2)  # [N, pairs]
    for first_rank in range(BLOCK_R, tl.max(whole), BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        block = _block_of_pairs(addresses, arena, whole, n, r, inside)
        s = _weighted(shrunk, pairs, whole, factors, r, STRIDE)
        total += tl.sum(block.to(tl.float32) * s[None, :, :], axis=2)
    odd = ranks - whole
    for odd_rank in range(tl.max(odd)):  # one by one, from the same lines
        there = odd > odd_rank
        places = n[:, None] * odd[None, :] + odd_rank
        mask = inside[:, None] & there[None, :]
        b = tl.load(as_weights(addresses, arena)[None, :] + places, mask=mask, other=0.0)
        s = tl.load(shrunk + pairs.to(tl.int64) * STRIDE + odd_rank, mask=there, other=0.0)
        total += b.to(tl.float32) * (s * factors)[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def delta_of_shared(
    shrunk,
    pairs,
    ranks,
    factors,
    address,
    arena,
    rank,
    n,
    inside,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[BLOCK_N] float32: the same with one B of that rank: first over pairs, then B once."""
    b = as_weights(address, arena)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        s = _weighted(shrunk, pairs, ranks, factors, r, STRIDE)
        # Rows of B start on 16 bytes only at ranks that are multiples of VECTOR, which is data:
        # said in a way that the compiler can use where it holds.
        if rank % VECTOR == 0:
            stride = rank // VECTOR * VECTOR
            mask = inside[:, None] & (r < stride)[None, :]
            block = tl.load(b + n[:, None] * stride + r[None, :], mask=mask, other=0.0)
        else:
            mask = inside[:, None] & (r < rank)[None, :]
            block = tl.load(b + n[:, None] * rank + r[None, :], mask=mask, other=0.0)
        total += tl.sum(block.to(tl.float32) * tl.sum(s, axis=0)[None, :], axis=1)
    return total


@triton.jit
def delta_by_pair(
    shrunk,
    first_pair,
    j,
    ranks,
    factors,
    addresses,
    arena,
    n,
    inside,
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
        address = tl.sum(tl.where(chosen, addresses, 0))
        source = shrunk + (first_pair + i) * STRIDE
        if rank > 0:
            first = first_ranks(address, arena, rank, n, inside, VECTOR, BLOCK_R)
            sums = row_sums(source, rank, VECTOR, BLOCK_R)
            total += row_delta(
                row_product(first, sums),
                address,
                arena,
                rank,
                factor,
                source,
                n,
                inside,
                VECTOR,
                BLOCK_R,
                False,
            )
    return total
