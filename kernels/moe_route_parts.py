"""The router for few rows: logits in parts of K, each a program's own, and the top k of their sum.

One multiprocessor alone reads the router's weight slowly, and one that holds a few experts reads
all of x for them. A program here takes 8 rows, all experts and a part of K: of x and of the
weight each part is read once for 8 rows, the weight's before the program waits for x, and experts
are the left operand of the product, so that 8 rows fill one on the tensor cores. Of a row's own
adapter it adds what B makes of that part of x A^T. The last program of the 8 rows to arrive adds
the parts up in their order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.arrivals import arrives_last, sum_at_once
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_segments import as_weights
from kernels.moe_router_logits import (
    add_block,
    add_product,
    expand_rows,
    find_adapters,
    load_columns,
    shrink_rows,
)
from kernels.moe_top_k import store_top_k

_BLOCK_M = 8  # rows of a program
_MOST_PARTS = 8
_BLOCK_R = 8  # more ranks take registers, and leave the next kernel no room to come up
_LEAST_PART_K = 32
_BLOCK_BYTES = 64 * 1024  # of the weight, on their way while the program waits for x
_LARGE_BLOCK = 32 * 1024  # from here on a program has eight warps


@dataclass(frozen=True)
class RouterParts:
    """How K is divided: `parts` programs take `part_k` columns each, `block_k` at a time."""

    parts: int
    part_k: int
    block_k: int
    num_warps: int

    @classmethod
    def of(cls, in_features: int, num_experts: int, element_size: int) -> "RouterParts":
        wanted = triton.next_power_of_2(triton.cdiv(in_features, _MOST_PARTS))
        part_k = max(_LEAST_PART_K, wanted)
        column = expert_block(num_experts) * element_size
        # float32 is multiplied on no tensor core, where large blocks would only spill.
        most = 32 if element_size == 4 else _BLOCK_BYTES // column
        block_k = min(part_k, most)
        num_warps = 8 if block_k * column >= _LARGE_BLOCK else 4
        return cls(triton.cdiv(in_features, part_k), part_k, block_k, num_warps)

    def lora_block_k(self, arena_element_size: int) -> int:
        """Of 8 rows' A at a time, 8 ranks of which are 32 registers a thread."""
        return min(self.part_k, 64 * self.num_warps // arena_element_size)


def expert_block(num_experts: int) -> int:
    return max(16, triton.next_power_of_2(num_experts))


def scratch_shape(
    num_rows: int, in_features: int, num_experts: int, element_size: int
) -> tuple[int, int, int]:
    """Of the parts of logits, float32: rows, parts, experts."""
    parts = RouterParts.of(in_features, num_experts, element_size).parts
    return num_rows, parts, _width(num_experts)


def route_arrivals(num_rows: int) -> int:
    """How many counters of arrivals a launch needs: one for the rows of a program."""
    return triton.cdiv(num_rows, _BLOCK_M)


def _width(num_experts: int) -> int:
    """Of a row's part, which starts on 16 bytes."""
    return triton.cdiv(num_experts, 4) * 4


_ROW_INPUTS = ["row_mask", "row_adapter", "adapter_enabled"]
_TABLES = ["a_ptrs", "b_ptrs", "lora_ranks", "scalings"]
_OUTPUTS = ["topk_weights", "topk_ids", "arrivals"]


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=_ROW_INPUTS + _TABLES + _OUTPUTS,
)
def _moe_route_parts_kernel(
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
    scratch,  # [T, PARTS, WIDTH]
    arrivals,
    num_rows,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_LORAS: tl.constexpr,
    TOP_K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTS: tl.constexpr,
    PART_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LORA_BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    first = part * PART_K
    experts = tl.arange(0, BLOCK_E)
    exists = experts < NUM_EXPERTS
    w_rows = weight + experts * WEIGHT_STRIDE
    # W, the mask and the tables are there already: asked for while the kernel before this ends.
    w_block = load_columns(w_rows, exists, first, PART_K, K, BLOCK_K)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    written = rows < num_rows
    live = written
    if row_mask is not None:
        live = written & (tl.load(row_mask + rows, mask=written, other=0) != 0)
    if row_adapter is not None:
        every = tl.arange(0, BLOCK_LORAS)
        enabled = tl.load(adapter_enabled + every, mask=every < MAX_LORAS, other=0)
        ranks = tl.load(lora_ranks + every, mask=every < MAX_LORAS, other=0)
    wait_for_inputs(PDL)
    x_rows = x + rows.to(tl.int64) * X_STRIDE
    logits = tl.zeros([BLOCK_E, BLOCK_M], tl.float32)
    logits = add_block(w_block, load_columns(x_rows, live, first, PART_K, K, BLOCK_K), logits)
    logits = add_product(w_rows, exists, x_rows, live, logits, first, PART_K, K, BLOCK_K, BLOCK_K)
    if row_adapter is not None:
        most_ranks = tl.max(tl.where(enabled != 0, ranks, 0), axis=0)
        if most_ranks > 0:  # few adapters are on a router: mostly no row looks up its own
            slot, rank = find_adapters(
                row_adapter, adapter_enabled, lora_ranks, rows, live, MAX_LORAS
            )
            a = as_weights(tl.load(a_ptrs + slot, mask=rank > 0, other=0), arena)
            b = as_weights(tl.load(b_ptrs + slot, mask=rank > 0, other=0), arena)
            scaling = tl.load(scalings + slot, mask=rank > 0, other=0.0)
            delta = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
            for first_rank in range(0, tl.max(rank, axis=0), BLOCK_R):
                r = first_rank + tl.arange(0, BLOCK_R)
                shrunk = shrink_rows(x_rows, a, rank, r, first, PART_K, K, LORA_BLOCK_K)
                delta += expand_rows(shrunk, b, rank, r, experts, exists, VECTOR)
            scaled = tl.trans(scaling[:, None] * delta)
            logits = tl.where((rank > 0)[None, :], logits + scaled, logits)
    own_scratch = scratch + rows * (PARTS * WIDTH)
    part_scratch = own_scratch[None, :] + part * WIDTH + experts[:, None]
    tl.store(part_scratch, logits, mask=exists[:, None] & written[None, :])
    if arrives_last(arrivals + tile, PARTS):
        places = own_scratch[:, None] + experts[None, :]
        total = sum_at_once(places, written[:, None] & exists[None, :], WIDTH, PARTS)
        store_top_k(
            total,
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


def launch_moe_route_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_mask: torch.Tensor | None,
    tables: tuple[torch.Tensor | None, ...],  # row_adapter to scalings
    renormalize: bool,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scratch: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """What `moe_route_triton` says, of arguments that it has checked."""
    (num_rows, in_features), num_experts = x.shape, weight.shape[0]
    way = RouterParts.of(in_features, num_experts, x.element_size())
    _, adapter_enabled, arena, *_ = tables
    max_loras = 0 if adapter_enabled is None else adapter_enabled.shape[0]
    _moe_route_parts_kernel[(route_arrivals(num_rows), way.parts)](
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
        MAX_LORAS=max_loras,
        BLOCK_LORAS=triton.next_power_of_2(max(max_loras, 1)),
        TOP_K=topk_ids.shape[1],
        X_STRIDE=x.stride(0),
        WEIGHT_STRIDE=weight.stride(0),
        RENORMALIZE=renormalize,
        VECTOR=1 if arena is None else 16 // arena.element_size(),
        PARTS=way.parts,
        PART_K=way.part_k,
        WIDTH=_width(num_experts),
        BLOCK_M=_BLOCK_M,
        BLOCK_E=expert_block(num_experts),
        BLOCK_K=way.block_k,
        LORA_BLOCK_K=way.lora_block_k(1 if arena is None else arena.element_size()),
        BLOCK_R=_BLOCK_R,
        BLOCK_TOP_K=triton.next_power_of_2(topk_ids.shape[1]),
        num_warps=way.num_warps,
        **dependent_launch(x.device),
    )
