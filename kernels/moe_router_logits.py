"""A tile of router logits: the product with the router's weight, and an adapter's delta to it.

Knows tiles of rows and of experts, and one adapter's factors, not what becomes of the logits.
"""

import triton
import triton.language as tl


@triton.jit
def add_product(
    x_rows,
    row_mask,
    weights,
    weight_mask,
    acc,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + x W^T over all of K; x_rows and weights point at the starts of rows."""
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask, w_mask = row_mask[:, None], weight_mask[:, None]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (k < K)[None, :], w_mask & (k < K)[None, :]
        w_block = tl.load(weights[:, None] + k[None, :], mask=w_mask, other=0.0)
        x_block = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0)
        if x_block.dtype != w_block.dtype:
            x_block, w_block = x_block.to(tl.float32), w_block.to(tl.float32)
        acc = tl.dot(x_block, tl.trans(w_block), acc, input_precision="ieee")
    return acc


@triton.jit
def load_weights(w_rows, weight_mask, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from `start` on of the experts whose rows start at w_rows: [BLOCK_E, BLOCK_K]."""
    k = start + tl.arange(0, BLOCK_K)
    mask = weight_mask[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (k < K)[None, :]
    return tl.load(w_rows[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def multiply_rows(x_rows, row_mask, w_block, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """x W^T over the columns of w_block, float32 [ROWS, BLOCK_E], by multiply-adds."""
    k = start + tl.arange(0, BLOCK_K)
    mask = row_mask[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (k < K)[None, :]
    x_block = tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0)
    products = x_block.to(tl.float32)[:, None, :] * w_block.to(tl.float32)[None, :, :]
    return tl.sum(products, axis=2)


@triton.jit
def router_delta(
    x_rows,
    row_mask,
    arena,
    a,
    b,
    rank,
    experts,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """(x A^T) B^T of one adapter for the tile's rows and experts, float32 [BLOCK_M, BLOCK_E]."""
    expert_mask = (experts < NUM_EXPERTS)[:, None]
    delta = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        shrunk = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        shrunk = add_product(x_rows, row_mask, a + r * K, r < rank, shrunk, K, BLOCK_K)
        # Rows of B start on 16 bytes only at ranks that are multiples of VECTOR, which is data:
        # said in a way that the compiler can use where it holds.
        if rank % VECTOR == 0:
            stride = rank // VECTOR * VECTOR
            b_mask = expert_mask & (r < stride)[None, :]
            b_block = tl.load(b + experts[:, None] * stride + r[None, :], mask=b_mask, other=0.0)
        else:
            b_mask = expert_mask & (r < rank)[None, :]
            b_block = tl.load(b + experts[:, None] * rank + r[None, :], mask=b_mask, other=0.0)
        b_block = tl.trans(b_block)  # [BLOCK_R, BLOCK_E]
        if b_block.dtype == tl.bfloat16:
            # Two bfloat16 parts keep 16 bits of the float32 sum at tensor core speed.
            high = shrunk.to(tl.bfloat16)
            low = (shrunk - high.to(tl.float32)).to(tl.bfloat16)
            delta = tl.dot(low, b_block, delta)
            delta = tl.dot(high, b_block, delta)
        else:
            delta = tl.dot(shrunk, b_block.to(tl.float32), delta, input_precision="ieee")
    return delta
