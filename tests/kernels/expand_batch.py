"""LoRA arguments for the ops that fold a delta in, made for a batch, and the delta by hand."""

from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch

from kernels.lora_arguments import FEW_ROWS
from tests.kernels.packed_adapters import PackedAdapters, metadata_of, pack_adapters

NAN = float("nan")
ROWS = {
    1: [2],
    3: [1, -1, 1],
    8: [4, 3, -1, 0, 2, 1, 0, 4],
    17: [0] * 17,
    40: [row % 7 - 2 for row in range(22)] + [0] * 18,
}
"""Slots of so many rows: one each, all the same, a run longer than a tile among others; what lies
below 0 is none."""

RANKS = [16, 0, 5, 1, 64]
"""Of five slots."""


@dataclass(frozen=True)
class ExpandBatch:
    """rows[t] is row t's slot, ranks[j][slot] a slice's; slots in `disabled` count for none."""

    rows: list[int]
    slice_sizes: list[int]
    ranks: list[list[int]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    max_rank: int = 64
    disabled: frozenset[int] = frozenset()
    parts: int = 1

    @cached_property
    def slot_ranks(self) -> list[list[int]]:
        stack = len(self.slice_sizes)
        return self.ranks or [RANKS[j:] + RANKS[:j] for j in range(stack)]

    @cached_property
    def adapters(self) -> PackedAdapters:
        return pack_adapters(self.slot_ranks, 1, self.slice_sizes, self.dtype)

    @cached_property
    def shrunk(self) -> torch.Tensor:
        """[T, stack * max_rank], or of several parts [T, P, stack * max_rank]: random where it
        counts, NaN elsewhere; a view with margins between its rows and parts."""
        stack, tokens = len(self.slice_sizes), len(self.rows)
        generator = torch.Generator().manual_seed(tokens)
        buffer = torch.full((tokens + 1, self.parts, stack * self.max_rank + 4), NAN)
        for t, slot in enumerate(self.rows):
            if slot >= 0 and slot not in self.disabled:
                for j in range(stack):
                    first = j * self.max_rank
                    ranks = buffer[t, :, first : first + self.slot_ranks[j][slot]]
                    ranks.copy_(torch.randn(ranks.shape, generator=generator))
        shrunk = buffer[:tokens, :, : stack * self.max_rank]
        return shrunk[:, 0] if self.parts == 1 else shrunk

    def arguments(self, device: torch.device | str = "cpu") -> list[torch.Tensor | int]:
        """The eleven, in their order."""
        adapters = self.adapters.to(device)
        found = metadata_of(self.rows, len(self.slot_ranks[0]), device, self.disabled)
        rows = ("row_slot", "row_order", "seg_indptr", "weight_indices", "num_segments")
        shrunk = torch.empty_strided(self.shrunk.shape, self.shrunk.stride(), device=device)
        return [
            shrunk.copy_(self.shrunk),
            adapters.arena,
            adapters.b_ptrs,
            adapters.lora_ranks,
            adapters.scalings,
            *(found[name] for name in rows),
            self.max_rank,
        ]

    @property
    def base_rows(self) -> list[int]:
        """Those without any delta."""
        return [
            t
            for t, slot in enumerate(self.rows)
            if slot < 0 or slot in self.disabled or not any(r[slot] for r in self.slot_ranks)
        ]

    def delta(self) -> torch.Tensor:
        """float64 [T, sum of slice_sizes]."""
        delta = torch.zeros(len(self.rows), sum(self.slice_sizes), dtype=torch.float64)
        sums = self.shrunk.double()
        sums = sums if self.parts == 1 else sums.sum(dim=1)
        for t, slot in enumerate(self.rows):
            if slot >= 0 and slot not in self.disabled:
                for j, part in enumerate(delta[t].split(self.slice_sizes)):
                    first = j * self.max_rank
                    rank = self.slot_ranks[j][slot]
                    s = sums[t, first : first + rank]
                    scaling = float(self.adapters.scalings[j, slot])
                    part.copy_(scaling * (self.adapters.b[j][slot].double() @ s))
        return delta


def skip_what_the_interpreter_cannot(batch: ExpandBatch, device: torch.device) -> None:
    if device.type == "cpu" and batch.dtype == torch.bfloat16 and len(batch.rows) > FEW_ROWS:
        pytest.skip("the interpreter's dot takes bfloat16 for integers")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike torch.equal, knows the sign of a zero."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
