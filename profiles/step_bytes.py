"""The bytes a decode step cannot avoid: weights once, adapters once each, the rows' KV.

Of a mixture of experts, the experts that some token chose count, and those adapters' factors on
an expert whose tokens chose it.
"""

from dataclasses import dataclass
from math import prod

from engine.architecture import Architecture
from memory.lora_targets import EXPERT_TARGETS, Target
from profiles.expert_hits import ExpertHits

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class StepBytes:
    """Bytes read (and, for KV, written) by one step."""

    weights: int
    adapters: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.kv


def step_bytes(
    architecture: Architecture,
    itemsize: int,
    batch_size: int,
    context: int,
    distinct_adapters: int,
    rank: int,
    hits: ExpertHits,
) -> StepBytes:
    """For `batch_size` rows with `context` tokens of KV each, over distinct adapters of `rank` on
    every linear layer but the router and the shared expert's gate.

    An untied embedding counts only the rows that are looked up; a tied one is read as the head.
    """
    a = architecture
    sizes = {
        name: prod(shape) for name, shape in a.parameter_shapes().items() if ".experts." not in name
    }
    if not a.tie_word_embeddings:
        sizes[EMBEDDING] = batch_size * a.hidden_size
    weights, adapters = sum(sizes.values()), 0
    for layer in range(a.num_layers):
        for target in adapted_targets(a, layer):
            if target not in EXPERT_TARGETS:
                adapters += distinct_adapters * rank * sum(a.target_shape(target))
    for target in EXPERT_TARGETS if a.moe else ():
        weights += sum(hits.experts) * prod(a.target_shape(target))
        adapters += sum(hits.adapter_pairs) * rank * sum(a.target_shape(target))
    kv_token = 2 * a.num_layers * a.num_kv_heads * a.head_dim
    return StepBytes(
        weights=weights * itemsize,
        adapters=adapters * itemsize,
        kv=batch_size * context * kv_token * itemsize,
    )


def adapted_targets(architecture: Architecture, layer: int) -> list[Target]:
    """What the benchmark's adapters touch in a layer: every linear layer but the router and the
    shared expert's gate, which few adapters train and the peers do not serve."""
    left_out = (Target.ROUTER, Target.SHARED_EXPERT_GATE)
    return [target for target in architecture.layer_targets(layer) if target not in left_out]
