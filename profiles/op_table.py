"""What benchmarks say of an op: its kind, a name for people, and how its bytes are counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from profiles import expert_op_bytes, op_bytes

BASE, LORA, ATTENTION, POINTWISE = "base product", "LoRA", "attention", "pointwise"
SAMPLING, OTHER = "sampling", "other"
KINDS = (BASE, LORA, ATTENTION, POINTWISE, SAMPLING, OTHER)


@dataclass(frozen=True)
class Op:
    """`count` takes the op's arguments by name."""

    kind: str
    title: str
    count: Callable[..., int]


OPS = {
    "linear": Op(BASE, "product", op_bytes.linear),
    "linear_shrink": Op(BASE, "product, x Aᵀ", op_bytes.linear_shrink),
    "linear_shrink_parts": Op(BASE, "product, x Aᵀ", op_bytes.linear_shrink_parts),
    "moe_gemm": Op(BASE, "experts", expert_op_bytes.moe_gemm),
    "moe_gemm_shrink": Op(BASE, "experts, x Aᵀ", expert_op_bytes.moe_gemm_shrink),
    "lora_metadata": Op(LORA, "sort rows by adapter", op_bytes.lora_metadata),
    "sgemm_a": Op(LORA, "x Aᵀ", op_bytes.sgemm_a),
    "sgemm_b": Op(LORA, "+ (x Aᵀ) Bᵀ", op_bytes.sgemm_b),
    "add_expand": Op(LORA, "add, + (x Aᵀ) Bᵀ", op_bytes.add_expand),
    "moe_lora_align_block_size": Op(
        LORA, "sort pairs by adapter", expert_op_bytes.moe_lora_align_block_size
    ),
    "moe_lora_shrink": Op(LORA, "experts' x Aᵀ", expert_op_bytes.moe_lora_shrink),
    "moe_lora_shrink_grouped": Op(LORA, "experts' x Aᵀ", expert_op_bytes.moe_lora_shrink_grouped),
    "moe_lora_expand_grouped": Op(
        LORA, "experts' + (x Aᵀ) Bᵀ", expert_op_bytes.moe_lora_expand_grouped
    ),
    "moe_lora_gate_up": Op(
        LORA, "experts' + (x Aᵀ) Bᵀ, activation", expert_op_bytes.moe_lora_gate_up
    ),
    "moe_lora_down": Op(LORA, "experts' + (x Aᵀ) Bᵀ, sum", expert_op_bytes.moe_lora_down),
    "paged_attention": Op(ATTENTION, "attention", op_bytes.paged_attention),
    "extend_attention": Op(ATTENTION, "attention of a prompt", op_bytes.extend_attention),
    "gather_step_inputs": Op(POINTWISE, "gather inputs", op_bytes.gather_step_inputs),
    "embed": Op(POINTWISE, "embedding", op_bytes.embed),
    "rms_norm": Op(POINTWISE, "norm", op_bytes.rms_norm),
    "add_rms_norm": Op(POINTWISE, "add, norm", op_bytes.add_rms_norm),
    "rotary_kv_write": Op(POINTWISE, "rotary, write KV", op_bytes.rotary_kv_write),
    "gated_activation": Op(POINTWISE, "activation", op_bytes.gated_activation),
    "moe_route": Op(POINTWISE, "route", expert_op_bytes.moe_route),
    "moe_align_block_size": Op(
        POINTWISE, "sort pairs by expert", expert_op_bytes.moe_align_block_size
    ),
    "moe_combine": Op(POINTWISE, "sum of experts", expert_op_bytes.moe_combine),
    "sample": Op(SAMPLING, "sample", op_bytes.sample),
    "logprobs": Op(SAMPLING, "logprobs", op_bytes.logprobs),
}


def kind_of(name: str) -> str:
    return OPS[name].kind if name in OPS else OTHER


def title_of(name: str) -> str:
    return OPS[name].title if name in OPS else name


def bytes_of(namespace: str, name: str, arguments: Mapping[str, Any]) -> int | None:
    """Of one call; of an op of torch's own every tensor argument once; None: not in the table."""
    if namespace != "encore":
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        return op_bytes.size(*tensors)
    return OPS[name].count(**arguments) if name in OPS else None
