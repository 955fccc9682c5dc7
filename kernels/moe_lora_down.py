"""Expert LoRA of few rows, second half of down: B a added to each pair, then the weighted sum.

The delta never exists in memory: it is one more term of the sum that `moe_combine` takes anyway.
A program holds some columns of one row. With few rows it reads the B of all the row's pairs at
once, so that the time of a row is that of one pair; with many, one pair's after the other's.
`moe_lora_pairs` says where things lie.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import weight_view
from kernels.moe_combine import add_pair, add_shared, moe_combine_torch
from kernels.moe_lora_down_delta import (
    delta_by_pair,
    delta_of_pairs,
    delta_of_shared,
    first_of_pairs,
    sums_of_pairs,
)
from kernels.moe_lora_pairs import (
    PAIR_TABLES,
    check_pairs,
    check_rows,
    columns_a_program,
    walk_pairs,
)
from kernels.op import define_op

MANY_ROWS = 64  # above, programs fill each other's waits, and registers are what is short


@triton.jit(do_not_specialize_on_alignment=PAIR_TABLES)
def _moe_lora_down_kernel(
    down,
    shrunk,
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    outer_ptrs,
    outer_ranks,
    row_adapter,
    adapter_enabled,
    topk_ids,
    topk_weights,
    shared,
    shared_gate,
    out,
    shared_stride,
    gate_stride,
    HIDDEN: tl.constexpr,
    DOWN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    VECTOR: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    slot = tl.load(row_adapter + row)
    known = (slot >= 0) & (slot < MAX_LORAS)
    j = tl.arange(0, BLOCK_P)
    pairs = row * TOP_K + j
    # The router's ids and weights are as old as the tables: the products lie between.
    experts = tl.load(topk_ids + pairs, mask=j < TOP_K, other=-1)  # [BLOCK_P]
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    served = tl.where(known, NUM_EXPERTS, 0)  # newer interpreters mask with tiles of bools alone
    chosen = (experts >= 0) & (experts < served)
    entries = slot * NUM_EXPERTS + experts
    # All that a program may need of the tables in one wait, not one wait each.
    ranks = tl.load(lora_ranks + entries, mask=chosen, other=0)
    addresses = tl.load(b_ptrs + entries, mask=chosen, other=0)
    factors = tl.load(scalings + entries, mask=chosen, other=0.0)
    factors *= tl.load(topk_weights + pairs, mask=chosen, other=0.0)
    ranks = tl.where(enabled != 0, ranks, 0)
    own_ranks = ranks  # of the pairs that have a B of their own
    if outer_ranks is not None:
        outer_rank = tl.load(outer_ranks + slot, mask=known, other=0)
        outer_address = tl.load(outer_ptrs + slot, mask=known, other=0)
        own_ranks = tl.where(outer_rank > 0, 0, ranks)
    else:
        outer_rank, outer_address = 0, tl.full([], 0, tl.int64)
    if not BY_PAIR:
        first = first_of_pairs(addresses, arena, own_ranks, n, inside, VECTOR, BLOCK_R)
    wait_for_inputs(PDL)
    if not BY_PAIR:
        sums = sums_of_pairs(shrunk, pairs, own_ranks, factors, SHRUNK_STRIDE, VECTOR, BLOCK_R)
    total = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = row * TOP_K + i
        expert = tl.load(topk_ids + pair)
        weight = tl.load(topk_weights + pair)
        source = down + pair * DOWN_STRIDE + n
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        total = add_pair(total, expert, weight, value)  # skips pairs without an expert
    if tl.max(ranks) > 0:
        if outer_rank > 0:
            total += delta_of_shared(
                shrunk,
                pairs,
                ranks,
                factors,
                outer_address,
                arena,
                outer_rank,
                n,
                inside,
                SHRUNK_STRIDE,
                VECTOR,
                BLOCK_N,
                BLOCK_R,
            )
        elif BY_PAIR:
            total += delta_by_pair(
                shrunk,
                row * TOP_K,
                j,
                ranks,
                factors,
                addresses,
                arena,
                n,
                inside,
                SHRUNK_STRIDE,
                TOP_K,
                VECTOR,
                BLOCK_N,
                BLOCK_R,
            )
        else:
            total += delta_of_pairs(
                first,
                sums,
                shrunk,
                pairs,
                own_ranks,
                factors,
                addresses,
                arena,
                n,
                inside,
                SHRUNK_STRIDE,
                VECTOR,
                BLOCK_R,
            )
    total = add_shared(total, shared, shared_stride, shared_gate, gate_stride, row, n, inside)
    tl.store(out + row * OUT_STRIDE + n, total.to(out.dtype.element_ty), mask=inside)


def _check(
    down: torch.Tensor,
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    max_rank: int,
    out: torch.Tensor,
) -> None:
    check_pairs(
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        max_rank,
        shrunk,
    )
    assert shrunk.dim() == 2, f"shrunk has {shrunk.dim()} dims, not 2: pairs, ranks"
    assert b_ptrs.shape[0] == 1, f"{b_ptrs.shape[0]} slices, not down alone"
    assert (outer_ptrs is None) == (outer_ranks is None), "outer_ptrs and outer_ranks go together"
    assert shared is not None or shared_gate is None, "shared_gate without shared"
    num_tokens, hidden = out.shape
    assert num_tokens == len(topk_ids), f"out has {num_tokens} rows, topk_ids {len(topk_ids)}"
    check_rows("out", out, (num_tokens, hidden))
    check_rows("down", down, (topk_ids.numel(), hidden))
    if shared is not None:
        check_rows("shared", shared, (num_tokens, hidden))
    if shared_gate is not None:
        check_rows("shared_gate", shared_gate, (num_tokens, 1))
    assert topk_weights.dtype == torch.float32, f"topk_weights is {topk_weights.dtype}, not float32"
    assert topk_weights.shape == topk_ids.shape, (
        f"topk_weights has shape {tuple(topk_weights.shape)}, not {tuple(topk_ids.shape)}"
    )
    assert topk_weights.is_contiguous(), "topk_weights is not contiguous"


def moe_lora_down_triton(
    down: torch.Tensor,
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    max_rank: int,
    out: torch.Tensor,
) -> None:
    """out[t] = sum_j w_j (down[t k + j] + s_j B_j a_j) (+ shared[t] * sigmoid(shared_gate[t])).

    down [P, H], topk_weights w float32[T, k], shared [T, H] and shared_gate [T, 1] or None as in
    `moe_combine`, whose bits rows without a delta get; out [T, H] (written). a_j is that
    of shrunk [P, max_rank]. Pairs of id -1 are skipped and may hold NaN. Summed in float32: the
    base's terms in the order of j, then the deltas', then the shared part, rounded once. Where
    outer_ranks is not 0, B is read once a row, for the sum of w_j s_j a_j over the pairs whose
    expert the slot has. Moves (P + T) * H elements, and rank * H of B for every pair with a rank.
    Raises AssertionError on other shapes, dtypes or strides.
    """
    _check(
        down,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        topk_weights,
        shared,
        shared_gate,
        max_rank,
        out,
    )
    (num_tokens, hidden), (_, max_loras, num_experts) = out.shape, b_ptrs.shape
    top_k = topk_ids.shape[1]
    block_p = triton.next_power_of_2(top_k)
    ranks = max(4, triton.next_power_of_2(max_rank))
    block_r, vector = min(16, ranks), 16 // arena.element_size()
    by_pair = num_tokens > MANY_ROWS
    if by_pair:
        block_n = min(256, max(16, triton.next_power_of_2(hidden)))
        block_r = min(2 * vector, ranks)
    else:
        block_n = columns_a_program(num_tokens, hidden, 16, max(16, min(128, 512 // block_p)))
    _moe_lora_down_kernel[(num_tokens, triton.cdiv(hidden, block_n))](
        down,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        topk_weights,
        shared,
        shared_gate,
        out,
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        HIDDEN=hidden,
        DOWN_STRIDE=down.stride(0),
        OUT_STRIDE=out.stride(0),
        SHRUNK_STRIDE=shrunk.stride(0),
        MAX_LORAS=max_loras,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        VECTOR=vector,
        BY_PAIR=by_pair,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=2 if by_pair else 4,
        maxnreg=128,  # for the odd ranks' sake it would take more
        **dependent_launch(down.device),
    )


def moe_lora_down_torch(
    down: torch.Tensor,
    shrunk: torch.Tensor,
    arena: torch.Tensor,
    b_ptrs: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    max_rank: int,
    out: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_down_triton`; a shared B is read through the table of each pair."""
    _check(
        down,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        outer_ptrs,
        outer_ranks,
        row_adapter,
        adapter_enabled,
        topk_ids,
        topk_weights,
        shared,
        shared_gate,
        max_rank,
        out,
    )
    top_k, hidden = topk_ids.shape[1], out.shape[1]
    addresses, ranks, factors = b_ptrs[0].tolist(), lora_ranks[0].tolist(), scalings[0].tolist()
    weights = topk_weights.flatten().tolist()
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    moe_combine_torch(down, topk_ids, topk_weights, None, None, total)
    for pair, slot, expert in walk_pairs(row_adapter, adapter_enabled, topk_ids):
        rank = ranks[slot][expert] if expert >= 0 else 0
        if rank:
            b = weight_view(arena, addresses[slot][expert], hidden, rank)  # [H, rank]
            factor = weights[pair] * factors[slot][expert]
            total[pair // top_k] += factor * (b @ shrunk[pair, :rank])
    if shared is not None:
        part = shared.float()
        total += part if shared_gate is None else part * torch.sigmoid(shared_gate.float())
    out.copy_(total)


moe_lora_down = define_op(moe_lora_down_triton, moe_lora_down_torch, mutates=("out",))
