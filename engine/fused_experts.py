"""PEFT's LoRA on the experts' bare parameters (`target_parameters`), taken apart by expert.

All experts of a layer share two tensors: `A [E·r, in]` with the expert slowest and `B [out, r·E]`
with the expert fastest. Of two parameters, gate_up lies under `experts.base_layer` and down under
`experts`; one alone lies under `experts`. The shapes tell which is which.

Up to version 0.19.0 PEFT took a parameter `[E, out, in]` for `[E, in, out]`: there A is
`[E·r, out]` and B `[in, r·E]`, and the change of an expert's weight is `A^T B^T` where it is `B A`
from 0.19.1 on. Shapes tell these apart too, unless a projection is square.
"""

from dataclasses import dataclass

import torch

from memory.lora_targets import Target

PROJECTIONS = {
    "gate_up_proj": (Target.EXPERT_GATE_PROJ, Target.EXPERT_UP_PROJ),
    "down_proj": (Target.EXPERT_DOWN_PROJ,),
}


@dataclass(frozen=True)
class FusedProjection:
    """A parameter `[E, out, in]` of a layer's experts."""

    name: str  # "gate_up_proj" or "down_proj"
    num_experts: int
    out_features: int
    in_features: int

    def fits(self, a_width: int, b_height: int, swapped: bool) -> bool:
        out, width = self.out_features, self.in_features
        return (a_width, b_height) == ((out, width) if swapped else (width, out))

    def shapes(self, rank: int, swapped: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of A and of B."""
        rows = self.num_experts * rank
        if swapped:
            return (rows, self.out_features), (self.in_features, rows)
        return (rows, self.in_features), (self.out_features, rows)

    def split(
        self, a: torch.Tensor, b: torch.Tensor, swapped: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`A [E, r, in]` and `B [E, out, r]`, contiguous."""
        a = a.reshape(self.num_experts, -1, a.shape[1])
        b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        if swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        return a.contiguous(), b.contiguous()
