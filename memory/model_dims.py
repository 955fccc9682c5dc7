"""What the memory manager must know of a model: sizes, and nothing of how they are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memory.lora_targets import EXPERT_TARGETS, Target


@dataclass(frozen=True)
class MoEDims:
    """The sizes of a mixture of experts, and which layers have one."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of an expert
    shared_intermediate_size: int  # of the expert that every token passes; 0: there is none
    sparse_layers: tuple[bool, ...]  # per layer: experts, or a dense MLP


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
    @property
    def moe(self) -> MoEDims | None:
        """None for a dense model."""

    def layer_targets(self, layer: int) -> Sequence[Target]:
        """What an adapter may touch in `layer`."""

    def target_shape(self, target: Target) -> tuple[int, int]:
        """`(out, in)` of the linear layer that `target` names."""


def qkv_sizes(dims: ModelDims) -> list[int]:
    """Output widths of q, k and v, as they stand side by side in the stacked projection."""
    return [
        dims.num_q_heads * dims.head_dim,
        dims.num_kv_heads * dims.head_dim,
        dims.num_kv_heads * dims.head_dim,
    ]


def all_targets(dims: ModelDims) -> list[Target]:
    """What an adapter may touch in some layer."""
    return sorted(
        {target for layer in range(dims.num_layers) for target in dims.layer_targets(layer)}
    )


def num_modules(dims: ModelDims, layer: int, target: Target) -> int:
    """How many linear layers `target` names in `layer`: one, or one per expert, or none."""
    if target not in dims.layer_targets(layer):
        return 0
    return dims.moe.num_experts if dims.moe and target in EXPERT_TARGETS else 1


def adapter_bytes(dims: ModelDims, rank: int, dtype: torch.dtype, alignment: int = 1) -> int:
    """Bytes of an adapter of `rank` on everything it may touch, factors padded to `alignment`."""
    total = 0
    for target in all_targets(dims):
        sizes = [rank * width * dtype.itemsize for width in dims.target_shape(target)]
        one = sum(-(-size // alignment) * alignment for size in sizes)
        total += one * sum(num_modules(dims, layer, target) for layer in range(dims.num_layers))
    return total
