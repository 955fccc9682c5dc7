"""`moe_gemm_shrink` of some pairs an expert: x A^T by the blocks of pairs that the product takes.

With few pairs each reads its own A. Where an expert has several, they would read the same A as
often, if their adapters are few: here a program takes one slice of a block of pairs. It comes some
blocks before the programs of the block's tiles, so that at any time a few of those are at work
among many that stream weights, and none of them is the last. Knows how programs are laid out, not
what they compute.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.moe_gemm_config import MoeGemmConfig
from kernels.moe_gemm_tile import sorted_arguments, sorted_tile
from kernels.moe_lora_pairs import PAIR_TABLES
from kernels.moe_shrink_block import block_shrink_tile

_BLOCK_M = 16
_BLOCK_R = 16
LEAD = 16  # blocks: about those whose tiles are in work at once
_LEAST_GROUPS, _MOST_GROUPS = 4, 8  # columns fill a warp group's product; more take registers
_MOST_REGISTERS = 168  # a thread, of three programs a multiprocessor


def serves_blocks(config: MoeGemmConfig, block_size_m: int, itemsize: int) -> bool:
    """Whether blocks of `block_size_m` pairs can be taken so: of 16-bit rows and adapters."""
    return itemsize == 2 and block_size_m == _BLOCK_M and config.group_blocks == 1


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=PAIR_TABLES)
def _moe_gemm_shrink_blocks_kernel(
    x,
    weight,
    sorted_token_ids,
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
    shrunk,
    num_pairs,
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
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    LEAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # x A^T of LEAD blocks first, then the tiles of each and x A^T of the LEADth after it.
    program = tl.program_id(0) - LEAD * STACK
    if program < 0:
        block, place = tl.program_id(0) // STACK, tl.program_id(0) % STACK
    else:
        block, place = program // (STACK + tiles_n), program % (STACK + tiles_n)
        if place < STACK:
            block += LEAD
    if (program < 0) | (place < STACK):
        block_shrink_tile(
            x,
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
            shrunk,
            num_pairs,
            block,
            place,
            K,
            X_STRIDE,
            SHRUNK_STRIDE,
            MAX_RANK,
            MAX_LORAS,
            NUM_EXPERTS,
            TOP_K,
            PAIRS_PER_ROW,
            GROUPS,
            BLOCK_M,
            BLOCK_R,
            BLOCK_A,
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
            0,
            block * tiles_n + place - STACK,
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


def launch_blocks(
    config: MoeGemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
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
) -> None:
    """`launch_moe_gemm_shrink` where `serves_blocks`, for arguments that it has checked; the sums
    are whole and need no counters."""
    stack, max_loras, num_experts = a_ptrs.shape
    tiles_n = triton.cdiv(weight.shape[1], config.block_n)
    groups = max(_LEAST_GROUPS, triton.next_power_of_2(min(_MOST_GROUPS, max_loras)))
    programs = LEAD * stack + expert_ids.numel() * (stack + tiles_n)
    _moe_gemm_shrink_blocks_kernel[(programs,)](
        x,
        weight,
        sorted_token_ids,
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
        shrunk,
        topk_ids.numel(),
        SHRUNK_STRIDE=shrunk.stride(-2),
        STACK=stack,
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        NUM_EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        GROUPS=groups,
        LEAD=LEAD,
        BLOCK_R=_BLOCK_R,
        BLOCK_A=64,
        maxnreg=_MOST_REGISTERS if max_loras > groups else None,
        **sorted_arguments(config, x, weight, _BLOCK_M, pairs_per_row, out),
        **dependent_launch(x.device),
    )
