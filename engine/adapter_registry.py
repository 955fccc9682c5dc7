"""Which adapters are known, which are on the device, and who gives way to whom.

Knows names, versions and use; the bytes and tables are `memory.adapter_store`'s.
"""

from engine.errors import AdapterError, CapacityError, UnknownAdapterError
from engine.outputs import AdapterInfo
from memory.adapter_store import AdapterStore
from memory.packed_adapter import PackedAdapter


class Adapter:
    """One version of a named adapter: `requests` wait or run on it, `running` sequences hold its
    slot. A draining one serves what it has and takes nothing new."""

    def __init__(self, name: str, version: int, packed: PackedAdapter, pinned: bool) -> None:
        self.name = name
        self.version = version
        self.packed = packed
        self.pinned = pinned
        self.slot: int | None = None
        self.requests = 0
        self.running = 0
        self.draining = False
        self.last_used = 0

    @property
    def stays(self) -> bool:
        """Whether it keeps its slot for good."""
        return self.pinned and not self.draining

    def info(self) -> AdapterInfo:
        weights = self.packed.weights
        return AdapterInfo(
            name=self.name,
            path=weights.path,
            rank=weights.rank,
            target_modules=weights.target_modules,
            slot=self.slot,
            pinned=self.pinned,
            bytes=self.packed.bytes,
            requests=self.requests,
        )


class AdapterRegistry:
    """Adapters in host memory, the least recently used of which give up their device slots."""

    def __init__(self, store: AdapterStore, max_cpu_loras: int) -> None:
        self._store = store
        self._max_cpu_loras = max_cpu_loras
        self._by_name: dict[str, Adapter] = {}
        self._draining: list[Adapter] = []
        self._free_slots = list(range(store.tables.max_loras))
        self._residents: list[Adapter] = []
        self._versions = 0
        self._uses = 0
        self.loads = 0
        self.evictions = 0

    def check_room(self, name: str) -> None:
        """Raise where an adapter called `name` could not be registered."""
        if not isinstance(name, str) or not name:
            raise AdapterError(f"adapter name {name!r} is not a non-empty string")
        if self._store.tables.max_loras == 0:
            raise CapacityError(f"adapter {name!r}: the engine was built with max_loras=0")
        if name in self._by_name:
            path = self._by_name[name].packed.weights.path
            raise AdapterError(f"adapter {name!r} is already loaded, from {path}: unload it first")
        if len(self._by_name) >= self._max_cpu_loras:
            raise CapacityError(
                f"adapter {name!r}: {len(self._by_name)} adapters are registered and "
                f"max_cpu_loras={self._max_cpu_loras}"
            )

    def register(self, name: str, packed: PackedAdapter, pinned: bool) -> Adapter:
        """Take in an adapter and, where a slot is free, start its copy to the device.

        A pinned one gets a slot now and keeps it. Raises AdapterError for a name in use and
        CapacityError where it can never fit; nothing is registered then.
        """
        self.check_room(name)
        if packed.bytes > self._store.capacity_bytes:
            raise CapacityError(
                f"adapter {name!r} takes {packed.bytes} bytes and lora_memory_bytes is "
                f"{self._store.capacity_bytes}"
            )
        adapter = Adapter(name, self._versions + 1, packed, pinned)
        if not self._place(adapter, may_evict=pinned) and pinned:
            raise CapacityError(
                f"adapter {name!r} cannot be pinned: every slot, or the memory, is taken by "
                f"adapters that are pinned or in use"
            )
        self._versions += 1
        self._by_name[name] = adapter
        return adapter

    def find(self, name: str) -> Adapter:
        """The adapter that new requests of `name` use, or UnknownAdapterError."""
        adapter = self._by_name.get(name) if isinstance(name, str) else None
        if adapter is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownAdapterError(f"adapter {name!r} is not loaded; loaded: {known}")
        return adapter

    def unload(self, name: str) -> None:
        """Refuse new requests of `name`; its slot goes when the last that it has is done."""
        adapter = self.find(name)
        del self._by_name[name]
        adapter.draining = True
        self._draining.append(adapter)
        self._drop_if_drained(adapter)

    def infos(self) -> list[AdapterInfo]:
        return [adapter.info() for adapter in [*self._by_name.values(), *self._draining]]

    def add_request(self, adapter: Adapter) -> None:
        adapter.requests += 1

    def remove_request(self, adapter: Adapter) -> None:
        """A request is done: the last one of a draining adapter takes it along."""
        adapter.requests -= 1
        self._drop_if_drained(adapter)

    def acquire(self, adapter: Adapter) -> bool:
        """Put `adapter` on the device for one more running sequence, evicting the least recently
        used that nothing runs on. False where slots or bytes are all in use."""
        if adapter.slot is None and not self._place(adapter, may_evict=True):
            return False
        assert adapter.slot is not None
        self._store.finish_load(adapter.slot)
        self._uses += 1
        adapter.last_used = self._uses
        adapter.running += 1
        return True

    def release(self, adapter: Adapter) -> None:
        """One sequence fewer runs on `adapter`."""
        adapter.running -= 1

    def may_yet_fit(self, adapter: Adapter) -> bool:
        """Whether `adapter` would find room once everything that runs has ended."""
        return self._room_after([a for a in self._residents if not a.stays], adapter)

    def _place(self, adapter: Adapter, may_evict: bool) -> bool:
        """Start the copy of `adapter` into a slot; nothing is evicted where that is no help."""
        idle = [a for a in self._residents if a.running == 0 and not a.stays] if may_evict else []
        idle.sort(key=lambda a: a.last_used)
        for count in range(len(idle) + 1):
            if self._room_after(idle[:count], adapter):
                break
        else:
            return False
        for victim in idle[:count]:
            self._evict(victim)
            self.evictions += 1
        adapter.slot = self._free_slots.pop(0)
        self._store.begin_load(adapter.slot, adapter.packed)
        self._residents.append(adapter)
        self.loads += 1
        return True

    def _room_after(self, gone: list[Adapter], adapter: Adapter) -> bool:
        """Whether a slot and an extent are there for `adapter` without those of `gone`."""
        slots = [a.slot for a in gone if a.slot is not None]
        has_slot = bool(self._free_slots or slots)
        return has_slot and self._store.would_fit(adapter.packed, slots)

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.slot is not None
        self._store.evict(adapter.slot)
        self._free_slots.append(adapter.slot)
        self._free_slots.sort()
        self._residents.remove(adapter)
        adapter.slot = None

    def _drop_if_drained(self, adapter: Adapter) -> None:
        if adapter.draining and adapter.requests == 0:
            self._draining.remove(adapter)
            if adapter.slot is not None:
                self._evict(adapter)
