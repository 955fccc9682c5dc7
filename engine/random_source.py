"""Random weights of a given architecture, for benchmarks that need a size and no checkpoint.

Every tensor is drawn on the destination's device from a seed derived from its name, so a model is
the same whatever the order or the grouping of its copies (on one kind of device).
"""

from hashlib import blake2b

import torch

from engine.architecture import Architecture
from engine.weight_source import Part, check_destination


class RandomSource:
    """Weights and biases N(0, std); norms scale by one."""

    def __init__(self, architecture: Architecture, std: float = 0.02, seed: int = 0):
        self._shapes = architecture.parameter_shapes()
        self._names = frozenset(self._shapes)
        self._norm_weight = 1.0 - architecture.norm_weight_offset
        self._std = std
        self._seed = seed

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def origin(self, name: str) -> str:
        return f"random weights: {name}"

    def copy_into(self, name: str, dst: torch.Tensor, part: Part = ()) -> None:
        check_destination(self, name, dst, part)
        if name.endswith("norm.weight"):
            dst.fill_(self._norm_weight)
            return
        digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(dst.device).manual_seed(int.from_bytes(digest) >> 1)
        whole = torch.empty(self._shapes[name], dtype=dst.dtype, device=dst.device)
        dst.copy_(whole.normal_(0.0, self._std, generator=generator)[part])

    def close(self) -> None:
        pass
