"""Expert LoRA of few rows, second half of gate and up: x A^T B^T added, then the activation.

The deltas never exist in memory: they are added in registers to what the activation reads anyway.
`moe_lora_pairs` says where things lie.
"""

import torch
import triton
import triton.language as tl

from kernels.activation import KINDS, activate, gated_activation_torch
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import NO_LORA
from kernels.lora_segments import as_weights, weight_view
from kernels.moe_lora_pairs import (
    PAIR_TABLES,
    check_pairs,
    check_rows,
    columns_a_program,
    load_b,
    sum_splits,
    walk_pairs,
)
from kernels.op import define_op

MANY_PAIRS = 512  # above, programs hide each other's waits, and registers are what is short


@triton.jit
def _slice_sum(
    shrunk,
    place,
    split_stride,
    block,
    rank,
    r,
    SPLITS: tl.constexpr,
    MAX_RANK: tl.constexpr,
):
    """[BLOCK_N] float32: block [BLOCK_N, BLOCK_R] of B times shrunk at place + r."""
    # Whole vectors of 4 are read, what lies beyond the rank in the last is dropped.
    read = (r < (rank + 3) // 4 * 4) & (r < MAX_RANK)
    s = sum_splits(shrunk, place + r, read, split_stride, SPLITS)
    return tl.sum(block.to(tl.float32) * tl.where(r < rank, s, 0.0)[None, :], axis=1)


@triton.jit
def _expand(
    shrunk,
    gate_place,
    up_place,
    split_stride,
    gate_b,
    up_b,
    gate_rank,
    up_rank,
    n,
    inside,
    SPLITS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Two of [BLOCK_N] float32, B a of gate and of up; both Bs are under way at once."""
    gate_sums = tl.zeros([BLOCK_N], tl.float32)
    up_sums = tl.zeros([BLOCK_N], tl.float32)
    for first_rank in range(0, tl.maximum(gate_rank, up_rank), BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        gate_block = load_b(gate_b, n, r, gate_rank, inside, VECTOR)
        up_block = load_b(up_b, n, r, up_rank, inside, VECTOR)
        gate_sums += _slice_sum(
            shrunk, gate_place, split_stride, gate_block, gate_rank, r, SPLITS, MAX_RANK
        )
        up_sums += _slice_sum(
            shrunk, up_place, split_stride, up_block, up_rank, r, SPLITS, MAX_RANK
        )
    return gate_sums, up_sums


@triton.jit(do_not_specialize=["split_rows"], do_not_specialize_on_alignment=PAIR_TABLES)
def _moe_lora_gate_up_kernel(
    gate_up,
    shrunk,
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    topk_ids,
    out,
    split_rows,
    INTERMEDIATE: tl.constexpr,
    GATE_UP_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    source = gate_up + pair.to(tl.int64) * GATE_UP_STRIDE + n
    # Read before it is known whether the pair has an expert, so as to wait once for all of them.
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    expert = tl.load(topk_ids + pair)
    slot = tl.load(row_adapter + pair // TOP_K)
    if expert < 0:
        return
    known = (slot >= 0) & (slot < MAX_LORAS) & (expert < NUM_EXPERTS)
    # All that a program may need of the tables in one wait, not one wait each.
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    gate_entry = slot * NUM_EXPERTS + expert
    up_entry = (MAX_LORAS + slot) * NUM_EXPERTS + expert
    gate_rank = tl.load(lora_ranks + gate_entry, mask=known, other=0)
    up_rank = tl.load(lora_ranks + up_entry, mask=known, other=0)
    gate_address = tl.load(b_ptrs + gate_entry, mask=known, other=0)
    up_address = tl.load(b_ptrs + up_entry, mask=known, other=0)
    gate_scaling = tl.load(scalings + gate_entry, mask=known, other=0.0)
    up_scaling = tl.load(scalings + up_entry, mask=known, other=0.0)
    gate_pair, up_pair = pair, pair
    if outer_ranks is not None:
        first = pair // TOP_K * TOP_K
        gate_outer = tl.load(outer_ranks + slot, mask=known, other=0)
        up_outer = tl.load(outer_ranks + MAX_LORAS + slot, mask=known, other=0)
        gate_pair = tl.where(gate_outer > 0, first, pair)
        up_pair = tl.where(up_outer > 0, first, pair)
    widest = tl.where(enabled != 0, tl.maximum(gate_rank, up_rank), 0)
    if widest > 0:
        split_stride = split_rows.to(tl.int64) * SHRUNK_STRIDE
        gate_place = gate_pair.to(tl.int64) * SHRUNK_STRIDE
        up_place = up_pair.to(tl.int64) * SHRUNK_STRIDE + MAX_RANK
        gate_b = as_weights(gate_address, arena)
        up_b = as_weights(up_address, arena)
        if widest <= NARROW:
            gate_sums, up_sums = _expand(
                shrunk,
                gate_place,
                up_place,
                split_stride,
                gate_b,
                up_b,
                gate_rank,
                up_rank,
                n,
                inside,
                SPLITS,
                MAX_RANK,
                VECTOR,
                BLOCK_N,
                NARROW,
            )
        else:
            gate_sums, up_sums = _expand(
                shrunk,
                gate_place,
                up_place,
                split_stride,
                gate_b,
                up_b,
                gate_rank,
                up_rank,
                n,
                inside,
                SPLITS,
                MAX_RANK,
                VECTOR,
                BLOCK_N,
                WIDE,
            )
        gate = tl.where(gate_rank > 0, gate + gate_scaling * gate_sums, gate)
        up = tl.where(up_rank > 0, up + up_scaling * up_sums, up)
    result = activate(gate, KIND) * up
    place = out + pair.to(tl.int64) * OUT_STRIDE + n
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)


def _check(
    gate_up: torch.Tensor,
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    max_rank: int,
    kind: str,
    out: torch.Tensor,
) -> None:
    check_pairs(
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        None,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        max_rank,
        shrunk,
    )
    num_pairs, intermediate = topk_ids.numel(), out.shape[1]
    assert b_ptrs.shape[0] == 2, f"{b_ptrs.shape[0]} slices, not gate and up"
    assert kind in KINDS, f"kind is one of {KINDS}, not {kind!r}"
    check_rows("gate_up", gate_up, (num_pairs, 2 * intermediate))
    check_rows("out", out, (num_pairs, intermediate))
    assert gate_up.dtype == out.dtype, f"{gate_up.dtype} and {out.dtype} differ"


def moe_lora_gate_up_triton(
    gate_up: torch.Tensor,
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    max_rank: int,
    kind: str,
    out: torch.Tensor,
) -> None:
    """out[p] = f(gate + s_g B_g a_g) * (up + s_u B_u a_u), a the sum over splits of shrunk[:, p].

    gate_up [P, 2I]: gate is the left half of a row, up the right; out [P, I] (written), of the
    same dtype. f is `kind`, as in `gated_activation`, whose bits pairs without a delta get. A
    slice whose outer_ranks entry is not 0 reads a from pair t * k of its row, though B is the
    pair's own. Rows of `out` whose pair has no expert are not written. All in float32, rounded
    once. Moves 3 * P * I elements, and rank * I of B for every pair and slice with a rank. Raises
    AssertionError on other shapes, dtypes, strides or kinds.
    """
    _check(
        gate_up,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        max_rank,
        kind,
        out,
    )
    (num_pairs, intermediate), (_, max_loras, num_experts) = out.shape, b_ptrs.shape
    is_many = num_pairs > MANY_PAIRS
    block_n = columns_a_program(num_pairs, intermediate, 32, 128)
    if is_many:
        block_n = min(256, max(32, triton.next_power_of_2(intermediate)))
    ranks = max(4, triton.next_power_of_2(max_rank))
    narrow, wide = (8, 8) if is_many else (16, 32)
    # For the odd ranks' sake it would take more.
    most_registers = 72 if is_many else None if block_n == 32 else 128
    _moe_lora_gate_up_kernel[(num_pairs, triton.cdiv(intermediate, block_n))](
        gate_up,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        out,
        shrunk.stride(0) // shrunk.stride(1),
        INTERMEDIATE=intermediate,
        GATE_UP_STRIDE=gate_up.stride(0),
        OUT_STRIDE=out.stride(0),
        SPLITS=shrunk.shape[0],
        SHRUNK_STRIDE=shrunk.stride(1),
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        NUM_EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        KIND=kind,
        VECTOR=16 // arena.element_size(),
        BLOCK_N=block_n,
        NARROW=min(narrow, ranks),
        WIDE=min(wide, ranks),
        num_warps=2 if block_n < 128 else 4,
        maxnreg=most_registers,
        **dependent_launch(gate_up.device),
    )


def moe_lora_gate_up_torch(
    gate_up: torch.Tensor,
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    max_rank: int,
    kind: str,
    out: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_gate_up_triton`."""
    _check(
        gate_up,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        max_rank,
        kind,
        out,
    )
    top_k, width = topk_ids.shape[1], out.shape[1]
    addresses, ranks, factors = b_ptrs.tolist(), lora_ranks.tolist(), scalings.tolist()
    shared = None if outer_ranks is None else outer_ranks.tolist()
    sums = shrunk[0] if len(shrunk) == 1 else shrunk.sum(0)  # [P, 2 * max_rank]
    wide = gate_up.to(torch.float32, copy=True)
    for pair, slot, expert in walk_pairs(row_adapter, adapter_enabled, topk_ids):
        for j in range(2):
            rank = ranks[j][slot][expert] if expert >= 0 else 0
            if rank:
                source = pair // top_k * top_k if shared and shared[j][slot] else pair
                b = weight_view(arena, addresses[j][slot][expert], width, rank)  # [I, rank]
                a = sums[source, j * max_rank : j * max_rank + rank]
                wide[pair, j * width : (j + 1) * width] += factors[j][slot][expert] * (b @ a)
    result = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    gated_activation_torch(wide, *NO_LORA, kind, result)
    out.copy_(torch.where(topk_ids.view(-1, 1) >= 0, result.to(out.dtype), out))


moe_lora_gate_up = define_op(moe_lora_gate_up_triton, moe_lora_gate_up_torch, mutates=("out",))
