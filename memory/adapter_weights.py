"""An adapter as read from its file: low-rank factors of true rank, on the host.

Knows neither file formats nor where on the device the factors will lie.
"""

from dataclasses import dataclass

import torch

from memory.lora_targets import Target


@dataclass(frozen=True)
class LoRAModule:
    """`W + scaling · b @ a` for one linear layer of the base model."""

    layer: int
    target: Target
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterWeights:
    """All modules of one adapter; `path` is where they were read, for messages."""

    path: str
    modules: tuple[LoRAModule, ...]

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(module.rank for module in self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """PEFT's names of the modules touched, sorted: `("down_proj", "q_proj")`."""
        return tuple(sorted({module.target.name.lower() for module in self.modules}))
