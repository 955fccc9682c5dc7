"""The product with a base weight and, in the same launch, x A^T of the rows that have adapters.

The shrink is a few small programs beside the product's many: as a launch of its own it would cost
more in starting than in reading. Tiles are `linear`'s and `sgemm_a`'s own, so each result has the
bits that its op alone gives; so have those of `hopper_linear`, which computes both on Hopper.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.hopper_linear import is_for_hopper, launch_hopper_linear_shrink
from kernels.linear import check_linear, linear_tile, linear_torch, own_config, tile_arguments
from kernels.linear_arrangement import arranged, product_programs, rank_programs
from kernels.linear_config import LinearConfig, card
from kernels.lora_segments import TABLES, check_row_slot, check_segments
from kernels.lora_shrink import (
    check_splits,
    shrink_arguments,
    shrink_programs,
    shrink_tile,
)
from kernels.op import define_op
from kernels.partials import rows_a_split, splits_of
from kernels.sgemm import sgemm_a_torch


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "split_rows",
        "max_segments",
        "shrunk_rows",
        "blocks_per_split",
        "splits",
    ],
    do_not_specialize_on_alignment=TABLES,
)
def _linear_shrink_kernel(
    x,
    weight,
    bias,
    out,
    arena,
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    pair_row,
    num_segments,
    shrunk,
    arrivals,
    num_tokens,
    split_rows,
    max_segments,
    shrunk_rows,
    blocks_per_split,
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHRINK_FIRST: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    STACK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    products: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * SPLITS
    places: tl.constexpr = STACK * ((MAX_RANK + BLOCK_R - 1) // BLOCK_R)
    product, shrink = tl.program_id(0), tl.program_id(0) - products
    if SHRINK_FIRST:
        shrink = tl.program_id(0)
        product = shrink - (tl.num_programs(0) - products)
        shrinks = product < 0
    else:
        shrinks = shrink >= 0
    if shrinks:
        shrink_tile(
            x,
            arena,
            a_ptrs,
            lora_ranks,
            seg_indptr,
            weight_indices,
            pair_row,
            num_segments,
            shrunk,
            arrivals,
            max_segments,
            shrunk_rows,
            blocks_per_split,
            splits,
            shrink % places,
            places,
            shrink // places % splits,
            shrink // places // splits,
            K,
            X_STRIDE,
            SHRUNK_STRIDE,
            MAX_RANK,
            MAX_LORAS,
            BLOCK_SEGMENTS,
            ONE_TILE,
            BLOCK_P,
            BLOCK_R,
            BLOCK_A,
            PDL,
        )
    else:
        wait_for_inputs(PDL)
        linear_tile(
            x,
            weight,
            bias,
            out,
            num_tokens,
            split_rows,
            product,
            N,
            K,
            X_STRIDE,
            WEIGHT_STRIDE,
            OUT_STRIDE,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )


def launch_linear_shrink(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    row_slot: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`linear_shrink_triton` in a given configuration, as `arranged`."""
    check_linear(x, weight, bias, out)
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, pair_row, num_segments)
    check_segments(x, arena, *tables, max_rank, shrunk)
    stack, max_loras = a_ptrs.shape
    check_splits(shrunk, arrivals, stack, max_loras, max_rank)
    assert x.shape[0] <= config.block_m, f"{x.shape[0]} rows, but tiles of {config.block_m}"
    check_row_slot(row_slot, x)
    products = product_programs(config, weight.shape[0], splits_of(out))
    numbers = (x.shape[0], stack, max_loras, max_rank, shrunk.shape[0])
    arrangement = arranged(config, products, rank_programs(config, *numbers), card(x.device))
    if is_for_hopper(arrangement.config, x, weight, arena):
        by_row = (a_ptrs, lora_ranks, seg_indptr, weight_indices, row_slot)
        launch_hopper_linear_shrink(
            arrangement, x, weight, bias, out, arena, *by_row, max_rank, shrunk, arrivals
        )
        return
    shrink = shrink_arguments(x, arena, max_loras, max_rank, shrunk)
    arrangement = arranged(config, products, shrink_programs(*numbers), card(x.device))
    _linear_shrink_kernel[(arrangement.programs,)](
        x,
        weight,
        bias,
        out,
        arena,
        *tables,
        shrunk,
        arrivals,
        x.shape[0],
        rows_a_split(out),
        SHRINK_FIRST=arrangement.shrink_first,
        STACK=stack,
        **tile_arguments(arrangement.config, x, weight, out),
        **shrink,
        **dependent_launch(x.device),
    )


def linear_shrink_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    row_slot: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`out = x Wᵀ + bias` as `linear` writes it, and `shrunk` as `sgemm_a` does, both in place.

    Only where `linear_config` gives the own kernel; raises AssertionError elsewhere, and on
    shapes, dtypes or strides that either op refuses. Reads N·K weights and the A of each slot in
    use. Tables, segments and `row_slot` (of `lora_metadata`, like those) must be two launches old,
    as `sgemm_a`'s.
    """
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, pair_row, num_segments, row_slot)
    config = own_config(x, weight)
    launch_linear_shrink(config, x, weight, bias, out, arena, *tables, max_rank, shrunk, arrivals)


def linear_shrink_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arena: torch.Tensor,
    a_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    row_slot: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Torch twin of `linear_shrink_triton`."""
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, pair_row, num_segments)
    linear_torch(x, weight, bias, out)
    sgemm_a_torch(x, arena, *tables, max_rank, shrunk, arrivals)


linear_shrink = define_op(
    linear_shrink_triton, linear_shrink_torch, mutates=("out", "shrunk", "arrivals")
)
