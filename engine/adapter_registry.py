"""Which adapters are known, which are on the device, and who gives way to whom.

Knows names, versions and use; the bytes and tables are `memory.adapter_store`'s, and so is which
slot an adapter holds: nothing here says it a second time, so an exception cannot part the two.
"""

from dataclasses import replace

from engine.errors import AdapterError, CapacityError, UnknownAdapterError
from engine.outputs import AdapterInfo
from memory.adapter_store import AdapterStore
from memory.packed_adapter import PackedAdapter


class Adapter:
    """One version of a named adapter: `requests` wait or run on it, `running` sequences hold its
    slot."""

    def __init__(
        self, store: AdapterStore, name: str, version: int, packed: PackedAdapter, pinned: bool
    ) -> None:
        self._store = store
        self.name = name
        self.version = version
        self.packed = replace(packed)  # an object of its own: the store knows adapters by it
        self.pinned = pinned
        self.requests = 0
        self.running = 0
        self.last_used = 0

    @property
    def slot(self) -> int | None:
        """Its slot on the device, or None while it is in host memory only."""
        return self._store.slot_of(self.packed)

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
    """Adapters in host memory, the least recently used of which give up their device slots.

    A version that its name no longer leads to is draining: it serves the requests that it has,
    takes nothing new, and goes when none is left.
    """

    def __init__(self, store: AdapterStore, max_cpu_loras: int) -> None:
        self._store = store
        self._max_cpu_loras = max_cpu_loras
        self._by_name: dict[str, Adapter] = {}
        self._adapters: list[Adapter] = []  # those of `_by_name`, and the draining ones
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
        adapter = Adapter(self._store, name, self._versions + 1, packed, pinned)
        self._adapters.append(adapter)
        try:
            if not self._place(adapter, may_evict=pinned) and pinned:
                raise CapacityError(
                    f"adapter {name!r} cannot be pinned: every slot, or the memory, is taken by "
                    f"adapters that are pinned or in use"
                )
            self._versions = adapter.version
            self._by_name[name] = adapter
        finally:
            self._drop_drained()
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
        self.find(name)
        del self._by_name[name]
        self._drop_drained()

    def infos(self) -> list[AdapterInfo]:
        draining = [adapter for adapter in self._adapters if self._is_draining(adapter)]
        return [adapter.info() for adapter in [*self._by_name.values(), *draining]]

    def add_request(self, adapter: Adapter) -> None:
        adapter.requests += 1

    def remove_request(self, adapter: Adapter) -> None:
        """A request is done: the last one of a draining adapter takes it along."""
        adapter.requests -= 1
        self._drop_drained()

    def acquire(self, adapter: Adapter) -> bool:
        """Put `adapter` on the device for one more running sequence, evicting the least recently
        used that nothing runs on. False where slots or bytes are all in use."""
        if adapter.slot is None and not self._place(adapter, may_evict=True):
            return False
        slot = adapter.slot
        assert slot is not None
        self._store.finish_load(slot)
        self._uses += 1
        adapter.last_used = self._uses
        adapter.running += 1
        return True

    def release(self, adapter: Adapter) -> None:
        """One sequence fewer runs on `adapter`."""
        adapter.running -= 1

    def may_yet_fit(self, adapter: Adapter) -> bool:
        """Whether `adapter` would find room once everything that runs has ended."""
        return self._room_after(self._movable(), adapter)

    def _place(self, adapter: Adapter, may_evict: bool) -> bool:
        """Start the copy of `adapter` into a slot; nothing is evicted where that is no help.

        Pinned adapters lie at the end of the arena, so that they do not part what the others
        share (`memory.extents` says when they still do).
        """
        idle = [a for a in self._movable() if a.running == 0] if may_evict else []
        victims = self._victims(sorted(idle, key=lambda a: a.last_used), adapter)
        if victims is None:
            return False
        for victim in victims:
            self._evict(victim)
            self.evictions += 1
        slot = self._store.free_slot()
        assert slot is not None
        self._store.begin_load(slot, adapter.packed, from_end=adapter.pinned)
        self.loads += 1
        return True

    def _victims(self, idle: list[Adapter], adapter: Adapter) -> list[Adapter] | None:
        """Who makes room for `adapter`: the least recently used that together suffice, less
        those, from the most recently used down, without which the others suffice. None of the
        victims can then be spared, though others might have been fewer. None where all of
        `idle` is not enough."""
        prefixes = (idle[:count] for count in range(len(idle) + 1))
        enough = (prefix for prefix in prefixes if self._room_after(prefix, adapter))
        victims = next(enough, None)
        for spared in reversed(victims or []):
            fewer = [victim for victim in victims or [] if victim is not spared]
            if self._room_after(fewer, adapter):
                victims = fewer
        return victims

    def _room_after(self, gone: list[Adapter], adapter: Adapter) -> bool:
        """Whether a slot and an extent are there for `adapter` without those of `gone`."""
        slots = [slot for slot in (a.slot for a in gone) if slot is not None]
        has_slot = bool(slots) or self._store.free_slot() is not None
        return has_slot and self._store.would_fit(adapter.packed, slots)

    def _movable(self) -> list[Adapter]:
        """Those on the device that do not keep their slot for good."""
        held = {id(packed) for packed in self._store.held()}
        residents = [a for a in self._adapters if id(a.packed) in held]
        return [a for a in residents if not a.pinned or self._is_draining(a)]

    def _is_draining(self, adapter: Adapter) -> bool:
        return self._by_name.get(adapter.name) is not adapter

    def _evict(self, adapter: Adapter) -> None:
        slot = adapter.slot
        assert slot is not None
        self._store.evict(slot)

    def _drop_drained(self) -> None:
        """Forget every draining adapter without requests, those included whose registration or
        unloading was cut short by an exception."""
        for adapter in list(self._adapters):
            if adapter.requests == 0 and self._is_draining(adapter):
                if adapter.slot is not None:
                    self._evict(adapter)
                self._adapters.remove(adapter)
