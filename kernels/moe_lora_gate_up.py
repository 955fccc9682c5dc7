"""Expert LoRA of few rows, second half of gate and up: x A^T B^T added, then the activation.

The deltas never exist in memory: they are added in registers to what the activation reads anyway.
`moe_lora_pairs` says where things lie, `lora_expand` how a delta is added.
"""

import torch
import triton
import triton.language as tl

from kernels.activation import KINDS, activate, gated_activation_torch
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import NO_LORA
from kernels.lora_expand import first_ranks, row_delta, row_product, row_sums, slice_at
from kernels.lora_segments import weight_view
from kernels.moe_lora_pairs import (
    PAIR_TABLES,
    check_pairs,
    check_rows,
    columns_a_program,
    walk_pairs,
)
from kernels.op import define_op

MANY_PAIRS = 512  # above, programs hide each other's waits, and registers are what is short


@triton.jit(do_not_specialize_on_alignment=PAIR_TABLES)
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
    INTERMEDIATE: tl.constexpr,
    GATE_UP_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    # The router's ids are as old as the tables: the product lies between.
    expert = tl.load(topk_ids + pair)
    slot = tl.load(row_adapter + pair // TOP_K)
    known = (slot >= 0) & (slot < MAX_LORAS) & (expert >= 0) & (expert < NUM_EXPERTS)
    # All that a program may need of the tables in one wait, not one wait each.
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    gate_entry = slot * NUM_EXPERTS + expert
    up_entry = gate_entry + MAX_LORAS * NUM_EXPERTS
    gate_b, gate_rank, gate_scaling = slice_at(b_ptrs, lora_ranks, scalings, gate_entry, known)
    gate_rank = tl.where(enabled != 0, gate_rank, 0)
    up_b, up_rank, up_scaling = slice_at(b_ptrs, lora_ranks, scalings, up_entry, known)
    up_rank = tl.where(enabled != 0, up_rank, 0)
    gate_pair, up_pair = pair, pair
    if outer_ranks is not None:
        first = pair // TOP_K * TOP_K
        gate_outer = tl.load(outer_ranks + slot, mask=known, other=0)
        up_outer = tl.load(outer_ranks + MAX_LORAS + slot, mask=known, other=0)
        gate_pair = tl.where(gate_outer > 0, first, pair)
        up_pair = tl.where(up_outer > 0, first, pair)
    gate_first = first_ranks(gate_b, arena, gate_rank, n, inside, VECTOR, BLOCK_R)
    up_first = first_ranks(up_b, arena, up_rank, n, inside, VECTOR, BLOCK_R)
    wait_for_inputs(PDL)
    if expert < 0:
        return
    gate_s = shrunk + gate_pair.to(tl.int64) * SHRUNK_STRIDE
    up_s = shrunk + up_pair.to(tl.int64) * SHRUNK_STRIDE + MAX_RANK
    gate_sums = row_sums(gate_s, gate_rank, VECTOR, BLOCK_R)
    up_sums = row_sums(up_s, up_rank, VECTOR, BLOCK_R)
    source = gate_up + pair.to(tl.int64) * GATE_UP_STRIDE + n
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    gate_delta = row_delta(
        row_product(gate_first, gate_sums),
        gate_b,
        arena,
        gate_rank,
        gate_scaling,
        gate_s,
        n,
        inside,
        VECTOR,
        BLOCK_R,
        ONE_BLOCK,
    )
    up_delta = row_delta(
        row_product(up_first, up_sums),
        up_b,
        arena,
        up_rank,
        up_scaling,
        up_s,
        n,
        inside,
        VECTOR,
        BLOCK_R,
        ONE_BLOCK,
    )
    gate = tl.where(gate_rank > 0, gate + gate_delta, gate)
    up = tl.where(up_rank > 0, up + up_delta, up)
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
    assert shrunk.dim() == 2, f"shrunk has {shrunk.dim()} dims, not 2: pairs, ranks"
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
    """out[p] = f(gate + s_g B_g a_g) * (up + s_u B_u a_u), a that of shrunk [P, 2 max_rank].

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
    vector = 16 // arena.element_size()
    # More than one block of many ranks takes registers that more programs could have.
    most_ranks = 8 if is_many and max_rank > 2 * vector else 2 * vector
    block_r = min(most_ranks, max(vector, triton.next_power_of_2(max_rank)))
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
        INTERMEDIATE=intermediate,
        GATE_UP_STRIDE=gate_up.stride(0),
        OUT_STRIDE=out.stride(0),
        SHRUNK_STRIDE=shrunk.stride(0),
        MAX_RANK=max_rank,
        MAX_LORAS=max_loras,
        NUM_EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        KIND=kind,
        VECTOR=vector,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        ONE_BLOCK=max_rank <= block_r,
        num_warps=2 if block_n < 128 else 4,
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
    wide = gate_up.to(torch.float32, copy=True)
    for pair, slot, expert in walk_pairs(row_adapter, adapter_enabled, topk_ids):
        for j in range(2):
            rank = ranks[j][slot][expert] if expert >= 0 else 0
            if rank:
                source = pair // top_k * top_k if shared and shared[j][slot] else pair
                b = weight_view(arena, addresses[j][slot][expert], width, rank)  # [I, rank]
                a = shrunk[source, j * max_rank : j * max_rank + rank]
                wide[pair, j * width : (j + 1) * width] += factors[j][slot][expert] * (b @ a)
    result = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    gated_activation_torch(wide, *NO_LORA, kind, result)
    out.copy_(torch.where(topk_ids.view(-1, 1) >= 0, result.to(out.dtype), out))


moe_lora_gate_up = define_op(moe_lora_gate_up_triton, moe_lora_gate_up_torch, mutates=("out",))
