"""A tile of router logits: the product with the router's weight, and each row's own delta to it.

Knows tiles of rows and of experts, and adapters' factors, not what becomes of the logits. Where K
is taken in parts, a part is COLUMNS from `first` on, and the last one may go beyond K.
"""

import triton
import triton.language as tl

from kernels.lora_expand import whole_ranks

_ODD_RANKS = tl.constexpr(4)  # at a time, of a B whose rows start anywhere: its elements come alone


@triton.constexpr_function
def _goes_beyond(K, COLUMNS, BLOCK_K):
    """Whether some block of some part ends behind K."""
    assert COLUMNS == K or COLUMNS % BLOCK_K == 0, "a block would reach into the next part"
    return K % COLUMNS != 0 or COLUMNS % BLOCK_K != 0


@triton.jit
def load_columns(
    rows, row_mask, first, COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """[N, BLOCK_K]: columns from `first` on, in a part of COLUMNS, of the rows that start at `rows`
    [N]; zeros from K on."""
    k = first + tl.arange(0, BLOCK_K)
    mask = row_mask[:, None]
    if _goes_beyond(K, COLUMNS, BLOCK_K):
        mask = mask & (k < K)[None, :]
    return tl.load(rows[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def add_block(left, right, acc):
    """acc [M, N] + left [M, K] right^T [N, K], with all that float32 holds where dtypes differ."""
    if left.dtype != right.dtype:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, tl.trans(right), acc, input_precision="ieee")


@triton.jit
def add_product(
    left_rows,
    left_mask,
    right_rows,
    right_mask,
    acc,
    first,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SKIP: tl.constexpr = 0,
):
    """acc + left right^T over a part of K but its first SKIP columns; both are starts of rows."""
    for start in range(SKIP, COLUMNS, BLOCK_K):
        right = load_columns(right_rows, right_mask, first + start, COLUMNS, K, BLOCK_K)
        left = load_columns(left_rows, left_mask, first + start, COLUMNS, K, BLOCK_K)
        acc = add_block(left, right, acc)
    return acc


@triton.jit
def find_adapters(
    row_adapter,
    adapter_enabled,
    lora_ranks,
    rows,
    live,
    MAX_LORAS: tl.constexpr,
):
    """Each row's adapter slot and its rank, -1 and 0 where it has no delta."""
    slot = tl.load(row_adapter + rows, mask=live, other=-1)
    known = (slot >= 0) & (slot < MAX_LORAS)
    known &= tl.load(adapter_enabled + slot, mask=known, other=0) != 0
    rank = tl.load(lora_ranks + slot, mask=known, other=0)
    return tl.where(rank > 0, slot, -1), rank


@triton.jit
def shrink_rows(
    x_rows,  # [M], where rows of x start
    a,  # [M], where each row's own A starts
    rank,  # [M]
    r,  # [R]
    first,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x A^T over a part of K, float32 [M, R], each row by its own A; by multiply-adds, for rows
    share no product."""
    inside = r[None, :] < rank[:, None]
    a_rows = a[:, None] + r[None, :] * K
    shrunk = tl.zeros(a_rows.shape, tl.float32)
    for start in range(0, COLUMNS, BLOCK_K):
        k = first + start + tl.arange(0, BLOCK_K)
        x_block = load_columns(x_rows, rank > 0, first + start, COLUMNS, K, BLOCK_K)
        mask = inside[:, :, None]
        if _goes_beyond(K, COLUMNS, BLOCK_K):
            mask = mask & (k < K)[None, None, :]
        a_block = tl.load(a_rows[:, :, None] + k[None, None, :], mask=mask, other=0.0)
        shrunk += tl.sum(x_block.to(tl.float32)[:, None, :] * a_block.to(tl.float32), axis=2)
    return shrunk


@triton.jit
def expand_rows(
    shrunk,  # [M, R] float32: x A^T at ranks r, zeros beyond a row's own
    b,  # [M], where each row's own B starts
    rank,  # [M]
    r,  # [R]
    experts,
    exists,
    VECTOR: tl.constexpr,
):
    """(x A^T) B^T float32 [M, E] of those ranks."""
    whole = whole_ranks(rank, VECTOR)
    odd = tl.where(whole > 0, 0, rank)
    block = _expert_block(b, whole, r, experts, exists)
    delta = tl.sum(block.to(tl.float32) * shrunk[:, None, :], axis=2)
    first, last = tl.min(r, axis=0), tl.minimum(tl.max(odd, axis=0), tl.max(r, axis=0) + 1)
    for start in range(first, last, _ODD_RANKS):
        for offset in tl.static_range(_ODD_RANKS):
            one = start + offset
            sums = tl.sum(tl.where(r[None, :] == one, shrunk, 0.0), axis=1)  # [M]
            mask = exists[None, :] & (one < odd)[:, None]
            weights = tl.load(b[:, None] + experts[None, :] * odd[:, None] + one, mask, other=0.0)
            delta += weights.to(tl.float32) * sums[:, None]
    return delta


@triton.jit
def _expert_block(b, rank, r, experts, exists):
    """B [M, E, R] at ranks r, zeros from `rank` [M] on."""
    mask = exists[None, :, None] & (r[None, None, :] < rank[:, None, None])
    rows = b[:, None, None] + experts[None, :, None] * rank[:, None, None]
    return tl.load(rows + r[None, None, :], mask=mask, other=0.0)
