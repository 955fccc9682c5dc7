"""An adapter as read from its file: low-rank factors of true rank, on the host.

Knows neither file formats nor where on the device the factors will lie.
"""

from dataclasses import dataclass

import torch

from memory.lora_targets import EXPERT_TARGETS, Target


@dataclass(frozen=True)
class LoRAModule:
    """`W + scaling · b @ a` for one linear layer of the base model, or of one of its experts.

    A factor that several experts share is the same tensor object in each of their modules.
    """

    layer: int
    target: Target
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scaling: float
    expert: int | None = None  # for the experts' targets, and for no other

    def __post_init__(self) -> None:
        assert (self.expert is not None) == (self.target in EXPERT_TARGETS), self.target

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
        """PEFT's names of the modules touched, sorted: `("down_proj", "experts.up_proj")`."""
        return tuple(sorted({module.target.module_name for module in self.modules}))
