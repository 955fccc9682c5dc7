"""An adapter laid out on the host exactly as it will lie on the device: one block, one copy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from memory.adapter_tables import SlotEntries
from memory.adapter_weights import AdapterWeights, LoRAModule
from memory.extents import aligned
from memory.lora_targets import EXPERT_TARGETS, Target


@dataclass(frozen=True)
class PackedAdapter:
    """`buffer` is 1-D in the engine's dtype, pinned where a GPU will read it; `a_offsets` and
    `b_offsets` are byte offsets of each module's A [rank, in] and B [out, rank] in it. A factor
    that modules share lies there once."""

    weights: AdapterWeights  # factors are views of `buffer`
    buffer: torch.Tensor
    a_offsets: tuple[int, ...]
    b_offsets: tuple[int, ...]
    offsets: SlotEntries  # with offsets in the place of addresses

    @property
    def bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def entries(self, base_address: int) -> SlotEntries:
        """What the tables say of this adapter once its buffer lies at `base_address`."""
        return replace(
            self.offsets,
            a_ptrs=self.offsets.a_ptrs + base_address,
            b_ptrs=self.offsets.b_ptrs + base_address,
            outer_ptrs=self.offsets.outer_ptrs + base_address,
        )


def pack_adapter(weights: AdapterWeights, dtype: torch.dtype, pinned: bool) -> PackedAdapter:
    """Copy an adapter's factors, at their true ranks, into one block at 128-byte offsets."""
    offset_of: dict[int, int] = {}  # by the identity of a factor
    size = 0
    for module in weights.modules:
        for factor in (module.a, module.b):
            if id(factor) not in offset_of:
                offset_of[id(factor)] = size
                size += aligned(factor.numel() * dtype.itemsize)
    buffer = torch.zeros(size // dtype.itemsize, dtype=dtype, device="cpu", pin_memory=pinned)
    view_of: dict[int, torch.Tensor] = {}

    def place(factor: torch.Tensor) -> torch.Tensor:
        if id(factor) not in view_of:
            start = offset_of[id(factor)] // dtype.itemsize
            view = buffer[start : start + factor.numel()].view(factor.shape)
            view_of[id(factor)] = view.copy_(factor)
        return view_of[id(factor)]

    modules = tuple(replace(m, a=place(m.a), b=place(m.b)) for m in weights.modules)
    a_offsets = tuple(offset_of[id(module.a)] for module in weights.modules)
    b_offsets = tuple(offset_of[id(module.b)] for module in weights.modules)
    return PackedAdapter(
        AdapterWeights(weights.path, modules),
        buffer,
        a_offsets,
        b_offsets,
        _slot_entries(modules, a_offsets, b_offsets),
    )


def _slot_entries(
    modules: tuple[LoRAModule, ...], a_offsets: tuple[int, ...], b_offsets: tuple[int, ...]
) -> SlotEntries:
    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")

    outer = list(_outer_factors(modules, a_offsets, b_offsets))
    return SlotEntries(
        layers=ints([m.layer for m in modules]),
        targets=ints([m.target for m in modules]),
        experts=ints([-1 if m.expert is None else m.expert for m in modules]),
        lora_ranks=ints([m.rank for m in modules], torch.int32),
        scalings=torch.tensor([m.scaling for m in modules], dtype=torch.float32, device="cpu"),
        a_ptrs=ints(list(a_offsets)),
        b_ptrs=ints(list(b_offsets)),
        outer_layers=ints([module.layer for module, _ in outer]),
        outer_targets=ints([module.target for module, _ in outer]),
        outer_ranks=ints([module.rank for module, _ in outer], torch.int32),
        outer_ptrs=ints([offset for _, offset in outer]),
    )


def _outer_factors(
    modules: tuple[LoRAModule, ...], a_offsets: tuple[int, ...], b_offsets: tuple[int, ...]
) -> Iterator[tuple[LoRAModule, int]]:
    """Where every expert of a layer has the same outer factor: one of its modules, the offset."""
    of_experts = [
        (module, b if module.target == Target.EXPERT_DOWN_PROJ else a)
        for module, a, b in zip(modules, a_offsets, b_offsets, strict=True)
        if module.target in EXPERT_TARGETS
    ]
    of_experts.sort(key=lambda item: (item[0].layer, item[0].target))
    for _, group in groupby(of_experts, key=lambda item: (item[0].layer, item[0].target)):
        (module, offset), *others = group
        if others and all(other == offset for _, other in others):
            yield module, offset
