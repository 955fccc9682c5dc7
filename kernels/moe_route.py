"""The router of a mixture of experts: logits, softmax and the top k experts of every row.

Knows rows, experts and adapter slots, not what the experts compute.
"""

import torch
import triton
import triton.language as tl

from kernels.arrivals import arrives_last
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import weight_view, weights_at
from kernels.moe_router_logits import add_product, load_weights, multiply_rows, router_delta
from kernels.moe_top_k import MAX_EXPERTS, store_top_k, top_k_torch
from kernels.op import FLOATS, define_op

SPLIT_ROWS = 128  # up to here an expert's logits are a program's of their own
_TOP_K_ROWS = tl.constexpr(4)  # a warp each, where a program has four


@triton.jit
def _store_top_k_of(
    scratch,
    row_mask,
    topk_weights,
    topk_ids,
    num_rows,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """The top k of this program's rows, from logits that several programs wrote."""
    experts = tl.arange(0, BLOCK_E)
    tile = tl.arange(0, _TOP_K_ROWS)
    rows = tl.program_id(0) * ROWS + tile
    written = (tile < ROWS) & (rows < num_rows)
    live = written
    if row_mask is not None:
        live = written & (tl.load(row_mask + rows, mask=written, other=0) != 0)
    places = rows[:, None] * NUM_EXPERTS + experts[None, :]
    mask = written[:, None] & (experts < NUM_EXPERTS)[None, :]
    store_top_k(
        tl.load(scratch + places, mask=mask, other=0.0, cache_modifier=".cg"),
        rows,
        written,
        live,
        topk_weights,
        topk_ids,
        TOP_K,
        BLOCK_TOP_K,
        NUM_EXPERTS,
        _TOP_K_ROWS,
        BLOCK_E,
        RENORMALIZE,
    )


_ROW_INPUTS = ["row_mask", "row_adapter", "adapter_enabled"]
_TABLES = ["a_ptrs", "b_ptrs", "lora_ranks", "scalings"]
_OUTPUTS = ["topk_weights", "topk_ids", "arrivals"]


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
    scratch,
    arrivals,
    num_rows,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    TOP_K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILES_E: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LORA_BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    w_rows = weight + experts * WEIGHT_STRIDE
    if BY_ROW:  # W is the same in every step, and on its way while the kernel before this ends
        w_block = load_weights(w_rows, experts < NUM_EXPERTS, 0, K, BLOCK_K)
    wait_for_inputs(PDL)
    tile = tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) * ROWS + tile
    written = (tile < ROWS) & (rows < num_rows)
    live = written
    if row_mask is not None:
        live = written & (tl.load(row_mask + rows, mask=written, other=0) != 0)
    x_rows = x + rows.to(tl.int64) * X_STRIDE
    logits = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if BY_ROW:
        own_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        own_x = x + own_rows.to(tl.int64) * X_STRIDE
        sums = multiply_rows(own_x, own_rows < num_rows, w_block, 0, K, BLOCK_K)
        for start in range(BLOCK_K, K, BLOCK_K):
            w_block = load_weights(w_rows, experts < NUM_EXPERTS, start, K, BLOCK_K)
            sums += multiply_rows(own_x, own_rows < num_rows, w_block, start, K, BLOCK_K)
        for row in tl.static_range(ROWS):
            one = tl.sum(tl.where((tl.arange(0, ROWS) == row)[:, None], sums, 0.0), axis=0)
            logits = tl.where((tile == row)[:, None], one[None, :], logits)
    elif tl.max(live.to(tl.int32), axis=0) != 0:
        logits = add_product(x_rows, live, w_rows, experts < NUM_EXPERTS, logits, K, BLOCK_K)
    if row_adapter is not None:
        slot = tl.load(row_adapter + rows, mask=live, other=-1)
        known = (slot >= 0) & (slot < MAX_LORAS)
        known &= tl.load(adapter_enabled + slot, mask=known, other=0) != 0
        rank = tl.load(lora_ranks + slot, mask=known, other=0)
        slot = tl.where(rank > 0, slot, -1)
        current = tl.max(slot, axis=0)
        while current >= 0:  # each adapter of the tile once
            own = slot == current
            delta = router_delta(
                x_rows,
                own,
                arena,
                weights_at(a_ptrs, current, arena),
                weights_at(b_ptrs, current, arena),
                tl.load(lora_ranks + current),
                experts,
                K,
                NUM_EXPERTS,
                VECTOR,
                BLOCK_M,
                BLOCK_E,
                LORA_BLOCK_K,
                BLOCK_R,
            )
            scaled = logits + tl.load(scalings + current) * delta
            logits = tl.where(own[:, None], scaled, logits)
            slot = tl.where(own, -1, slot)
            current = tl.max(slot, axis=0)
    if TILES_E == 1:
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
        return
    places = rows[:, None] * NUM_EXPERTS + experts[None, :]
    tl.store(scratch + places, logits, mask=written[:, None] & (experts < NUM_EXPERTS)[None, :])
    if arrives_last(arrivals + tl.program_id(0), TILES_E):
        _store_top_k_of(
            scratch,
            row_mask,
            topk_weights,
            topk_ids,
            num_rows,
            TOP_K,
            BLOCK_TOP_K,
            NUM_EXPERTS,
            ROWS,
            BLOCK_ALL,
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
        ("scratch", scratch, torch.float32, (num_rows, num_experts)),
        ("arrivals", arrivals, torch.int32, (num_rows,)),
    ):
        if tensor is not None:
            assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
            assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
            assert tensor.is_contiguous(), f"{name} is not contiguous"


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

    Products in x's dtype, all sums in float32. One launch. Up to 128 rows, 4 rows (2 where there
    are 16 or fewer) are spread over programs of 8 experts each, since one multiprocessor alone
    reads W slowly, and each has its part of W under way before it waits for x. They write their
    logits to `scratch` float32[T, E] and count themselves in `arrivals` int32[T], which must hold
    zeros and does so again afterwards; the last one to arrive takes the top k, whichever it is,
    of the same logits. Above, a program reads W once for 16 rows (T <= 1024, and float32) or 64.
    A row's bits depend on its own values, its adapter and which of these T falls in. Raises
    AssertionError on other shapes, dtypes or strides.
    """
    tables = (row_adapter, adapter_enabled, arena, a_ptrs, b_ptrs, lora_ranks, scalings)
    _check(x, weight, tables, row_mask, topk_weights, topk_ids, scratch, arrivals)
    (num_rows, in_features), num_experts = x.shape, weight.shape[0]
    exact = x.dtype == torch.float32  # on no tensor core: large tiles would only spill
    block_m = 16 if num_rows <= 1024 or exact else 64
    by_row = num_rows <= SPLIT_ROWS
    rows = block_m if not by_row else 4 if num_rows > 16 else 2
    block_all = max(16, triton.next_power_of_2(num_experts))
    block_e = 8 if by_row else block_all
    # Stages of up to 32 KB of W: what one program has in flight decides how fast it streams.
    tile_k = 256 if block_e <= 32 and block_m == 16 else min(128, 16384 // block_e)
    tile_k = 32 if exact else tile_k
    block_k = min(triton.next_power_of_2(in_features), 1024 if exact else 2048)
    mixed = arena is not None and arena.dtype != x.dtype
    tiles_e = triton.cdiv(num_experts, block_e)
    _moe_route_kernel[(triton.cdiv(num_rows, rows), tiles_e)](
        x,
        weight,
        row_mask,
        *tables,
        topk_weights,
        topk_ids,
        scratch,
        arrivals,
        num_rows,
        K=in_features,
        NUM_EXPERTS=num_experts,
        MAX_LORAS=0 if adapter_enabled is None else adapter_enabled.shape[0],
        TOP_K=topk_ids.shape[1],
        X_STRIDE=x.stride(0),
        WEIGHT_STRIDE=weight.stride(0),
        RENORMALIZE=renormalize,
        VECTOR=1 if arena is None else 16 // arena.element_size(),
        BY_ROW=by_row,
        ROWS=rows,
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        TILES_E=tiles_e,
        BLOCK_ALL=block_all,
        BLOCK_K=block_k if by_row else tile_k,
        LORA_BLOCK_K=32 if mixed else tile_k,
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
