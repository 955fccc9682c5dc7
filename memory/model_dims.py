"""What the memory manager must know of a model: sizes, and nothing of how they are used."""

from typing import Protocol

import torch

from memory.lora_targets import Target


class ModelDims(Protocol):
    """The sizes of a decoder; `engine.architecture.Architecture` has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def target_shape(self, target: Target) -> tuple[int, int]:
        """`(out, in)` of the linear layer that `target` names."""


def qkv_sizes(dims: ModelDims) -> list[int]:
    """Output widths of q, k and v, as they stand side by side in the stacked projection."""
    return [
        dims.num_q_heads * dims.head_dim,
        dims.num_kv_heads * dims.head_dim,
        dims.num_kv_heads * dims.head_dim,
    ]


def adapter_bytes(dims: ModelDims, rank: int, dtype: torch.dtype, targets: list[Target]) -> int:
    """Bytes of an adapter of `rank` on `targets` of every layer, without alignment."""
    widths = sum(sum(dims.target_shape(target)) for target in targets)
    return rank * widths * dims.num_layers * dtype.itemsize
