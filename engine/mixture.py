"""A layer's mixture of experts: route, gate/up, activation, down, weighted sum.

An adapter's gate/up delta lands before the activation, its down delta before the sum. How pairs
are taken is chosen by the step's shape alone, so that a graph holds one way.
"""

import torch

from engine.architecture import Architecture
from engine.decoder_weights import DenseMLP, Projection, SparseMLP
from engine.expert_delta import NO_ROUTER_TABLES, ExpertDelta, Sort
from engine.lora_delta import LoRADelta, project
from kernels.activation import gated_activation
from kernels.lora_arguments import NO_LORA
from kernels.moe_align import moe_align_block_size
from kernels.moe_combine import moe_combine
from kernels.moe_gemm import moe_gemm
from kernels.moe_gemm_config import UNSORTED_PAIRS
from kernels.moe_route import moe_route
from memory.lora_targets import Target
from memory.moe_workspace import MoEWorkspace, SharedExpertWorkspace
from memory.workspace import Workspace


def run_mixture(
    index: int,
    weights: SparseMLP,
    architecture: Architecture,
    row_mask: torch.Tensor | None,
    lora: LoRADelta | None,
    ws: Workspace,
) -> None:
    """`ws.delta` [T, H] = the experts' output for `ws.hidden` [T, H], in layer `index`.

    Rows where `row_mask` int32 [T] is 0 take no expert and yield zeros.
    """
    moe = ws.moe
    assert moe is not None
    assert architecture.moe is not None
    kind, top_k = architecture.activation, architecture.moe.top_k
    delta = lora and ExpertDelta(lora, index, moe, top_k)
    tables = delta.router_tables() if delta else NO_ROUTER_TABLES
    moe_route(
        ws.hidden,
        weights.router,
        row_mask,
        *tables,
        architecture.renormalize_routing,
        moe.topk_weights,
        moe.topk_ids,
        moe.router_scratch,
        moe.router_arrivals,
    )
    shared: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if moe.shared is not None:
        assert weights.shared is not None
        assert weights.shared_gate is not None
        _run_shared(index, weights.shared, weights.shared_gate, kind, lora, ws.hidden, moe.shared)
        shared = (moe.shared.down, moe.shared.gate)
    if delta:
        delta.begin_gate_up(ws.hidden, weights.gate_up)
    sort = _sort_pairs(moe, architecture.moe.num_experts)
    if delta:
        delta.multiply_gate_up(ws.hidden, weights.gate_up, sort)
        delta.add_gate_up(kind)
        delta.multiply_down(weights.down, sort)
        delta.add_down_and_combine(*shared, ws.delta)
        return
    block = moe.block_size_m
    moe_gemm(ws.hidden, weights.gate_up, moe.topk_ids, *sort, block, top_k, moe.gate_up)
    gated_activation(moe.gate_up, *NO_LORA, kind, moe.activated)
    moe_gemm(moe.activated, weights.down, moe.topk_ids, *sort, block, 1, moe.down)
    moe_combine(moe.down, moe.topk_ids, moe.topk_weights, *shared, ws.delta)


def _sort_pairs(moe: MoEWorkspace, num_experts: int) -> Sort:
    """The pairs sorted by expert, or nothing where there are so few that they need no sorting."""
    if moe.topk_ids.numel() <= UNSORTED_PAIRS:
        return None, None, None
    sort = (moe.sorted_token_ids, moe.expert_ids, moe.num_tokens_post_padded)
    moe_align_block_size(moe.topk_ids, num_experts, moe.block_size_m, *sort)
    return sort


def _run_shared(
    index: int,
    mlp: DenseMLP,
    gate: Projection,
    kind: str,
    lora: LoRADelta | None,
    hidden: torch.Tensor,
    ws: SharedExpertWorkspace,
) -> None:
    delta = project(
        hidden, mlp.gate_up, index, Target.SHARED_GATE_PROJ, lora, ws.gate_up, fold=True
    )
    gated_activation(ws.gate_up, *delta, kind, ws.activated)
    project(ws.activated, mlp.down, index, Target.SHARED_DOWN_PROJ, lora, ws.down)
    project(hidden, gate, index, Target.SHARED_EXPERT_GATE, lora, ws.gate)
