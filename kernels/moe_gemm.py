"""Grouped GEMM: every (row, expert) pair's product with its expert's weights.

`out[p] = x[p // pairs_per_row] @ weight[expert of p]^T`, summed in float32 and rounded once. Two
ways to read the same weights:

- sorted: pairs in blocks of one expert (`moe_align_block_size`), so that each active expert's
  weights are read once per block. A tensor core tile per (block, BLOCK_N columns).
- unsorted: one pair a program, for so few pairs that sorting costs more than it saves; plain
  multiply-adds, since a tile of one row would leave a tensor core idle.

At decode both are bound by reading weights: what counts is how many bytes are in flight, which
`MoeGemmConfig` sets by shape. A pair's bits depend on its row, its expert, the shapes and which of
the ways it takes, never on the other pairs or its place among them.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.moe_gemm_config import (
    BLOCK_SIZES_M,
    MoeGemmConfig,
    fitted,
    moe_block_size_m,
    moe_gemm_config,
)
from kernels.op import FLOATS, define_op

__all__ = ["launch_moe_gemm", "moe_block_size_m", "moe_gemm", "moe_gemm_torch", "moe_gemm_triton"]


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _moe_gemm_sorted_kernel(
    x,  # [Tx, K]
    weight,  # [E, N, K]
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    out,  # [P, N]
    num_pairs,
    num_blocks,
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
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if GROUP_BLOCKS == 1:  # blocks without pairs come last and return at once
        block, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    else:
        first_block = tl.program_id(0) // (GROUP_BLOCKS * tiles_n) * GROUP_BLOCKS
        group = tl.minimum(num_blocks - first_block, GROUP_BLOCKS)
        place = tl.program_id(0) % (GROUP_BLOCKS * tiles_n)
        block, tile_n = first_block + place % group, place // group
    if block * BLOCK_M >= tl.load(num_tokens_post_padded):
        return
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
def _moe_gemm_unsorted_kernel(
    x,  # [Tx, K]
    weight,  # [E, N, K]
    topk_ids,  # int32[T, k]
    out,  # [P, N]
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
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pair = (tl.program_id(0) // tiles_n).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, BLOCK_K)
    x_places = x + pair // PAIRS_PER_ROW * X_STRIDE + offsets
    w_places = weight + expert * EXPERT_STRIDE + n[:, None] * WEIGHT_STRIDE + offsets[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        inside = offsets < K - start
        w_mask = (n < N)[:, None] & inside[None, :]
        w_block = tl.load(w_places + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x_block = tl.load(x_places + start, mask=inside, other=0.0, eviction_policy="evict_last")
        acc += w_block.to(tl.float32) * x_block.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1).to(out.dtype.element_ty)  # [BLOCK_N]
    tl.store(out + pair * OUT_STRIDE + n, result, mask=n < N)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    num_tokens_post_padded: torch.Tensor | None,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
) -> None:
    num_pairs, (_, out_features, in_features) = topk_ids.numel(), weight.shape
    assert pairs_per_row >= 1 and num_pairs % pairs_per_row == 0, (  # noqa: PT018
        f"{num_pairs} pairs, {pairs_per_row} a row"
    )
    assert x.dtype in FLOATS, f"x is {x.dtype}, not one of {FLOATS}"
    for name, tensor, shape in (
        ("x", x, (num_pairs // pairs_per_row, in_features)),
        ("out", out, (num_pairs, out_features)),
        ("weight", weight, tuple(weight.shape)),
    ):
        assert tensor.dtype == x.dtype, f"{name} is {tensor.dtype}, x is {x.dtype}"
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.stride(-1) == 1, f"{name}'s last dim has stride {tensor.stride(-1)}"
    buffers = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    given = [buffer for buffer in buffers if buffer is not None]
    assert len(given) in (0, 3), "the three sort buffers come together"
    for index in (topk_ids, *given):
        assert index.dtype == torch.int32, f"an index tensor is {index.dtype}, not int32"
        assert index.is_contiguous(), "an index tensor is not contiguous"
    assert not given or block_size_m in BLOCK_SIZES_M, (
        f"block_size_m {block_size_m}, not one of {BLOCK_SIZES_M}"
    )


def launch_moe_gemm(
    config: MoeGemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    num_tokens_post_padded: torch.Tensor | None,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
) -> None:
    """`moe_gemm_triton` in a given configuration."""
    num_pairs, (_, out_features, in_features) = topk_ids.numel(), weight.shape
    shapes = {
        "N": out_features,
        "K": in_features,
        "X_STRIDE": x.stride(0),
        "EXPERT_STRIDE": weight.stride(0),
        "WEIGHT_STRIDE": weight.stride(1),
        "OUT_STRIDE": out.stride(0),
        "PAIRS_PER_ROW": pairs_per_row,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        **dependent_launch(x.device),
    }
    tiles_n = triton.cdiv(out_features, config.block_n)
    if sorted_token_ids is None or expert_ids is None:
        _moe_gemm_unsorted_kernel[(num_pairs * tiles_n,)](
            x,
            weight,
            topk_ids,
            out,
            BLOCK_K=min(config.block_k, triton.next_power_of_2(in_features)),
            NUM_STAGES=config.num_stages,
            **shapes,
        )
        return
    num_blocks = expert_ids.numel()
    _moe_gemm_sorted_kernel[(num_blocks * tiles_n,)](
        x,
        weight,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        out,
        num_pairs,
        num_blocks,
        SWAPPED=config.swapped,
        GROUP_BLOCKS=config.group_blocks,
        BLOCK_M=block_size_m,
        BLOCK_K=config.block_k,
        num_stages=config.num_stages,
        **shapes,
    )


def moe_gemm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    num_tokens_post_padded: torch.Tensor | None,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
) -> None:
    """`out[p] = x[p // pairs_per_row] @ weight[expert of p]^T` for every pair p with an expert.

    x: [P / pairs_per_row, K], weight: [E, N, K], out: [P, N] (written), of one dtype, last dims
    contiguous; topk_ids: int32[T, k] with T * k = P. With the three buffers that
    `moe_align_block_size` wrote for `block_size_m`, pairs are taken in its blocks; with None,
    each pair by itself (block_size_m is then not read). Pairs of id -1 are not written. Sums in
    float32, rounded once. Raises AssertionError on other shapes, dtypes or strides.
    """
    sort_buffers = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    _check(x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)
    block_m = 0 if sorted_token_ids is None else block_size_m
    itemsize = weight.element_size()
    config = moe_gemm_config(block_m, weight.shape[2], weight.shape[1], itemsize)
    config = fitted(config, block_m, itemsize, x.device)
    launch_moe_gemm(config, x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)


def moe_gemm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    num_tokens_post_padded: torch.Tensor | None,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
) -> None:
    """Twin of `moe_gemm_triton`.

    A library product's bits may depend on its number of rows, which must not be how many
    neighbours share an expert: every product here takes a whole block, or one pair.
    """
    sort_buffers = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    _check(x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)
    num_pairs = topk_ids.numel()
    if sorted_token_ids is None or expert_ids is None or num_tokens_post_padded is None:
        experts = topk_ids.flatten().tolist()
        blocks = torch.arange(num_pairs, device=x.device)[:, None]  # [blocks, block_size_m]
    else:
        used = int(num_tokens_post_padded)
        experts = expert_ids[: used // block_size_m].tolist()
        blocks = sorted_token_ids[:used].view(-1, block_size_m).long()
    wide = x.float()
    last, matrix = -1, torch.empty(0)
    for expert, pairs in zip(experts, blocks, strict=True):
        if expert < 0:
            continue
        if expert != last:
            last, matrix = expert, weight[expert].float().T  # [K, N]
        live = pairs < num_pairs
        rows = wide[torch.where(live, pairs // pairs_per_row, 0)]
        out[pairs[live]] = (rows @ matrix)[live].to(out.dtype)


moe_gemm = define_op(moe_gemm_triton, moe_gemm_torch, mutates=("out",))
