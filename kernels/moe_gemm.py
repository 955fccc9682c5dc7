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
from kernels.moe_gemm_config import BLOCK_SIZES_M, MoeGemmConfig, config_of, moe_block_size_m
from kernels.moe_gemm_tile import (
    sorted_arguments,
    sorted_tile,
    unsorted_arguments,
    unsorted_tile,
)
from kernels.op import FLOATS, define_op

__all__ = ["launch_moe_gemm", "moe_block_size_m", "moe_gemm", "moe_gemm_torch", "moe_gemm_triton"]


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _moe_gemm_sorted_kernel(
    x,
    weight,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    out,
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
    sorted_tile(
        x,
        weight,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        out,
        num_pairs,
        num_blocks,
        tl.program_id(0),
        N,
        K,
        X_STRIDE,
        EXPERT_STRIDE,
        WEIGHT_STRIDE,
        OUT_STRIDE,
        PAIRS_PER_ROW,
        SWAPPED,
        GROUP_BLOCKS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


@triton.jit
def _moe_gemm_unsorted_kernel(
    x,
    weight,
    topk_ids,
    out,
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
    unsorted_tile(
        x,
        weight,
        topk_ids,
        out,
        tl.program_id(0),
        N,
        K,
        X_STRIDE,
        EXPERT_STRIDE,
        WEIGHT_STRIDE,
        OUT_STRIDE,
        PAIRS_PER_ROW,
        BLOCK_N,
        BLOCK_K,
        NUM_STAGES,
    )


def check_moe_gemm(
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
    num_pairs, tiles_n = topk_ids.numel(), triton.cdiv(weight.shape[1], config.block_n)
    if sorted_token_ids is None or expert_ids is None:
        _moe_gemm_unsorted_kernel[(num_pairs * tiles_n,)](
            x,
            weight,
            topk_ids,
            out,
            **unsorted_arguments(config, x, weight, pairs_per_row, out),
            **dependent_launch(x.device),
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
        **sorted_arguments(config, x, weight, block_size_m, pairs_per_row, out),
        **dependent_launch(x.device),
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
    check_moe_gemm(x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)
    config = config_of(weight, 0 if sorted_token_ids is None else block_size_m)
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
    check_moe_gemm(x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)
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
