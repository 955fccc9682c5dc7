"""Ranks, scalings and device addresses of every resident adapter, read by kernels as data.

The tables' own addresses never change, so captured graphs stay valid while adapters come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memory.lora_targets import Target


@dataclass(frozen=True)
class TableEntry:
    """One module of an adapter as the kernels find it."""

    layer: int
    target: Target
    rank: int
    scaling: float
    a_address: int
    b_address: int


@dataclass(frozen=True)
class AdapterTables:
    """`a_ptrs`, `b_ptrs` int64 and `lora_ranks` int32, `scalings` float32, all
    [layers, targets, max_loras].

    A module that an adapter does not have is rank 0 with null addresses. Written at adapter load,
    in stream order before the next replay; during capture all ranks are zero.
    """

    a_ptrs: torch.Tensor
    b_ptrs: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor

    @property
    def max_loras(self) -> int:
        return self.lora_ranks.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    @classmethod
    def allocate(cls, num_layers: int, max_loras: int, device: torch.device) -> "AdapterTables":
        shape = (num_layers, len(Target), max_loras)
        return cls(
            a_ptrs=torch.zeros(shape, dtype=torch.int64, device=device),
            b_ptrs=torch.zeros(shape, dtype=torch.int64, device=device),
            lora_ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            scalings=torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def write_slot(self, slot: int, entries: Sequence[TableEntry]) -> None:
        """Make column `slot` hold exactly `entries`; what it held before is gone."""
        layers, targets, _ = self.lora_ranks.shape
        addresses = torch.zeros(2, layers, targets, dtype=torch.int64)
        ranks = torch.zeros(layers, targets, dtype=torch.int32)
        scalings = torch.zeros(layers, targets)
        for entry in entries:
            at = (entry.layer, int(entry.target))
            addresses[0][at], addresses[1][at] = entry.a_address, entry.b_address
            ranks[at], scalings[at] = entry.rank, entry.scaling
        device = self.lora_ranks.device
        addresses_device = addresses.to(device)
        self.a_ptrs[:, :, slot].copy_(addresses_device[0])
        self.b_ptrs[:, :, slot].copy_(addresses_device[1])
        self.lora_ranks[:, :, slot].copy_(ranks.to(device))
        self.scalings[:, :, slot].copy_(scalings.to(device))
