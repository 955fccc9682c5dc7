"""One mixture-of-experts layer of random weights, and steps of rows routed to so many experts."""

from dataclasses import dataclass

import torch

from kernels.moe_align import max_m_blocks, max_tokens_padded, moe_align_block_size

SortBuffers = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NO_SORT: SortBuffers = (None, None, None)


@dataclass(frozen=True)
class MoeShape:
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def active(self, rows: int) -> int:
        """How many experts a step of `rows` rows uses here.

        What independent choices of top_k experts a row give on average: 8, 51, 111 and 128 at 1,
        8, 32 and 128 rows for 8 of 128 experts; those four rounded as they are usually quoted.
        """
        usual = {1: 8, 8: 48, 32: 112, 128: 128}
        if (self.experts, self.top_k) == (128, 8) and rows in usual:
            return usual[rows]
        missed = (1 - self.top_k / self.experts) ** rows
        return max(self.top_k, round(self.experts * (1 - missed)))


@dataclass(frozen=True)
class MoeLayer:
    shape: MoeShape
    gate_up: torch.Tensor  # [E, 2I, H]
    down: torch.Tensor  # [E, H, I]

    @classmethod
    def random(cls, shape: MoeShape, device: torch.device) -> "MoeLayer":
        experts, hidden, intermediate = shape.experts, shape.hidden, shape.intermediate
        generator = torch.Generator(device).manual_seed(0)
        gate_up = torch.empty(
            experts, 2 * intermediate, hidden, dtype=torch.bfloat16, device=device
        )
        down = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16, device=device)
        gate_up.normal_(std=hidden**-0.5, generator=generator)
        down.normal_(std=intermediate**-0.5, generator=generator)
        return cls(shape, gate_up, down)

    def expert_bytes(self) -> int:
        """Gate, up and down of one expert."""
        return (self.gate_up[0].numel() + self.down[0].numel()) * self.down.element_size()


@dataclass(frozen=True)
class MoeStep:
    """One step's routing and activations; `sort` is what `moe_align_block_size` wrote."""

    ids: torch.Tensor  # int32[T, k]
    weights: torch.Tensor  # float32[T, k]
    sort: SortBuffers
    block_size_m: int
    x: torch.Tensor  # [T, H]
    gate_up: torch.Tensor  # [P, 2I]
    inner: torch.Tensor  # [P, I]
    down: torch.Tensor  # [P, H]
    out: torch.Tensor  # [T, H]


def routed_step(
    shape: MoeShape, rows: int, active: int, block_size_m: int, turn: int, device: torch.device
) -> MoeStep:
    """`rows` rows over exactly `active` experts, evenly; each `turn` takes the next experts."""
    num_pairs, experts = rows * shape.top_k, shape.experts
    assert shape.top_k <= active <= min(experts, num_pairs), (rows, active)
    pairs = torch.arange(num_pairs, dtype=torch.int32)
    chosen = pairs % active  # consecutive, so distinct within a row
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).int()
    ids = order[(chosen + turn * active) % experts].view(rows, shape.top_k).to(device)
    blocks = max_m_blocks(num_pairs, experts, block_size_m)
    padded = max_tokens_padded(num_pairs, experts, block_size_m)
    sizes = (padded, blocks, 1)
    sort = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
    moe_align_block_size(ids, experts, block_size_m, *sort)

    def buffer(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, device=device).bfloat16()

    return MoeStep(
        ids,
        torch.full((rows, shape.top_k), 1 / shape.top_k, device=device),
        (sort[0], sort[1], sort[2]),
        block_size_m,
        buffer(rows, shape.hidden),
        buffer(num_pairs, 2 * shape.intermediate),
        buffer(num_pairs, shape.intermediate),
        buffer(num_pairs, shape.hidden),
        buffer(rows, shape.hidden),
    )
