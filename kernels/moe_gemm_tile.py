"""A tile of the grouped GEMM, of sorted pairs or of one; `moe_gemm` says what the two ways are.

Shared by the launches that multiply pairs by their experts; knows not what else they compute.
"""

import torch
import triton
import triton.language as tl

from kernels.moe_gemm_config import MoeGemmConfig


@triton.jit
def sorted_tile(
    x,  # [Tx, K]
    weight,  # [E, N, K]
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    out,  # [P, N]
    num_pairs,
    num_blocks,
    tile,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of the `tile`s of BLOCK_M sorted pairs and BLOCK_N columns one, into `out`."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if GROUP_BLOCKS == 1:  # blocks without pairs come last and have nothing to do
        block, tile_n = tile // tiles_n, tile % tiles_n
    else:
        first_block = tile // (GROUP_BLOCKS * tiles_n) * GROUP_BLOCKS
        group = tl.minimum(num_blocks - first_block, GROUP_BLOCKS)
        place = tile % (GROUP_BLOCKS * tiles_n)
        block, tile_n = first_block + place % group, place // group
    # No early return: a function that has one is not inlined.
    if block * BLOCK_M < tl.load(num_tokens_post_padded):
        expert = tl.load(expert_ids + block)
        pairs = tl.load(sorted_token_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
        live = pairs < num_pairs
        rows = tl.where(live, pairs // PAIRS_PER_ROW, 0).to(tl.int64)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offsets = tl.arange(0, BLOCK_K)
        x_places = x + rows[:, None] * X_STRIDE + offsets[None, :]
        matrix = weight + expert.to(tl.int64) * EXPERT_STRIDE
        w_places = matrix + n[:, None] * WEIGHT_STRIDE + offsets[None, :]
        if SWAPPED:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            # Rows of padding are not read: at decode most of a block is padding.
            x_mask = tl.broadcast_to(live[:, None], [BLOCK_M, BLOCK_K])
            w_mask = tl.full([BLOCK_N, BLOCK_K], True, tl.int1)
            if N % BLOCK_N != 0:
                w_mask = w_mask & (n < N)[:, None]
            if K % BLOCK_K != 0:
                inside = (start + offsets < K)[None, :]
                x_mask, w_mask = x_mask & inside, w_mask & inside
            if N % BLOCK_N != 0 or K % BLOCK_K != 0:
                w_block = tl.load(
                    w_places + start, mask=w_mask, other=0.0, eviction_policy="evict_first"
                )  # [BLOCK_N, BLOCK_K]
            else:
                w_block = tl.load(w_places + start, eviction_policy="evict_first")
            x_block = tl.load(
                x_places + start, mask=x_mask, other=0.0, eviction_policy="evict_last"
            )  # [BLOCK_M, BLOCK_K]
            if SWAPPED:
                acc = tl.dot(w_block, tl.trans(x_block), acc, input_precision="ieee")
            else:
                acc = tl.dot(x_block, tl.trans(w_block), acc, input_precision="ieee")
        result = acc.to(out.dtype.element_ty)
        if SWAPPED:
            result = tl.trans(result)
        places = out + pairs.to(tl.int64)[:, None] * OUT_STRIDE + n[None, :]
        tl.store(places, result, mask=live[:, None] & (n < N)[None, :])


@triton.jit
def unsorted_tile(
    x,  # [Tx, K]
    weight,  # [E, N, K]
    topk_ids,  # int32[T, k]
    out,  # [P, N]
    tile,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Of the `tile`s of one pair and BLOCK_N columns one, into `out`."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pair = (tile // tiles_n).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    if expert >= 0:
        n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offsets = tl.arange(0, BLOCK_K)
        x_places = x + pair // PAIRS_PER_ROW * X_STRIDE + offsets
        w_places = weight + expert * EXPERT_STRIDE + n[:, None] * WEIGHT_STRIDE + offsets[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inside = offsets < K - start
            w_mask = (n < N)[:, None] & inside[None, :]
            w_block = tl.load(
                w_places + start, mask=w_mask, other=0.0, eviction_policy="evict_first"
            )
            x_block = tl.load(
                x_places + start, mask=inside, other=0.0, eviction_policy="evict_last"
            )
            acc += w_block.to(tl.float32) * x_block.to(tl.float32)[None, :]
        result = tl.sum(acc, axis=1).to(out.dtype.element_ty)  # [BLOCK_N]
        tl.store(out + pair * OUT_STRIDE + n, result, mask=n < N)


def unsorted_arguments(
    config: MoeGemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs_per_row: int,
    out: torch.Tensor,
) -> dict[str, int]:
    """`unsorted_tile`'s constexprs, and the launch's options."""
    return _shapes(config, x, weight, pairs_per_row, out) | {
        "BLOCK_K": min(config.block_k, triton.next_power_of_2(weight.shape[2])),
        "NUM_STAGES": config.num_stages,
    }


def sorted_arguments(
    config: MoeGemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
) -> dict[str, int]:
    """`sorted_tile`'s constexprs, and the launch's options."""
    return _shapes(config, x, weight, pairs_per_row, out) | {
        "SWAPPED": config.swapped,
        "GROUP_BLOCKS": config.group_blocks,
        "BLOCK_M": block_size_m,
        "BLOCK_K": config.block_k,
        "num_stages": config.num_stages,
    }


def _shapes(
    config: MoeGemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs_per_row: int,
    out: torch.Tensor,
) -> dict[str, int]:
    return {
        "N": weight.shape[1],
        "K": weight.shape[2],
        "X_STRIDE": x.stride(0),
        "EXPERT_STRIDE": weight.stride(0),
        "WEIGHT_STRIDE": weight.stride(1),
        "OUT_STRIDE": out.stride(0),
        "PAIRS_PER_ROW": pairs_per_row,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
    }
