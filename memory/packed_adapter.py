"""An adapter laid out on the host exactly as it will lie on the device: one block, one copy."""

from dataclasses import dataclass

import torch

from memory.adapter_tables import TableEntry
from memory.adapter_weights import AdapterWeights, LoRAModule
from memory.extents import aligned


@dataclass(frozen=True)
class PackedAdapter:
    """`buffer` is 1-D in the engine's dtype, pinned where a GPU will read it; `a_offsets` and
    `b_offsets` are byte offsets of each module's A [rank, in] and B [out, rank] in it."""

    weights: AdapterWeights  # factors are views of `buffer`
    buffer: torch.Tensor
    a_offsets: tuple[int, ...]
    b_offsets: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def entries(self, base_address: int) -> list[TableEntry]:
        """Table entries for this adapter once its buffer lies at `base_address`."""
        return [
            TableEntry(
                layer=module.layer,
                target=module.target,
                rank=module.rank,
                scaling=module.scaling,
                a_address=base_address + a_offset,
                b_address=base_address + b_offset,
            )
            for module, a_offset, b_offset in zip(
                self.weights.modules, self.a_offsets, self.b_offsets, strict=True
            )
        ]


def pack_adapter(weights: AdapterWeights, dtype: torch.dtype, pinned: bool) -> PackedAdapter:
    """Copy an adapter's factors, at their true ranks, into one block at 128-byte offsets."""
    a_offsets, b_offsets, size = [], [], 0
    for module in weights.modules:
        a_offsets.append(size)
        size += aligned(module.a.numel() * dtype.itemsize)
        b_offsets.append(size)
        size += aligned(module.b.numel() * dtype.itemsize)
    buffer = torch.zeros(size // dtype.itemsize, dtype=dtype, device="cpu", pin_memory=pinned)

    def place(factor: torch.Tensor, offset: int) -> torch.Tensor:
        start = offset // dtype.itemsize
        view = buffer[start : start + factor.numel()].view(factor.shape)
        view.copy_(factor)
        return view

    modules = tuple(
        LoRAModule(m.layer, m.target, place(m.a, a), place(m.b, b), m.scaling)
        for m, a, b in zip(weights.modules, a_offsets, b_offsets, strict=True)
    )
    return PackedAdapter(
        AdapterWeights(weights.path, modules), buffer, tuple(a_offsets), tuple(b_offsets)
    )
