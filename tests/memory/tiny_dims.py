"""A model's sizes for memory tests, and random adapters that fit it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memory.adapter_weights import AdapterWeights, LoRAModule
from memory.lora_targets import ATTENTION_TARGETS, DENSE_TARGETS, EXPERT_TARGETS, Target
from memory.model_dims import MoEDims


@dataclass(frozen=True)
class TinyDims:
    """Grouped-query heads whose widths differ from the hidden size."""

    num_layers: int = 2
    hidden_size: int = 48
    intermediate_size: int = 86
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 515
    moe: MoEDims | None = None

    def layer_targets(self, layer: int) -> Sequence[Target]:
        if self.moe is None or not self.moe.sparse_layers[layer]:
            return DENSE_TARGETS
        return (*ATTENTION_TARGETS, Target.ROUTER, *EXPERT_TARGETS)

    def target_shape(self, target: Target) -> tuple[int, int]:
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            Target.Q_PROJ: (q, self.hidden_size),
            Target.K_PROJ: (kv, self.hidden_size),
            Target.V_PROJ: (kv, self.hidden_size),
            Target.O_PROJ: (self.hidden_size, q),
            Target.GATE_PROJ: (self.intermediate_size, self.hidden_size),
            Target.UP_PROJ: (self.intermediate_size, self.hidden_size),
            Target.DOWN_PROJ: (self.hidden_size, self.intermediate_size),
            **self._expert_shapes(),
        }[target]

    def _expert_shapes(self) -> dict[Target, tuple[int, int]]:
        if self.moe is None:
            return {}
        width = self.moe.intermediate_size
        return {
            Target.ROUTER: (self.moe.num_experts, self.hidden_size),
            Target.EXPERT_GATE_PROJ: (width, self.hidden_size),
            Target.EXPERT_UP_PROJ: (width, self.hidden_size),
            Target.EXPERT_DOWN_PROJ: (self.hidden_size, width),
        }


TINY_MOE = TinyDims(moe=MoEDims(5, 2, 24, 0, (True, False)))


def random_adapter(
    dims: TinyDims,
    rank: int,
    targets: Sequence[Target] = DENSE_TARGETS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: Sequence[int] = (0, 1),
) -> AdapterWeights:
    """`targets` of `layers` at `rank`; the scaling differs by module and is never 1."""
    generator = torch.Generator().manual_seed(seed)
    modules = []
    for layer in layers:
        for target in targets:
            if target not in dims.layer_targets(layer):
                continue
            out, width = dims.target_shape(target)
            in_experts = dims.moe is not None and target in EXPERT_TARGETS
            for expert in range(dims.moe.num_experts) if in_experts else [None]:
                a = torch.randn(rank, width, generator=generator).to(dtype)
                b = torch.randn(out, rank, generator=generator).to(dtype)
                scaling = 0.37 + layer + 0.01 * target + 0.001 * (expert or 0)
                modules.append(LoRAModule(layer, target, a, b, scaling, expert))
    return AdapterWeights(f"random-{rank}-{seed}", tuple(modules))
