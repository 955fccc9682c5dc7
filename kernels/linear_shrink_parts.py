"""The product with a base weight on Hopper and, by the same programs, x A^T in parts.

What `linear_shrink` computes, but for the last step: the parts of x A^T are left to what reads
them (`lora_arguments`), which costs it less than one more round of programs would cost here.
"""

import torch

from kernels.hopper_linear import is_for_hopper
from kernels.hopper_ranks import launch_hopper_ranks
from kernels.linear import check_linear, linear_torch, own_config
from kernels.linear_arrangement import fitted_with_ranks, product_programs, rank_tiles
from kernels.linear_config import LinearConfig, card
from kernels.lora_segments import check_row_slot, check_segments
from kernels.op import define_op
from kernels.partials import splits_of
from kernels.sgemm import sgemm_a_torch


def _check(
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
) -> None:
    check_linear(x, weight, bias, out)
    assert shrunk.dim() == 3, f"shrunk has {shrunk.dim()} dims, not 3: rows, parts, ranks"
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, pair_row, num_segments)
    check_segments(x, arena, *tables, max_rank, shrunk[:, 0])
    parts, splits = shrunk.shape[1], splits_of(out)
    assert parts % splits == 0 < parts, f"shrunk has {parts} parts, out {splits} splits"
    check_row_slot(row_slot, x)


def launch_linear_shrink_parts(
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
) -> None:
    """`linear_shrink_parts_triton` in a given configuration."""
    segments = (seg_indptr, weight_indices, pair_row, num_segments, row_slot)
    _check(x, weight, bias, out, arena, a_ptrs, lora_ranks, *segments, max_rank, shrunk)
    assert x.shape[0] <= config.block_m, f"{x.shape[0]} rows, but tiles of {config.block_m}"
    assert is_for_hopper(config, x, weight, arena), (
        f"not for Hopper's kernel: {x.dtype} x and {arena.dtype} adapters on {x.device} in "
        f"{config}, x {tuple(x.shape)} at {x.data_ptr():#x} with strides {x.stride()}, weight at "
        f"{weight.data_ptr():#x} with strides {weight.stride()}: use linear and sgemm_a"
    )
    splits = splits_of(out)
    fitted = fitted_with_ranks(config, weight.shape[0], splits, card(x.device))
    assert fitted is not None, f"no room for A beside {config}"
    programs = product_programs(config, weight.shape[0], splits)
    units = rank_tiles(config, len(weight_indices), a_ptrs.shape[0], max_rank)
    units *= shrunk.shape[1]
    assert units <= programs, f"{units} parts of tiles of x A^T, but {programs} programs"
    tables = (arena, a_ptrs, lora_ranks, seg_indptr, weight_indices, row_slot)
    launch_hopper_ranks(fitted, x, weight, bias, out, *tables, max_rank, shrunk)


def linear_shrink_parts_triton(
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
) -> None:
    """`out = x Wᵀ + bias` as `linear` writes it, and x Aᵀ in parts, both in place.

    shrunk: float32 [T, P, stack * max_rank]; the sum over its P parts, ranges of K of which the
    last of a split may be short or empty, is `sgemm_a`'s x Aᵀ; where a row has no such rank they
    may hold anything. P is a multiple of out's splits, and there is a program of the product for
    each part of each tile: see `linear_arrangement.parts_in_product`, whose P are powers of two,
    as what reads them wants. The rest is as of `linear_shrink`, and so is what is
    read: N·K weights, the A of each slot in use. Tables, segments and `row_slot` must be two
    launches old.

    Raises AssertionError where `linear_config` gives no own kernel, where Hopper's cannot be it
    (another card, adapters of another dtype than x, rows that do not start on 16 bytes), and on
    shapes, dtypes or strides that `linear` or `sgemm_a` refuses.
    """
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, pair_row, num_segments, row_slot)
    config = own_config(x, weight)
    launch_linear_shrink_parts(config, x, weight, bias, out, arena, *tables, max_rank, shrunk)


def linear_shrink_parts_torch(
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
) -> None:
    """Torch twin of `linear_shrink_parts_triton`: all of a sum in its first part."""
    segments = (seg_indptr, weight_indices, pair_row, num_segments)
    tables = (a_ptrs, lora_ranks, *segments)
    _check(x, weight, bias, out, arena, *tables, row_slot, max_rank, shrunk)
    linear_torch(x, weight, bias, out)
    sums = torch.zeros_like(shrunk[:, 0]).unsqueeze(0)  # [1, T, stack * max_rank]
    arrivals = torch.empty(0, dtype=torch.int32, device=x.device)
    sgemm_a_torch(x, arena, *tables, max_rank, sums, arrivals)
    shrunk[:, 0], shrunk[:, 1:] = sums[0], 0


linear_shrink_parts = define_op(
    linear_shrink_parts_triton, linear_shrink_parts_torch, mutates=("out", "shrunk")
)
