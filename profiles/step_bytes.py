"""The bytes a decode step cannot avoid: weights once, adapters once each, the rows' KV."""

from dataclasses import dataclass

from engine.architecture import Architecture
from engine.outputs import AdapterInfo

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
    adapters: list[AdapterInfo],
) -> StepBytes:
    """For `batch_size` rows with `context` tokens of KV each, over distinct `adapters`.

    An untied embedding counts only the rows that are looked up; a tied one is read as the head.
    """
    sizes = {}
    for name, shape in architecture.parameter_shapes().items():
        count = 1
        for extent in shape:
            count *= extent
        sizes[name] = count
    if not architecture.tie_word_embeddings:
        sizes[EMBEDDING] = batch_size * architecture.hidden_size
    kv_token = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    return StepBytes(
        weights=sum(sizes.values()) * itemsize,
        adapters=sum(adapter.bytes for adapter in adapters),
        kv=batch_size * context * kv_token * itemsize,
    )
