"""Random adapters packed in an arena behind pointer tables, with the weights kept aside.

Every byte of the arena that belongs to no adapter is NaN, so a kernel that reads past a true
rank shows it.
"""

from dataclasses import dataclass

import torch

from kernels.lora_metadata import lora_metadata_torch

BLOCK_BYTES = 128


@dataclass
class PackedAdapters:
    """Slices of one layer in every slot: a[j][slot] is [rank, K] and b[j][slot] [N_j, rank]."""

    a: list[list[torch.Tensor]]
    b: list[list[torch.Tensor]]
    arena: torch.Tensor
    a_offsets: list[list[int]]
    b_offsets: list[list[int]]
    lora_ranks: torch.Tensor
    scalings: torch.Tensor

    def addresses(self, offsets: list[list[int]]) -> torch.Tensor:
        """The int64 pointer table: rank 0 is address 0."""
        base, size = self.arena.data_ptr(), self.arena.element_size()
        return torch.tensor(
            [[base + o * size if o >= 0 else 0 for o in row] for row in offsets],
            dtype=torch.int64,
            device=self.arena.device,
        )

    @property
    def a_ptrs(self) -> torch.Tensor:
        return self.addresses(self.a_offsets)

    @property
    def b_ptrs(self) -> torch.Tensor:
        return self.addresses(self.b_offsets)

    def to(self, device: torch.device) -> "PackedAdapters":
        moved = {
            name: getattr(self, name).to(device, copy=True)
            for name in ("arena", "lora_ranks", "scalings")
        }
        return PackedAdapters(**(vars(self) | moved))

    def reference(self, x: torch.Tensor, rows: list[int], y: torch.Tensor) -> torch.Tensor:
        """y + x (scaling * B A)^T in float64, with a merged matrix of its own for every row."""
        x, y = x.double().cpu(), y.double().cpu().clone()
        for row, slot in enumerate(rows):
            if slot >= 0:
                deltas = [
                    float(self.scalings[j, slot]) * (b[slot].double() @ a[slot].double())
                    for j, (a, b) in enumerate(zip(self.a, self.b, strict=True))
                ]
                y[row] += torch.cat(deltas) @ x[row]
        return y


def pack_adapters(
    ranks: list[list[int]],
    in_features: int,
    slice_sizes: list[int],
    dtype: torch.dtype,
    order: list[int] | None = None,
    seed: int = 0,
) -> PackedAdapters:
    """Adapters with ranks[slice][slot]; `order[slot]` names the adapter that the slot holds.

    Equal names give equal weights wherever they are packed.
    """
    order = order or list(range(len(ranks[0])))
    a, b, scalings, blocks, used = [], [], [], [], 0
    for j, width in enumerate(slice_sizes):
        row_a, row_b, row_scaling = [], [], []
        for slot, name in enumerate(order):
            generator = torch.Generator().manual_seed(seed * 10000 + name * 10 + j)
            rank = ranks[j][slot]
            row_a.append(torch.randn(rank, in_features, generator=generator).to(dtype))
            row_b.append(torch.randn(width, rank, generator=generator).to(dtype))
            row_scaling.append(0.37 + 0.11 * name + 0.05 * j)
        a.append(row_a)
        b.append(row_b)
        scalings.append(row_scaling)
    block = BLOCK_BYTES // dtype.itemsize
    offsets = {}
    for slot in reversed(range(len(order))):
        for kind, weights in (("b", b), ("a", a)):
            for j in range(len(slice_sizes)):
                size = weights[j][slot].numel()
                offsets[kind, j, slot] = used if size else -1
                if size:
                    blocks.append((used, weights[j][slot]))
                    used += -(-size // block) * block + block
    arena = torch.full((used + block,), float("nan"), dtype=dtype)
    for offset, weight in blocks:
        arena[offset : offset + weight.numel()] = weight.flatten()
    a_offsets, b_offsets = (
        [[offsets[kind, j, slot] for slot in range(len(order))] for j in range(len(slice_sizes))]
        for kind in "ab"
    )
    return PackedAdapters(
        a=a,
        b=b,
        arena=arena,
        a_offsets=a_offsets,
        b_offsets=b_offsets,
        lora_ranks=torch.tensor(ranks, dtype=torch.int32),
        scalings=torch.tensor(scalings, dtype=torch.float32),
    )


def metadata_of(
    rows: list[int], max_loras: int, device="cpu", disabled: frozenset[int] = frozenset()
) -> dict[str, torch.Tensor]:
    """The buffers of `lora_metadata` for these rows, every slot enabled but `disabled`."""
    row_adapter = torch.tensor(rows, dtype=torch.int32)
    enabled = torch.tensor([slot not in disabled for slot in range(max_loras)], dtype=torch.int32)
    lengths = {
        "seg_indptr": min(len(rows), max_loras) + 1,
        "weight_indices": min(len(rows), max_loras),
        "permutation": len(rows),
        "num_segments": 1,
        "pair_row": len(rows),
        "pair_slot": len(rows),
        "row_slot": len(rows),
        "row_order": len(rows),
    }
    buffers = {name: torch.empty(n, dtype=torch.int32) for name, n in lengths.items()}
    lora_metadata_torch(row_adapter, enabled, **buffers)
    return {name: buffer.to(device) for name, buffer in buffers.items()}


def segments_of(rows: list[int], max_loras: int, device="cpu") -> dict[str, torch.Tensor]:
    """Those of them that describe segments, every slot enabled."""
    buffers = metadata_of(rows, max_loras, device)
    used = ("seg_indptr", "weight_indices", "pair_row", "num_segments")
    return {name: buffers[name] for name in used}
