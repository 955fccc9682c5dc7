"""Adapters on the device: an arena of bytes, slots, and the tables that point into the arena.

Knows nothing of names, versions or who may be evicted: its owner says which slot to fill or to
empty. An adapter takes one extent of its own size, never padded to `max_lora_rank`.

Which slots are held, and which bytes, follows from one dictionary, written last by a load and by
an eviction: an exception at any point leaves a slot held, and ready for use, or free.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memory.adapter_tables import AdapterTables
from memory.extents import ExtentAllocator, aligned
from memory.lora_targets import EXPERT_TARGETS, NUM_LINEAR_TARGETS
from memory.model_dims import ModelDims, all_targets
from memory.packed_adapter import PackedAdapter


@dataclass
class _Resident:
    offset: int
    packed: PackedAdapter
    copied: torch.cuda.Event | None
    in_tables: bool = False


class AdapterStore:
    """`max_loras` slots over `arena_bytes` of device memory."""

    def __init__(
        self,
        dims: ModelDims,
        max_loras: int,
        max_lora_rank: int,
        arena_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dims = dims
        self._max_lora_rank = max_lora_rank
        self.arena = torch.empty(arena_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.arena_address = self.arena.data_ptr()
        num_experts = dims.moe.num_experts if dims.moe else 0
        self.tables = AdapterTables.allocate(dims.num_layers, num_experts, max_loras, device)
        self.enabled = [0] * max_loras  # host copy of `adapter_enabled`, staged before a replay
        self.capacity_bytes = arena_bytes
        self._residents: dict[int, _Resident] = {}
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_use: torch.cuda.Event | None = None
        self._note_use()  # the arena's bytes may be another tensor's, freed but still in use

    @property
    def used_bytes(self) -> int:
        return self._extents().used_bytes

    def free_slot(self) -> int | None:
        """The lowest slot that holds nothing."""
        slots = range(self.tables.max_loras)
        return next((slot for slot in slots if slot not in self._residents), None)

    def slot_of(self, packed: PackedAdapter) -> int | None:
        """The slot that `packed`, this very object, was loaded into and not evicted from."""
        residents = self._residents.items()
        return next((slot for slot, resident in residents if resident.packed is packed), None)

    def held(self) -> list[PackedAdapter]:
        """What lies in some slot."""
        return [resident.packed for resident in self._residents.values()]

    def would_fit(self, packed: PackedAdapter, without: Iterable[int] = ()) -> bool:
        """Whether an extent for `packed` is free, or would be with the slots `without` empty."""
        return self._extents(without).allocate(packed.bytes) is not None

    def begin_load(self, slot: int, packed: PackedAdapter, from_end: bool = False) -> None:
        """Start the copy of `packed`, which must fit and be in no slot, into an extent for the
        empty `slot`, on a side stream. `from_end` is for adapters that stay.

        Bytes of an evicted adapter are overwritten only after the last step that was launched
        before its eviction.
        """
        assert slot not in self._residents, f"slot {slot} is taken"
        assert self.slot_of(packed) is None, f"already in slot {self.slot_of(packed)}"
        assert packed.buffer.dtype == self.arena.dtype, (packed.buffer.dtype, self.arena.dtype)
        offset = self._extents().allocate(packed.bytes, from_end)
        assert offset is not None, f"no extent of {packed.bytes} bytes is free"
        start = offset // self.arena.element_size()
        extent = self.arena[start : start + packed.buffer.numel()]
        copied = None
        if self._copy_stream is None:
            extent.copy_(packed.buffer)
        else:
            if self._last_use is not None:
                self._copy_stream.wait_event(self._last_use)
            with torch.cuda.stream(self._copy_stream):
                extent.copy_(packed.buffer, non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(self._copy_stream)
        self._residents[slot] = _Resident(offset, packed, copied)

    def finish_load(self, slot: int) -> None:
        """Before the first step that uses `slot`: that step waits for the copy on the device, and
        the tables point at the adapter from then on. The host does not wait."""
        resident = self._residents[slot]
        if resident.in_tables:
            return
        if resident.copied is not None:
            torch.cuda.current_stream(self.arena.device).wait_event(resident.copied)
        base_address = self.arena_address + resident.offset
        self.tables.write_slot(slot, resident.packed.entries(base_address))
        self.enabled[slot] = 1
        resident.in_tables = True

    def evict(self, slot: int) -> None:
        """Empty `slot`. The steps launched so far still read the adapter's bytes."""
        self._residents[slot].in_tables = False  # an eviction cut short: `finish_load` repairs it
        self.enabled[slot] = 0
        self.tables.write_slot(slot, None)
        self._note_use()
        del self._residents[slot]

    def _extents(self, without: Iterable[int] = ()) -> ExtentAllocator:
        """The arena's extents as they are, or would be with the slots `without` empty."""
        gone = set(without)
        held = [resident for slot, resident in self._residents.items() if slot not in gone]
        taken = {resident.offset: aligned(resident.packed.bytes) for resident in held}
        return ExtentAllocator(self.capacity_bytes, taken)

    def _note_use(self) -> None:
        """What was launched so far on the current stream may read any byte of the arena."""
        if self._copy_stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.arena.device))
            self._last_use = event

    @contextmanager
    def synthetic(self) -> Iterator[None]:
        """Every slot holds an adapter of the largest rank on every module, made of whatever the
        arena holds: kernels warm up as they will run. Restores the tables on leaving."""
        rank = min(self._max_lora_rank, self._synthetic_rank())
        with self.zeroed():
            for layer in range(self._dims.num_layers):
                for target in self._dims.layer_targets(layer):
                    tables, row = self.tables.linear, int(target)
                    if target in EXPERT_TARGETS and self.tables.experts is not None:
                        tables, row = self.tables.experts.linear, target - NUM_LINEAR_TARGETS
                    tables.a_ptrs[layer, row].fill_(self.arena_address)
                    tables.b_ptrs[layer, row].fill_(self.arena_address)
                    tables.lora_ranks[layer, row].fill_(rank)
            yield

    @contextmanager
    def zeroed(self) -> Iterator[None]:
        """No slot holds anything, as a graph must see it while it is recorded. Restores the
        tables on leaving."""
        kept = {name: tensor.clone() for name, tensor in self.tables.tensors().items()}
        try:
            for tensor in self.tables.tensors().values():
                tensor.zero_()
            yield
        finally:
            for name, tensor in self.tables.tensors().items():
                tensor.copy_(kept[name])

    def _synthetic_rank(self) -> int:
        widest = max(max(self._dims.target_shape(target)) for target in all_targets(self._dims))
        return self.arena.numel() // widest
