"""The router of a mixture of experts: logits, softmax and the top k experts of every row.

Knows rows, experts and adapter slots, not what the experts compute.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.arrivals import check_arrivals
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_expand import add_expanded, rank_block
from kernels.lora_segments import weight_view, weights_at
from kernels.moe_route_parts import (
    expert_block,
    launch_moe_route_parts,
    route_arrivals,
    scratch_shape,
)
from kernels.moe_router_logits import add_product, find_adapters
from kernels.moe_top_k import MAX_EXPERTS, store_top_k, top_k_torch
from kernels.op import FLOATS, define_op

SPLIT_ROWS = 128
"""Up to so many rows several programs compute a row's logits."""


_ROW_INPUTS = ["row_mask", "row_adapter", "adapter_enabled"]
_TABLES = ["a_ptrs", "b_ptrs", "lora_ranks", "scalings"]
_OUTPUTS = ["topk_weights", "topk_ids"]


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=_ROW_INPUTS + _TABLES + _OUTPUTS,
)
def _moe_route_kernel(
    x,
    weight,
    row_mask,
    row_adapter,
    adapter_enabled,
    arena,
    a_ptrs,
    b_ptrs,
    lora_ranks,
    scalings,
    topk_weights,
    topk_ids,
    num_rows,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    TOP_K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LORA_BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    experts = tl.arange(0, BLOCK_E)
    exists = experts < NUM_EXPERTS
    w_rows = weight + experts * WEIGHT_STRIDE
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    written = rows < num_rows
    live = written
    if row_mask is not None:
        live = written & (tl.load(row_mask + rows, mask=written, other=0) != 0)
    x_rows = x + rows.to(tl.int64) * X_STRIDE
    logits = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if tl.max(live.to(tl.int32), axis=0) != 0:
        logits = add_product(x_rows, live, w_rows, exists, logits, 0, K, K, BLOCK_K)
    if row_adapter is not None:
        slots, _ = find_adapters(row_adapter, adapter_enabled, lora_ranks, rows, live, MAX_LORAS)
        current = tl.max(slots, axis=0)
        while current >= 0:  # each adapter of the tile once
            own = slots == current
            rank = tl.load(lora_ranks + current)
            a, b = weights_at(a_ptrs, current, arena), tl.load(b_ptrs + current)
            delta = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
            for first in range(0, rank, BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                a_rows, inside = a + r * K, r < rank
                shrunk = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                shrunk = add_product(x_rows, own, a_rows, inside, shrunk, 0, K, K, LORA_BLOCK_K)
                block = rank_block(b, arena, rank, experts, r, exists, VECTOR)
                delta = add_expanded(delta, shrunk, block)
            scaled = logits + tl.load(scalings + current) * delta
            logits = tl.where(own[:, None], scaled, logits)
            slots = tl.where(own, -1, slots)
            current = tl.max(slots, axis=0)
    store_top_k(
        logits,
        rows,
        written,
        live,
        topk_weights,
        topk_ids,
        TOP_K,
        BLOCK_TOP_K,
        NUM_EXPERTS,
        BLOCK_M,
        BLOCK_E,
        RENORMALIZE,
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora: tuple[torch.Tensor | None, ...],
    row_mask: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scratch: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`lora` goes from row_adapter to scalings."""
    (num_rows, in_features), num_experts = x.shape, weight.shape[0]
    top_k = topk_ids.shape[1]
    assert 1 <= num_experts <= MAX_EXPERTS, f"{num_experts} experts, not in 1..{MAX_EXPERTS}"
    assert 1 <= top_k <= num_experts, f"top {top_k} of {num_experts} experts"
    assert weight.shape == (num_experts, in_features), (
        f"weight is [E, {in_features}], not {tuple(weight.shape)}"
    )
    assert x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}"
    assert x.dtype in FLOATS, f"x is {x.dtype}, not one of {FLOATS}"
    assert x.stride(1) == weight.stride(1) == 1, "rows of x and weight are contiguous"
    given = [tensor is not None for tensor in lora]
    assert all(given) or not any(given), "an adapter's tables are given all or none"
    row_adapter, enabled, arena, a_ptrs, b_ptrs, lora_ranks, scalings = lora
    slots = (0 if enabled is None else enabled.shape[0],)
    assert arena is None or arena.dtype in FLOATS, f"arena is not one of {FLOATS}"
    for name, tensor, dtype, shape in (
        ("row_mask", row_mask, torch.int32, (num_rows,)),
        ("row_adapter", row_adapter, torch.int32, (num_rows,)),
        ("adapter_enabled", enabled, torch.int32, slots),
        ("a_ptrs", a_ptrs, torch.int64, slots),
        ("b_ptrs", b_ptrs, torch.int64, slots),
        ("lora_ranks", lora_ranks, torch.int32, slots),
        ("scalings", scalings, torch.float32, slots),
        ("topk_weights", topk_weights, torch.float32, (num_rows, top_k)),
        ("topk_ids", topk_ids, torch.int32, (num_rows, top_k)),
    ):
        if tensor is not None:
            assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
            assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
            assert tensor.is_contiguous(), f"{name} is not contiguous"
    if num_rows <= SPLIT_ROWS:
        parts = scratch_shape(num_rows, in_features, num_experts, x.element_size())
        assert scratch.dtype == torch.float32, f"scratch is {scratch.dtype}, not float32"
        assert scratch.numel() >= math.prod(parts), f"scratch holds less than {parts}"
        assert scratch.is_contiguous(), "scratch is not contiguous"
        check_arrivals(arrivals, route_arrivals(num_rows))


def moe_route_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_mask: torch.Tensor | None,
    row_adapter: torch.Tensor | None,
    adapter_enabled: torch.Tensor | None,
    arena: torch.Tensor | None,
    a_ptrs: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    renormalize: bool,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scratch: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """The k most probable experts of every row under softmax(x W^T + scaling * (x A^T) B^T).

    x [T, H], weight [E, H], of one dtype, any row strides. The second term is of row t's own
    adapter slot row_adapter int32[T]; slots outside [0, L) such as -1, those that adapter_enabled
    int32[L] holds 0 for and those of lora_ranks int32[L] 0 have none, and keep the bits of a call
    without tables. a_ptrs, b_ptrs int64[L] address A [rank, H] and B [E, rank] in `arena` as in
    `kernels.sgemm`, scalings float32[L]; these seven come all or none.

    Written in place: topk_ids int32[T, k] by falling logit, ties to the lower expert, and
    topk_weights float32[T, k], their probabilities over all E experts, or with `renormalize`
    divided by their sum, which is the softmax over the k logits alone. Rows that row_mask int32[T]
    (None: no such rows) holds 0 for get ids -1 and weights 0. A NaN logit counts as -inf in the
    order: ids are distinct and in range always, the row's weights NaN.

    Products in x's dtype, all sums in float32. One launch. Up to 128 rows, K is divided among
    programs (`moe_route_parts`), which write their parts to `scratch` float32, contiguous, of
    `scratch_shape` elements or more, and count themselves in `arrivals` int32, of
    `route_arrivals` or more, which must hold zeros and do so again afterwards. Above, both may be
    empty, and a program reads W once for 16 rows (up to 1024, and of float32 always) or 64. The
    tables and row_mask must be two launches old (see `dependent_launch`).
    A row's bits depend on its own values, its adapter and which of these T falls in. Raises
    AssertionError on other shapes, dtypes or strides.
    """
    tables = (row_adapter, adapter_enabled, arena, a_ptrs, b_ptrs, lora_ranks, scalings)
    _check(x, weight, tables, row_mask, topk_weights, topk_ids, scratch, arrivals)
    (num_rows, in_features), num_experts = x.shape, weight.shape[0]
    outputs = (topk_weights, topk_ids)
    if num_rows <= SPLIT_ROWS:
        parts = (scratch, arrivals)
        launch_moe_route_parts(x, weight, row_mask, tables, renormalize, *outputs, *parts)
        return
    exact = x.dtype == torch.float32  # on no tensor core: large tiles would only spill
    mixed = arena is not None and arena.dtype != x.dtype
    block_m, block_e = 16 if num_rows <= 1024 or exact else 64, expert_block(num_experts)
    # Stages of up to 32 KB of W: what one program has in flight decides how fast it streams.
    block_k = 256 if block_e <= 32 and block_m == 16 else min(128, 16384 // block_e)
    block_k = 32 if exact else block_k
    _moe_route_kernel[(triton.cdiv(num_rows, block_m),)](
        x,
        weight,
        row_mask,
        *tables,
        *outputs,
        num_rows,
        K=in_features,
        NUM_EXPERTS=num_experts,
        MAX_LORAS=0 if adapter_enabled is None else adapter_enabled.shape[0],
        TOP_K=topk_ids.shape[1],
        X_STRIDE=x.stride(0),
        WEIGHT_STRIDE=weight.stride(0),
        RENORMALIZE=renormalize,
        VECTOR=1 if arena is None else 16 // arena.element_size(),
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        BLOCK_K=block_k,
        LORA_BLOCK_K=32 if mixed else block_k,
        BLOCK_R=16,
        BLOCK_TOP_K=triton.next_power_of_2(topk_ids.shape[1]),
        num_warps=8 if block_m * block_e > 64 * 128 else 4,
        num_stages=4 if block_m == 16 else 3,
        **dependent_launch(x.device),
    )


def moe_route_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_mask: torch.Tensor | None,
    row_adapter: torch.Tensor | None,
    adapter_enabled: torch.Tensor | None,
    arena: torch.Tensor | None,
    a_ptrs: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    renormalize: bool,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scratch: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Torch twin of `moe_route_triton`."""
    tables = (row_adapter, adapter_enabled, arena, a_ptrs, b_ptrs, lora_ranks, scalings)
    _check(x, weight, tables, row_mask, topk_weights, topk_ids, scratch, arrivals)
    logits = x.float() @ weight.float().t()  # [T, E]
    if (
        row_adapter is not None
        and adapter_enabled is not None
        and arena is not None
        and a_ptrs is not None
        and b_ptrs is not None
        and lora_ranks is not None
        and scalings is not None
    ):
        for slot, rank in enumerate((lora_ranks * (adapter_enabled != 0)).tolist()):
            rows = torch.nonzero(row_adapter == slot).flatten()
            if rank and len(rows):
                a = weight_view(arena, int(a_ptrs[slot]), rank, x.shape[1])
                b = weight_view(arena, int(b_ptrs[slot]), weight.shape[0], rank)
                # Of all rows: a product's bits may depend on how many rows it has.
                delta = scalings[slot] * (x.float() @ a.t() @ b.t())
                logits[rows] += delta[rows]
    weights, ids = top_k_torch(logits, topk_ids.shape[1], renormalize)
    if row_mask is not None:
        masked = (row_mask == 0)[:, None]
        weights, ids = weights.masked_fill(masked, 0.0), ids.masked_fill(masked, -1)
    topk_weights.copy_(weights)
    topk_ids.copy_(ids)


moe_route = define_op(
    moe_route_triton,
    moe_route_torch,
    mutates=("topk_weights", "topk_ids", "scratch", "arrivals"),
)
