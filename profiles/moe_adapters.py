"""Random expert adapters of one rank behind pointer tables, as the kernels find them."""

from dataclasses import dataclass

import torch

from profiles.moe_layer import MoeShape


@dataclass(frozen=True)
class ExpertTables:
    """What one side (gate and up, or down) takes; see `kernels.moe_lora_pairs`."""

    a_ptrs: torch.Tensor  # int64[stack, L, E]
    b_ptrs: torch.Tensor
    ranks: torch.Tensor  # int32
    scalings: torch.Tensor  # float32


@dataclass(frozen=True)
class ExpertAdapters:
    """Adapters 0 .. count - 1 in as many slots, on all three matrices of every expert."""

    arena: torch.Tensor
    gate_up: ExpertTables
    down: ExpertTables
    rank: int
    enabled: torch.Tensor  # int32[L]

    @classmethod
    def random(
        cls, shape: MoeShape, count: int, rank: int, device: torch.device
    ) -> "ExpertAdapters":
        modules = (count, shape.experts)
        sides = {
            "gate_up": (2, shape.hidden, shape.intermediate),
            "down": (1, shape.intermediate, shape.hidden),
        }
        size = sum(
            count * shape.experts * stack * rank * (inner + outer)
            for stack, inner, outer in sides.values()
        )
        arena = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        place, tables = arena.data_ptr(), {}
        for side, (stack, inner, outer) in sides.items():
            starts = []
            for width in (inner, outer):
                elements = stack * count * shape.experts * rank * width
                step = rank * width * arena.element_size()
                index = torch.arange(stack * count * shape.experts, dtype=torch.int64)
                starts.append((place + index * step).view(stack, *modules).to(device))
                place += elements * arena.element_size()
            tables[side] = ExpertTables(
                starts[0],
                starts[1],
                torch.full((stack, *modules), rank, dtype=torch.int32, device=device),
                torch.ones(stack, *modules, device=device),
            )
        enabled = torch.ones(count, dtype=torch.int32, device=device)
        return cls(arena, tables["gate_up"], tables["down"], rank, enabled)

    def pair_bytes(self, shape: MoeShape) -> dict[str, int]:
        """Bytes of A and of B that one pair reads, by side."""
        per_rank = self.rank * self.arena.element_size()
        return {
            "shrink_gate_up": 2 * shape.hidden * per_rank,
            "gate_up": 2 * shape.intermediate * per_rank,
            "shrink_down": shape.intermediate * per_rank,
            "down": shape.hidden * per_rank,
        }
