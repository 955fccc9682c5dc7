"""Random expert adapters of one MoE layer, packed in an arena behind pointer tables.

Every byte of the arena that belongs to no adapter is NaN, so a kernel that reads past a true
rank shows it. The weights are kept aside for a reference in float64.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

BLOCK_BYTES = 128


@dataclass(frozen=True)
class PackedExperts:
    """One layer's slices in every slot and expert, and the tables that lead to them.

    a[j][slot][e] is [rank, K] and b[j][slot][e] [N, rank] with rank lora_ranks[j, slot, e]; 0
    means that the slot has nothing on that expert, and its address is 0. Where outer_ranks[j,
    slot] > 0 all the slot's experts hold one and the same A (or B, as `outer` says), stored once.
    """

    a: list[list[list[torch.Tensor]]]
    b: list[list[list[torch.Tensor]]]
    arena: torch.Tensor
    a_offsets: torch.Tensor  # int64[stack, L, E], in elements; -1 where there is nothing
    b_offsets: torch.Tensor
    outer_offsets: torch.Tensor  # int64[stack, L]
    lora_ranks: torch.Tensor  # int32[stack, L, E]
    scalings: torch.Tensor  # float32[stack, L, E]
    outer_ranks: torch.Tensor  # int32[stack, L]

    def addresses(self, offsets: torch.Tensor) -> torch.Tensor:
        places = self.arena.data_ptr() + offsets * self.arena.element_size()
        return torch.where(offsets >= 0, places, 0).to(self.arena.device)

    @property
    def a_ptrs(self) -> torch.Tensor:
        return self.addresses(self.a_offsets)

    @property
    def b_ptrs(self) -> torch.Tensor:
        return self.addresses(self.b_offsets)

    @property
    def outer_ptrs(self) -> torch.Tensor:
        return self.addresses(self.outer_offsets)

    def to(self, device: torch.device | str) -> "PackedExperts":
        names = ("arena", "lora_ranks", "scalings", "outer_ranks")
        return replace(self, **{name: getattr(self, name).to(device, copy=True) for name in names})

    def delta(self, x: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
        """float64[stack * N]: x [K] through the merged scaling * B A of every slice."""
        parts = []
        for j, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            scaling = float(self.scalings[j, slot, expert])
            parts.append(scaling * (b[slot][expert].double() @ a[slot][expert].double()) @ x)
        return torch.cat(parts)

    def deltas(
        self, x: torch.Tensor, topk_ids: torch.Tensor, row_adapter: list[int]
    ) -> torch.Tensor:
        """float64[P, stack * N]: every pair's delta, 0 for pairs without expert or adapter.

        x holds one row a token ([T, K]) or one row a pair ([P, K]).
        """
        ids = topk_ids.flatten().tolist()
        num_pairs, top_k = len(ids), topk_ids.shape[1]
        width = sum(slots[0][0].shape[0] for slots in self.b)
        found = torch.zeros(num_pairs, width, dtype=torch.float64)
        rows = x.double().cpu().repeat_interleave(num_pairs // len(x), dim=0)
        for pair, expert in enumerate(ids):
            slot = row_adapter[pair // top_k]
            if slot >= 0 and expert >= 0:
                found[pair] = self.delta(rows[pair], slot, expert)
        return found


def pack_experts(
    ranks: list[list[list[int]]],
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    outer: Literal["a", "b"] = "a",
    shared: frozenset[int] = frozenset(),
    order: list[int] | None = None,
) -> PackedExperts:
    """Adapters of ranks[slice][slot][expert]; `order[slot]` names the adapter the slot holds.

    The adapters named in `shared` have one factor `outer` for all their experts: their ranks are
    equal within a slice, or 0. Equal names give equal weights wherever they are packed.
    """
    stack, max_loras, num_experts = len(ranks), len(ranks[0]), len(ranks[0][0])
    order = order or list(range(max_loras))
    weights: dict[str, list[list[list[torch.Tensor]]]] = {"a": [], "b": []}
    outer_ranks = torch.zeros(stack, max_loras, dtype=torch.int32)
    scalings = torch.zeros(stack, max_loras, num_experts)
    for j in range(stack):
        for kind, sizes in (("a", (-1, in_features)), ("b", (out_features, -1))):
            weights[kind].append([])
            for slot, name in enumerate(order):
                slot_ranks = ranks[j][slot]
                generator = torch.Generator().manual_seed(name * 10 + 2 * j + (kind == "b"))
                one = kind == outer and name in shared
                if one and max(slot_ranks):
                    outer_ranks[j, slot] = max(slot_ranks)
                    assert set(slot_ranks) <= {0, max(slot_ranks)}, "a shared factor has one rank"
                drawn: dict[int, torch.Tensor] = {}
                experts = []
                for expert, rank in enumerate(slot_ranks):
                    shape = [rank if size < 0 else size for size in sizes]
                    if not (one and rank in drawn):
                        drawn[rank] = torch.randn(shape, generator=generator).to(dtype)
                    experts.append(drawn[rank])
                    scalings[j, slot, expert] = 0.37 + 0.11 * name + 0.05 * j + 0.01 * expert
                weights[kind][j].append(experts)
    block = BLOCK_BYTES // dtype.itemsize
    used, blocks = block, []
    offsets = {kind: torch.full_like(scalings, -1, dtype=torch.int64) for kind in "ab"}
    outer_offsets = torch.full((stack, max_loras), -1, dtype=torch.int64)
    for slot in reversed(range(max_loras)):
        for kind in "ba":
            for j in range(stack):
                placed: dict[int, int] = {}
                for expert, weight in enumerate(weights[kind][j][slot]):
                    if weight.numel() and id(weight) not in placed:
                        placed[id(weight)] = used
                        blocks.append((used, weight))
                        used += -(-weight.numel() // block) * block + block
                    offsets[kind][j, slot, expert] = placed.get(id(weight), -1)
                if kind == outer and outer_ranks[j, slot]:
                    outer_offsets[j, slot] = max(placed.values())
    arena = torch.full((used,), float("nan"), dtype=dtype)
    for offset, weight in blocks:
        arena[offset : offset + weight.numel()] = weight.flatten()
    return PackedExperts(
        a=weights["a"],
        b=weights["b"],
        arena=arena,
        a_offsets=offsets["a"],
        b_offsets=offsets["b"],
        outer_offsets=outer_offsets,
        lora_ranks=torch.tensor(ranks, dtype=torch.int32),
        scalings=scalings,
        outer_ranks=outer_ranks,
    )
