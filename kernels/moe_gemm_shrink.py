"""The grouped GEMM and, in the same launch, the experts' x A^T of the pairs that have adapters.

The shrink is many small programs beside the product's: as a launch of its own it would stand in
line, or on a branch whose end the kernel after both has to wait for. Tiles of the product are
`moe_gemm`'s own, with its bits; those of the shrink are `moe_lora_shrink`'s, or with more pairs
those of `moe_gemm_shrink_blocks`.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.moe_gemm import check_moe_gemm, moe_gemm_torch
from kernels.moe_gemm_config import UNSORTED_PAIRS, MoeGemmConfig, config_of
from kernels.moe_gemm_shrink_blocks import launch_blocks, serves_blocks
from kernels.moe_gemm_tile import (
    sorted_arguments,
    sorted_tile,
    unsorted_arguments,
    unsorted_tile,
)
from kernels.moe_lora_pairs import PAIR_TABLES
from kernels.moe_lora_shrink import (
    SHRINK_WARPS,
    check_pair_shrink,
    moe_lora_shrink_torch,
    pair_shrink_arguments,
    pair_shrink_tile,
)
from kernels.op import define_op

MAX_SHARED_PAIRS = 256  # above, x A^T of each pair is worth a launch of its own beside the product


def shares_launch(weight: torch.Tensor, num_pairs: int, block_size_m: int) -> bool:
    """Whether `moe_gemm_shrink` is to take so many pairs, in blocks of that size where they are
    sorted, times `weight` [E, N, K]."""
    block_m = block_size_m if num_pairs > UNSORTED_PAIRS else 0
    config = config_of(weight, block_m)
    if num_pairs > MAX_SHARED_PAIRS:
        return serves_blocks(config, block_m, weight.element_size())
    return config.num_warps == SHRINK_WARPS


@triton.jit(
    do_not_specialize=["num_pairs", "num_blocks", "split_rows", "blocks_per_split", "splits"],
    do_not_specialize_on_alignment=PAIR_TABLES,
)
def _moe_gemm_shrink_kernel(
    x,
    weight,
    sorted_token_ids,  # this and the next two None for unsorted pairs
    expert_ids,
    num_tokens_post_padded,
    out,
    arena,
    a_ptrs,
    lora_ranks,
    outer_ptrs,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    topk_ids,
    shrunk,
    arrivals,
    num_pairs,
    num_blocks,
    split_rows,
    blocks_per_split,
    splits,
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
    NUM_STAGES: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RANK_PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    places: tl.constexpr = STACK * RANK_PROGRAMS
    shrink = tl.program_id(0)
    product = shrink - num_pairs * places * splits
    if product < 0:  # those come first: the few of one pair would end after the whole product
        pair_shrink_tile(
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
            arrivals,
            split_rows,
            blocks_per_split,
            splits,
            shrink // places // splits,
            shrink % places,
            shrink // places % splits,
            K,
            X_STRIDE,
            SHRUNK_STRIDE,
            STACK,
            MAX_RANK,
            MAX_LORAS,
            NUM_EXPERTS,
            TOP_K,
            PAIRS_PER_ROW,
            RANK_PROGRAMS,
            BLOCK_R,
            BLOCK_A,
        )
    elif sorted_token_ids is None:
        unsorted_tile(
            x,
            weight,
            topk_ids,
            out,
            product,
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
    else:
        sorted_tile(
            x,
            weight,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            out,
            num_pairs,
            num_blocks,
            product,
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


def launch_moe_gemm_shrink(
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
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`moe_gemm_shrink_triton` in a given configuration."""
    sort_buffers = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    check_moe_gemm(x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)
    rows = (row_adapter, adapter_enabled, topk_ids)
    lora = (arena, a_ptrs, lora_ranks, outer_ptrs, outer_ranks, *rows)
    check_pair_shrink(x, *lora, pairs_per_row, max_rank, shrunk, arrivals)
    if (
        sorted_token_ids is not None
        and expert_ids is not None
        and num_tokens_post_padded is not None
        and topk_ids.numel() > MAX_SHARED_PAIRS
        and serves_blocks(config, block_size_m, x.element_size())
        and arena.dtype == x.dtype
    ):
        launch_blocks(
            config,
            x,
            weight,
            topk_ids,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            pairs_per_row,
            out,
            arena,
            a_ptrs,
            lora_ranks,
            outer_ptrs,
            outer_ranks,
            row_adapter,
            adapter_enabled,
            max_rank,
            shrunk[0],
        )
        return
    assert config.num_warps == SHRINK_WARPS, (
        f"a product of {config.num_warps} warps: use moe_gemm and moe_lora_shrink"
    )
    num_pairs, tiles_n = topk_ids.numel(), triton.cdiv(weight.shape[1], config.block_n)
    product = dict.fromkeys(("SWAPPED", "GROUP_BLOCKS", "BLOCK_M", "NUM_STAGES"), 0)
    if sorted_token_ids is None or expert_ids is None:
        num_blocks = num_pairs
        product |= unsorted_arguments(config, x, weight, pairs_per_row, out)
    else:
        num_blocks = expert_ids.numel()
        product |= sorted_arguments(config, x, weight, block_size_m, pairs_per_row, out)
    shrink = pair_shrink_arguments(x, a_ptrs, max_rank, shrunk)
    shrinking = num_pairs * shrink["STACK"] * shrink["RANK_PROGRAMS"] * shrink["splits"]
    _moe_gemm_shrink_kernel[(shrinking + num_blocks * tiles_n,)](
        x,
        weight,
        *sort_buffers,
        out,
        *lora,
        shrunk,
        arrivals,
        num_pairs,
        num_blocks,
        TOP_K=topk_ids.shape[1],
        **product,
        **shrink,
        **dependent_launch(x.device),
    )


def moe_gemm_shrink_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    num_tokens_post_padded: torch.Tensor | None,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`out` [P, N] as `moe_gemm` writes it, and `shrunk` float32[splits, P, stack * max_rank] with
    `arrivals` as `moe_lora_shrink` does, all in place, from the same x [P / pairs_per_row, K].

    For any number of pairs; `shares_launch` says where it is meant. With more than
    MAX_SHARED_PAIRS, where `serves_blocks` and with adapters in x's dtype, the sums come from the
    tensor cores and are whole: parts and `arrivals` are not used, and a pair of id -1 gets none,
    whatever its row, so that a row whose first pair has no expert must have none at all. Otherwise
    they are made pair by pair. Raises AssertionError on shapes, dtypes or strides that either op
    refuses, and where sums are made pair by pair and the product's configuration has other warps
    than they. Reads the weights of the experts in use, and the A of each pair or, in blocks, of
    each adapter of a block.
    """
    config = config_of(weight, 0 if sorted_token_ids is None else block_size_m)
    launch_moe_gemm_shrink(
        config,
        x,
        weight,
        topk_ids,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        block_size_m,
        pairs_per_row,
        out,
        arena,
        a_ptrs,
        lora_ranks,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        max_rank,
        shrunk,
        arrivals,
    )


def moe_gemm_shrink_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    num_tokens_post_padded: torch.Tensor | None,
    block_size_m: int,
    pairs_per_row: int,
    out: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Torch twin of `moe_gemm_shrink_triton`, pair by pair."""
    sort_buffers = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    moe_gemm_torch(x, weight, topk_ids, *sort_buffers, block_size_m, pairs_per_row, out)
    rows = (row_adapter, adapter_enabled, topk_ids)
    lora = (arena, a_ptrs, lora_ranks, outer_ptrs, outer_ranks, *rows)
    moe_lora_shrink_torch(x, *lora, pairs_per_row, max_rank, shrunk, arrivals)


moe_gemm_shrink = define_op(
    moe_gemm_shrink_triton, moe_gemm_shrink_torch, mutates=("out", "shrunk", "arrivals")
)
