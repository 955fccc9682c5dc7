"""Ranks, scalings and device addresses of every resident adapter, read by kernels as data.

The tables' own addresses never change, so captured graphs stay valid while adapters come and go.
"""

from dataclasses import dataclass

import torch

from memory.lora_targets import EXPERT_TARGETS, NUM_LINEAR_TARGETS
from memory.staging import StagingRing

RING_INTS = 2**24  # pinned int32 for columns on their way, 64 MiB


@dataclass(frozen=True)
class SlotEntries:
    """The n modules of one adapter, and where they lie; 1-D CPU tensors of n entries.

    int64: `layers`, `targets`, `experts` (-1 where the target is not one of the experts'), and
    the device addresses `a_ptrs`, `b_ptrs`; int32 `lora_ranks`, float32 `scalings`. The factor
    that all experts of a layer share (A of gate and up, B of down) is once more in `outer_layers`,
    `outer_targets`, `outer_ptrs` int64 and `outer_ranks` int32, of m entries.
    """

    layers: torch.Tensor
    targets: torch.Tensor
    experts: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor
    a_ptrs: torch.Tensor
    b_ptrs: torch.Tensor
    outer_layers: torch.Tensor
    outer_targets: torch.Tensor
    outer_ranks: torch.Tensor
    outer_ptrs: torch.Tensor


@dataclass(frozen=True)
class LinearTables:
    """`a_ptrs`, `b_ptrs` int64, `lora_ranks` int32 and `scalings` float32, by layer, target and
    slot: [layers, targets, max_loras], or [layers, 3, max_loras, experts] for gate, up and down
    of the experts. A module that an adapter does not have is rank 0 with null addresses."""

    a_ptrs: torch.Tensor
    b_ptrs: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor

    def at(self, layer: int, targets: int | slice) -> "LinearTables":
        """Views of one layer's, of one target or of those stacked in a projection."""
        place = (layer, targets)
        return LinearTables(
            self.a_ptrs[place], self.b_ptrs[place], self.lora_ranks[place], self.scalings[place]
        )

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device) -> "LinearTables":
        return cls(
            a_ptrs=torch.zeros(shape, dtype=torch.int64, device=device),
            b_ptrs=torch.zeros(shape, dtype=torch.int64, device=device),
            lora_ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            scalings=torch.zeros(shape, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class ExpertTables:
    """`linear` with a column per expert, and `outer_ptrs` int64, `outer_ranks` int32
    [layers, 3, max_loras]: the factor that a slot's adapter shares over all experts of a layer (A
    of gate and of up, B of down); rank 0 where it shares none. A shared factor's address also
    stands in `linear` for every expert that the adapter has."""

    linear: LinearTables
    outer_ptrs: torch.Tensor
    outer_ranks: torch.Tensor


@dataclass(frozen=True)
class AdapterTables:
    """`linear` [layers, targets, max_loras], and `experts` of a mixture.

    Written at adapter load, in stream order before the next replay; during capture all ranks are
    zero. A slot's column goes to `staged` on the device in one upload from the ring `staging`, and
    from there into the tables: the host waits for no step that is under way.
    """

    linear: LinearTables
    experts: ExpertTables | None
    staged: torch.Tensor
    staging: StagingRing

    @property
    def max_loras(self) -> int:
        return self.linear.lora_ranks.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tables by name, addresses first; `[:, :, slot]` of each belongs to a slot."""
        named: dict[str, torch.Tensor] = dict(vars(self.linear))
        if self.experts is not None:
            named |= {f"expert_{name}": t for name, t in vars(self.experts.linear).items()}
            named["outer_ptrs"] = self.experts.outer_ptrs
            named["outer_ranks"] = self.experts.outer_ranks
        return dict(sorted(named.items(), key=lambda item: -item[1].element_size()))

    @classmethod
    def allocate(
        cls, num_layers: int, num_experts: int, max_loras: int, device: torch.device
    ) -> "AdapterTables":
        """Tables of zeros; `num_experts` is 0 for a dense model."""
        linear = LinearTables.allocate((num_layers, NUM_LINEAR_TARGETS, max_loras), device)
        experts = None
        column = column_ints(num_layers, num_experts)
        if num_experts:
            outer = (num_layers, len(EXPERT_TARGETS), max_loras)
            experts = ExpertTables(
                linear=LinearTables.allocate((*outer, num_experts), device),
                outer_ptrs=torch.zeros(outer, dtype=torch.int64, device=device),
                outer_ranks=torch.zeros(outer, dtype=torch.int32, device=device),
            )
        return cls(
            linear=linear,
            experts=experts,
            staged=torch.zeros(column, dtype=torch.int32, device=device),
            # One step's admissions may fill every slot while the step before is under way.
            staging=StagingRing(column, device, depth=max(2, min(max_loras, RING_INTS // column))),
        )

    def write_slot(self, slot: int, entries: SlotEntries | None) -> None:
        """Make column `slot` hold exactly `entries`; what it held before is gone.

        In the order of the current stream. The host waits only where as many columns as the ring
        holds were staged before and the first of them is still to be copied; an empty column
        stages nothing.
        """
        if entries is None:
            for table in self.tensors().values():
                table[:, :, slot].zero_()
            return
        column = self._column(entries)
        flat = [part.flatten().view(torch.int32) for part in column.values()]
        self.staging.upload(torch.cat(flat), self.staged)
        parts = self.staged.split_with_sizes([part.numel() for part in flat])
        for (name, table), part in zip(self.tensors().items(), parts, strict=True):
            place = table[:, :, slot]
            place.copy_(part.view(table.dtype).view(column[name].shape))

    def _column(self, entries: SlotEntries) -> dict[str, torch.Tensor]:
        """The entries as a slot's part of every table, on the host, in the order of `tensors`."""
        column = {
            name: torch.zeros([*table.shape[:2], *table.shape[3:]], dtype=table.dtype, device="cpu")
            for name, table in self.tensors().items()
        }
        in_expert = entries.experts >= 0
        first = NUM_LINEAR_TARGETS
        for name in ("a_ptrs", "b_ptrs", "lora_ranks", "scalings"):
            values: torch.Tensor = getattr(entries, name)
            layers, targets = entries.layers[~in_expert], entries.targets[~in_expert]
            column[name][layers, targets] = values[~in_expert]
            if self.experts is not None:
                layers, targets = entries.layers[in_expert], entries.targets[in_expert] - first
                experts = entries.experts[in_expert]
                column[f"expert_{name}"][layers, targets, experts] = values[in_expert]
        if self.experts is not None:
            layers, targets = entries.outer_layers, entries.outer_targets - first
            column["outer_ptrs"][layers, targets] = entries.outer_ptrs
            column["outer_ranks"][layers, targets] = entries.outer_ranks
        return column


def column_ints(num_layers: int, num_experts: int) -> int:
    """int32 of one slot in all tables: two addresses, rank and scaling of every module, address
    and rank of every outer factor."""
    per_layer = 6 * NUM_LINEAR_TARGETS
    if num_experts:
        per_layer += (6 * num_experts + 3) * len(EXPERT_TARGETS)
    return num_layers * per_layer
