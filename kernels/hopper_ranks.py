"""The product with a base weight on Hopper and, by the same programs, x A^T in parts.

x A^T takes no programs here and no reads of x of its own. K is cut into parts, the ranks of all
slots in use into tiles, and a program of the product multiplies one part of one tile, at most, by
those blocks of x that it has in shared memory for W. Nothing waits for another program: what reads
x A^T next adds up the parts.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels import linear_arrangement
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.hopper_linear import descriptor, first_sums, hopper_product_tile, store_tile
from kernels.hopper_multiply import (
    ask_for_blocks,
    ask_for_first_rows,
    ask_for_first_weights,
    ask_for_weights,
    barrier,
    end_barriers,
    multiply_blocks,
    new_barriers,
    product_layout,
    row_layout,
    start_product,
    wait_for_lanes,
)
from kernels.hopper_shrink import fetch_ranks, find_ranks, store_own_ranks
from kernels.linear_arrangement import product_programs, rank_tiles, ranks_a_tile
from kernels.linear_config import LinearConfig
from kernels.lora_segments import TABLES
from kernels.partials import rows_a_split, splits_of

RANK_STAGES = gl.constexpr(linear_arrangement.RANK_STAGES)


@gluon.jit
def multiply_with_ranks(
    x,
    weight,
    first_n,
    first_k,
    last_k,
    acc,
    ready,
    a_rows,
    there,
    first_step,
    last_step,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    RANKS: gl.constexpr,
    PDL: gl.constexpr,
):
    """`hopper_multiply.multiply`'s product with W behind a descriptor, and A xᵀ, float32 [RANKS,
    BLOCK_M], over its steps from `first_step` up to `last_step`.

    A: the rows at RANKS addresses `a_rows`, 0 where not `there`. Before it waits for x it has asked
    for the first blocks of A too.
    """
    gl.static_assert(STAGES >= 2, "no stage to copy into while another is multiplied")
    RANKS_AHEAD: gl.constexpr = RANK_STAGES - 1
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([RANKS, BLOCK_K], x.dtype)
    stages_w = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    stages_x = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    stages_a = gl.allocate_shared_memory(x.dtype, [RANK_STAGES, RANKS, BLOCK_K], layout)
    steps = (last_k - first_k + BLOCK_K - 1) // BLOCK_K
    ask_for_first_weights(
        weight,
        first_n,
        None,
        None,
        first_k,
        steps,
        stages_w,
        ready,
        BYTES,
        K,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    for number in gl.static_range(RANKS_AHEAD):
        k, wanted = first_k + (first_step + number) * BLOCK_K, first_step + number < last_step
        block_a = stages_a.index(number)
        ask_for_weights(None, 0, a_rows, there, k, wanted, block_a, None, K, RANKS, BLOCK_K)
    wait_for_inputs(PDL)
    ask_for_first_rows(x, first_k, steps, stages_x, ready, BLOCK_K, STAGES)
    acc = multiply_blocks(
        0,
        first_step,
        x,
        weight,
        first_n,
        None,
        None,
        first_k,
        steps,
        acc,
        stages_x,
        stages_w,
        ready,
        BYTES,
        K,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    # Sums are set to 0 while none are in flight: else ptxas lets products wait for one another.
    acc = warpgroup_mma_wait(0, deps=[acc])
    ranks = gl.zeros([RANKS, BLOCK_M], gl.float32, product_layout(BLOCK_M, gl.num_warps()))
    for step in range(first_step, last_step):
        acc = start_product(weight, step, acc, stages_x, stages_w, ready, STAGES)
        wait_for_lanes(RANKS_AHEAD)
        block_a = stages_a.index((step - first_step) % RANK_STAGES)
        block_x = stages_x.index(step % STAGES).permute((1, 0))
        ranks = warpgroup_mma(block_a, block_x, ranks, is_async=True)
        acc, ranks = warpgroup_mma_wait(2, deps=[acc, ranks])
        barrier()  # all are through with the two products before these, as in `multiply_blocks`
        ask_for_blocks(
            x,
            weight,
            first_n,
            None,
            None,
            first_k,
            step + STAGES - 1,
            steps,
            stages_x,
            stages_w,
            ready,
            BYTES,
            K,
            BLOCK_N,
            BLOCK_K,
            STAGES,
        )
        ahead = step - first_step + RANKS_AHEAD
        k, wanted = first_k + (first_step + ahead) * BLOCK_K, first_step + ahead < last_step
        block_a = stages_a.index(ahead % RANK_STAGES)
        ask_for_weights(None, 0, a_rows, there, k, wanted, block_a, None, K, RANKS, BLOCK_K)
    acc, ranks = warpgroup_mma_wait(0, deps=[acc, ranks])
    async_copy.wait_group(0)
    acc = multiply_blocks(
        last_step,
        steps,
        x,
        weight,
        first_n,
        None,
        None,
        first_k,
        steps,
        acc,
        stages_x,
        stages_w,
        ready,
        BYTES,
        K,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # all warps are: what comes next may lie where the stages were
    return acc, ranks


@gluon.jit(
    do_not_specialize=["num_tokens", "split_rows", "max_segments", "rank_tiles", "parts"],
    do_not_specialize_on_alignment=[*TABLES, "row_slot"],
)
def _hopper_ranks_kernel(
    x,  # descriptor of [T, K]
    weight,  # descriptor of [N, K]
    bias,  # [N] or None
    out,  # [T, N], or [splits, T, N]
    arena,
    a_ptrs,
    lora_ranks,
    seg_indptr,
    weight_indices,
    row_slot,
    shrunk,  # [T, splits * parts, STACK * MAX_RANK]
    num_tokens,
    split_rows,
    max_segments,
    rank_tiles,
    parts,  # of a split of K, in which a tile of x A^T is computed
    N: gl.constexpr,
    K: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    RANKS: gl.constexpr,  # in a tile of x A^T
    SHRUNK_STRIDE: gl.constexpr,
    PART_STRIDE: gl.constexpr,
    STACK: gl.constexpr,
    MAX_RANK: gl.constexpr,
    MAX_LORAS: gl.constexpr,
    PDL: gl.constexpr,
):
    SPLIT_K: gl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    NUM_WARPS: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = row_layout(BLOCK_K, NUM_WARPS)
    multiplied: gl.constexpr = product_layout(BLOCK_M, NUM_WARPS)
    program = gl.program_id(0)
    tile, split = program // SPLITS, program % SPLITS
    rank_tile, part = tile % rank_tiles, tile // rank_tiles
    stacked, first = rank_tile % STACK, rank_tile // STACK * RANKS
    segments = gl.where(part < parts, max_segments, 0)
    tables = (a_ptrs, lora_ranks, seg_indptr, weight_indices, segments)
    index = first + gl.arange(0, RANKS, layout=gl.SliceLayout(1, copied))
    _slot, rank, there, address = find_ranks(index, stacked, *tables, MAX_RANK, MAX_LORAS)
    if gl.max(there.to(gl.int32), axis=0) == 0:
        hopper_product_tile(
            x,
            weight,
            bias,
            out,
            num_tokens,
            split_rows,
            program,
            N,
            K,
            OUT_STRIDE,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            PDL,
        )
    else:
        # Once for the lanes that copy a rank, once for those that store it.
        out_index = first + gl.arange(0, RANKS, layout=gl.SliceLayout(1, multiplied))
        out_slot, out_rank, out_there, _address = find_ranks(
            out_index, stacked, *tables, MAX_RANK, MAX_LORAS
        )
        first_n, first_k = tile * BLOCK_N, split * SPLIT_K
        last_k = gl.minimum(first_k + SPLIT_K, K)
        steps = (last_k - first_k + BLOCK_K - 1) // BLOCK_K
        steps_a_part = (SPLIT_K // BLOCK_K + parts - 1) // parts
        first_step = gl.minimum(part * steps_a_part, steps)
        last_step = gl.minimum(first_step + steps_a_part, steps)
        a_rows = address.to(gl.pointer_type(arena.dtype.element_ty))
        a_rows = gl.multiple_of(a_rows, 16) + rank * K
        # What of W is ahead is enough to bridge the way from memory, that of A is not.
        end = gl.minimum(first_k + last_step * BLOCK_K, K)
        ahead = gl.minimum(first_k + (first_step + RANK_STAGES - 1) * BLOCK_K, end)
        fetch_ranks(a_rows + ahead, there, (end - ahead) * 2)
        acc = first_sums(bias, first_n, split == 0, N, BLOCK_M, BLOCK_N)
        ready = new_barriers(STAGES)
        acc, ranks = multiply_with_ranks(
            x,
            weight,
            first_n,
            first_k,
            last_k,
            acc,
            ready,
            a_rows,
            there,
            first_step,
            last_step,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            RANKS,
            PDL,
        )
        places = out + (split * split_rows).to(gl.int64) * OUT_STRIDE
        store_tile(acc, places, first_n, num_tokens, N, OUT_STRIDE, BLOCK_M, BLOCK_N)
        store_own_ranks(
            ranks,
            stacked,
            out_slot,
            out_rank,
            out_there,
            row_slot,
            shrunk + (split * parts + part) * PART_STRIDE,
            num_tokens,
            BLOCK_M,
            SHRUNK_STRIDE,
            MAX_RANK,
        )
        end_barriers(ready)


def launch_hopper_ranks(
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
    row_slot: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """`launch_linear_shrink_parts`, of checked arguments, with a `config` that
    `fitted_with_ranks` gave."""
    stack, max_loras = a_ptrs.shape
    splits, segments = splits_of(out), min(x.shape[0], max_loras)
    _hopper_ranks_kernel[(product_programs(config, weight.shape[0], splits),)](
        descriptor(x, config.block_m, config.block_k),
        descriptor(weight, config.block_n, config.block_k),
        bias,
        out,
        arena,
        a_ptrs,
        lora_ranks,
        seg_indptr,
        weight_indices,
        row_slot,
        shrunk,
        x.shape[0],
        rows_a_split(out),
        segments,
        rank_tiles(config, segments, stack, max_rank),
        shrunk.shape[1] // splits,
        N=weight.shape[0],
        K=weight.shape[1],
        OUT_STRIDE=out.stride(-2),
        SPLITS=splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        RANKS=ranks_a_tile(config),
        SHRUNK_STRIDE=shrunk.stride(0),
        PART_STRIDE=shrunk.stride(1),
        STACK=stack,
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        num_warps=config.num_warps,
        **dependent_launch(x.device),
    )
