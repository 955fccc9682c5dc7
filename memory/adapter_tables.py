"""Ranks, scalings and device addresses of every resident adapter, read by kernels as data.

The tables' own addresses never change, so captured graphs stay valid while adapters come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memory.lora_targets import Target
from memory.staging import StagingRing


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
    in stream order before the next replay; during capture all ranks are zero. A column goes to
    `staged` on the device in one upload from the ring `staging`, and from there into the tables:
    the host waits for no step that is under way.
    """

    a_ptrs: torch.Tensor
    b_ptrs: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor
    staged: torch.Tensor
    staging: StagingRing

    @property
    def max_loras(self) -> int:
        return self.lora_ranks.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tables by name."""
        names = ("a_ptrs", "b_ptrs", "lora_ranks", "scalings")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def allocate(cls, num_layers: int, max_loras: int, device: torch.device) -> "AdapterTables":
        shape = (num_layers, len(Target), max_loras)
        packed = 6 * num_layers * len(Target)  # int32: two addresses of two each, rank, scaling
        return cls(
            a_ptrs=torch.zeros(shape, dtype=torch.int64, device=device),
            b_ptrs=torch.zeros(shape, dtype=torch.int64, device=device),
            lora_ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            scalings=torch.zeros(shape, dtype=torch.float32, device=device),
            staged=torch.zeros(packed, dtype=torch.int32, device=device),
            # One step's admissions may fill every slot while the step before is under way.
            staging=StagingRing(packed, device, depth=max(2, max_loras)),
        )

    def write_slot(self, slot: int, entries: Sequence[TableEntry]) -> None:
        """Make column `slot` hold exactly `entries`; what it held before is gone.

        In the order of the current stream. The host waits only where `max_loras` columns were
        staged before and the first of them is still to be copied; an empty column stages nothing.
        """
        if not entries:
            for table in self.tensors().values():
                table[:, :, slot].zero_()
            return
        layers, targets, _ = self.lora_ranks.shape
        count = layers * targets
        self.staging.upload(_pack_column(entries, count, targets), self.staged)
        addresses, ranks, scalings = self.staged.split_with_sizes([4 * count, count, count])
        a_addresses, b_addresses = addresses.view(torch.int64).view(2, layers, targets)
        self.a_ptrs[:, :, slot].copy_(a_addresses)
        self.b_ptrs[:, :, slot].copy_(b_addresses)
        self.lora_ranks[:, :, slot].copy_(ranks.view(layers, targets))
        self.scalings[:, :, slot].copy_(scalings.view(torch.float32).view(layers, targets))


def _pack_column(entries: Sequence[TableEntry], count: int, targets: int) -> torch.Tensor:
    """int32 [6 count]: addresses of A then of B (int64 as two each), ranks, bits of scalings."""
    addresses, ranks, scalings = [0] * (2 * count), [0] * count, [0.0] * count
    for entry in entries:
        at = entry.layer * targets + entry.target
        addresses[at], addresses[count + at] = entry.a_address, entry.b_address
        ranks[at], scalings[at] = entry.rank, entry.scaling
    return torch.cat(
        [
            torch.tensor(addresses, dtype=torch.int64, device="cpu").view(torch.int32),
            torch.tensor(ranks, dtype=torch.int32, device="cpu"),
            torch.tensor(scalings, dtype=torch.float32, device="cpu").view(torch.int32),
        ]
    )
