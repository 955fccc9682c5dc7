"""The adapter registry: names, versions, slots, and who gives way to whom."""

import sys

import pytest
import torch

from engine.adapter_registry import Adapter, AdapterRegistry
from engine.errors import AdapterError, CapacityError, UnknownAdapterError
from memory.adapter_store import AdapterStore
from memory.lora_targets import Target
from memory.packed_adapter import PackedAdapter, pack_adapter
from tests.memory.tiny_dims import TinyDims, random_adapter

DIMS = TinyDims()


def packed(rank: int = 4, seed: int = 0) -> PackedAdapter:
    weights = random_adapter(DIMS, rank, [Target.Q_PROJ, Target.DOWN_PROJ], seed)
    return pack_adapter(weights, torch.float32, pinned=False)


def make_registry(
    max_loras: int = 2, arena_rank: int = 64, max_cpu_loras: int = 64
) -> AdapterRegistry:
    """An arena of the bytes of one adapter of rank `arena_rank`."""
    arena_bytes = packed(arena_rank).bytes
    store = AdapterStore(DIMS, max_loras, 64, arena_bytes, torch.float32, torch.device("cpu"))
    return AdapterRegistry(store, max_cpu_loras)


def register(registry: AdapterRegistry, *names: str, **options) -> list[Adapter]:
    options = {"rank": 4, "pinned": False, **options}
    return [
        registry.register(name, packed(options["rank"], seed), options["pinned"])
        for seed, name in enumerate(names)
    ]


def slots(registry: AdapterRegistry) -> dict[str, int | None]:
    return {info.name: info.slot for info in registry.infos()}


def use(registry: AdapterRegistry, adapter: Adapter) -> None:
    assert registry.acquire(adapter)
    registry.release(adapter)


def run_request(registry: AdapterRegistry, adapter: Adapter) -> None:
    registry.add_request(adapter)
    use(registry, adapter)
    registry.remove_request(adapter)


def test_adapters_take_free_slots_at_once_and_wait_in_host_memory_beyond():
    registry = make_registry(max_loras=2)
    register(registry, "a", "b", "c")
    assert slots(registry) == {"a": 0, "b": 1, "c": None}
    assert (registry.loads, registry.evictions) == (2, 0)


def test_info_tells_what_was_loaded():
    registry = make_registry()
    adapter = registry.register("sql", packed(3), True)
    registry.add_request(adapter)
    [info] = registry.infos()
    assert info.name == "sql"
    assert info.path == "random-3-0"
    assert info.rank == 3
    assert info.target_modules == ("down_proj", "q_proj")
    assert (info.slot, info.pinned, info.requests) == (0, True, 1)
    assert info.bytes == adapter.packed.bytes


def test_the_least_recently_used_gives_way():
    registry = make_registry(max_loras=2)
    a, b, c = register(registry, "a", "b", "c")
    use(registry, a)
    use(registry, b)
    use(registry, a)
    use(registry, c)
    assert slots(registry) == {"a": 0, "b": None, "c": 1}
    use(registry, b)
    assert slots(registry) == {"a": None, "b": 0, "c": 1}
    assert (registry.loads, registry.evictions) == (4, 2)


def test_what_runs_never_gives_way():
    registry = make_registry(max_loras=2)
    a, b, c = register(registry, "a", "b", "c")
    assert registry.acquire(a)
    assert registry.acquire(b)
    assert registry.acquire(a)  # a second sequence
    registry.release(a)
    before = slots(registry)
    assert not registry.acquire(c)
    assert slots(registry) == before
    registry.release(a)
    assert registry.acquire(c)
    assert slots(registry) == {"a": None, "b": 1, "c": 0}


def test_pinned_adapters_keep_their_slots():
    registry = make_registry(max_loras=2)
    a, b = register(registry, "a", "b")
    [pinned] = register(registry, "p", pinned=True)
    assert pinned.slot is not None
    kept = pinned.slot
    for adapter in (a, b, a, b):
        use(registry, adapter)
        assert pinned.slot == kept


def test_a_pinned_adapter_without_room_is_refused_and_nobody_moves():
    registry = make_registry(max_loras=2)
    a, b = register(registry, "a", "b")
    assert registry.acquire(a)
    assert registry.acquire(b)
    before = slots(registry)
    with pytest.raises(CapacityError, match="'p' cannot be pinned"):
        registry.register("p", packed(), True)
    assert slots(registry) == before
    with pytest.raises(UnknownAdapterError):
        registry.find("p")


def test_nobody_is_evicted_where_that_is_no_help():
    """Bytes, not slots: what runs leaves too little room whoever goes."""
    registry = make_registry(max_loras=3, arena_rank=16)
    large, small = registry.register("large", packed(10), False), register(registry, "small")[0]
    assert registry.acquire(large)
    late = registry.register("late", packed(8), False)
    assert late.slot is None
    for _ in range(2):
        assert not registry.acquire(late)
        assert small.slot is not None
    with pytest.raises(CapacityError, match="cannot be pinned"):
        registry.register("pinned", packed(8), True)
    assert small.slot is not None
    assert registry.evictions == 0
    assert registry.may_yet_fit(late)
    registry.release(large)
    assert registry.acquire(late)
    assert large.slot is None


def test_as_many_give_way_as_bytes_demand_and_no_more():
    registry = make_registry(max_loras=4, arena_rank=16)
    a, b, c = register(registry, "a", "b", "c", rank=5)
    for adapter in (b, a, c):
        use(registry, adapter)
    late = registry.register("late", packed(9), False)
    assert registry.acquire(late)  # b and a lie side by side; c stays
    assert slots(registry) == {"a": None, "b": None, "c": 2, "late": 0}


def test_those_whose_bytes_are_no_help_stay():
    """The least recently used are small; only the large one's bytes make room."""
    registry = make_registry(max_loras=4, arena_rank=18)
    small, other = register(registry, "small", "other", rank=2)
    large = registry.register("large", packed(12), False)
    late = registry.register("late", packed(10), False)
    for adapter in (small, other, large):
        use(registry, adapter)
    assert registry.acquire(late)
    assert slots(registry) == {"small": 0, "other": 1, "large": None, "late": 2}
    assert registry.evictions == 1


def test_a_pinned_adapter_does_not_part_the_arena():
    registry = make_registry(max_loras=3, arena_rank=16)
    first = registry.register("first", packed(4), False)
    registry.register("pinned", packed(4), True)
    registry.unload(first.name)
    whole = registry.register("whole", packed(10), False)
    assert whole.slot is not None


def test_room_that_pinned_adapters_never_give_up():
    registry = make_registry(max_loras=2)
    [first, second] = register(registry, "p", "q", pinned=True)
    [waits] = register(registry, "waits")
    assert not registry.acquire(waits)
    assert not registry.may_yet_fit(waits)
    registry.add_request(second)
    registry.unload("q")  # draining: it will leave
    assert registry.may_yet_fit(waits)
    registry.remove_request(second)
    assert registry.acquire(waits)
    assert first.slot == 0


def test_a_draining_adapter_serves_what_it_has_and_leaves_with_the_last():
    registry = make_registry()
    [adapter] = register(registry, "a")
    for _ in range(2):
        registry.add_request(adapter)
    assert registry.acquire(adapter)
    registry.unload("a")
    with pytest.raises(UnknownAdapterError, match="'a' is not loaded"):
        registry.find("a")
    [info] = registry.infos()
    assert (info.name, info.requests, info.slot) == ("a", 2, 0)
    registry.release(adapter)
    registry.remove_request(adapter)
    assert registry.acquire(adapter)  # the one that waited
    registry.release(adapter)
    registry.remove_request(adapter)
    assert registry.infos() == []
    assert adapter.slot is None


def test_an_idle_adapter_leaves_at_once():
    registry = make_registry(max_loras=1)
    register(registry, "a")
    registry.unload("a")
    assert registry.infos() == []
    assert register(registry, "b")[0].slot == 0


def test_a_name_may_be_loaded_again_while_the_old_version_drains():
    registry = make_registry()
    [old] = register(registry, "a")
    registry.add_request(old)
    assert registry.acquire(old)
    registry.unload("a")
    [new] = register(registry, "a")
    assert registry.find("a") is new
    assert new.version != old.version
    assert (old.slot, new.slot) == (0, 1)
    assert [info.requests for info in registry.infos()] == [0, 1]
    registry.release(old)
    registry.remove_request(old)
    assert slots(registry) == {"a": 1}


def test_versions_are_never_used_twice():
    registry, seen = make_registry(), set()
    for cycle in range(20):
        [adapter] = register(registry, "ab"[cycle % 2])
        seen.add(adapter.version)
        registry.unload(adapter.name)
    assert len(seen) == 20
    assert 0 not in seen  # that is the base model


def test_a_name_in_use_raises_and_the_old_one_serves_on():
    registry = make_registry()
    [adapter] = register(registry, "a")
    with pytest.raises(AdapterError, match="'a' is already loaded, from random-4-0"):
        registry.register("a", packed(2), False)
    assert registry.find("a") is adapter
    assert len(registry.infos()) == 1


def test_host_memory_holds_max_cpu_loras():
    registry = make_registry(max_loras=1, max_cpu_loras=2)
    register(registry, "a", "b")
    with pytest.raises(CapacityError, match="2 adapters are registered and max_cpu_loras=2"):
        register(registry, "c")
    registry.unload("a")
    register(registry, "c")
    assert set(slots(registry)) == {"b", "c"}


@pytest.mark.parametrize(
    ("name", "rank", "error", "message"),
    [
        ("", 4, AdapterError, "non-empty string"),
        (None, 4, AdapterError, "non-empty string"),
        ("large", 65, CapacityError, "lora_memory_bytes is"),
        ("a", 4, AdapterError, "already loaded"),
    ],
)
def test_a_failed_register_leaves_nothing(name, rank, error, message):
    registry = make_registry(max_loras=3)
    [adapter] = register(registry, "a")
    use(registry, adapter)
    before = (registry.infos(), registry.loads, registry.evictions, registry._store.used_bytes)
    with pytest.raises(error, match=message):
        registry.register(name, packed(rank), False)
    after = (registry.infos(), registry.loads, registry.evictions, registry._store.used_bytes)
    assert after == before
    assert register(registry, "b")[0].version == adapter.version + 1


def test_an_engine_without_slots_says_so():
    registry = make_registry(max_loras=0)
    with pytest.raises(CapacityError, match="max_loras=0"):
        register(registry, "a")


def test_churn_ends_where_it_began():
    registry = make_registry(max_loras=2, arena_rank=24)
    for cycle in range(300):
        adapter = registry.register(f"adapter-{cycle}", packed(1 + cycle % 12, cycle), False)
        run_request(registry, adapter)
        registry.unload(adapter.name)
        assert registry._store.used_bytes == 0
        assert registry.infos() == []
    assert registry.loads == registry.evictions + 300 == 300
    assert registry._store.would_fit(packed(24))


def test_tables_follow_the_slots():
    registry = make_registry(max_loras=2)
    tables = registry._store.tables
    adapters = [registry.register(n, packed(r), False) for n, r in (("a", 2), ("b", 3), ("c", 5))]
    for turn in (0, 1, 2, 0, 2, 1):
        adapter = adapters[turn]
        assert registry.acquire(adapter)
        rank = tables.linear.lora_ranks[1, Target.DOWN_PROJ, adapter.slot]
        assert rank == adapter.packed.weights.rank
        assert registry._store.enabled[adapter.slot] == 1
        registry.release(adapter)


class _InterruptAt:
    """A trace function that raises KeyboardInterrupt before the `count`-th line that runs in the
    registry, the store or its tables."""

    FILES = ("engine/adapter_registry.py", "memory/adapter_store.py", "memory/adapter_tables.py")

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(operation, count: int) -> bool:
    """Whether `operation` has a `count`-th line to be interrupted at."""
    before = sys.gettrace()
    sys.settrace(_InterruptAt(count))
    try:
        operation()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def evict_and_load(registry: AdapterRegistry) -> None:
    registry.acquire(registry.find("c"))


def load_pinned(registry: AdapterRegistry) -> None:
    registry.register("p", packed(6, seed=9), True)


def unload(registry: AdapterRegistry) -> None:
    registry.unload("a")


def end_the_last_request(registry: AdapterRegistry) -> None:
    registry.remove_request(registry._adapters[-1])


@pytest.mark.parametrize("operation", [evict_and_load, load_pinned, unload, end_the_last_request])
def test_an_interrupt_at_any_line_leaves_slots_held_or_free(operation):
    count = 0
    while True:
        count += 1
        registry = make_registry(max_loras=2, arena_rank=12)
        a, b, c = register(registry, "a", "b", "c", rank=5)
        use(registry, a)
        use(registry, b)
        if operation is end_the_last_request:
            use(registry, c)
            registry.add_request(c)
            registry.unload("c")
        if not interrupted(lambda: operation(registry), count):  # noqa: B023
            break
        check_consistent(registry, f"{operation.__name__}, line {count}")
    assert count > 10


def check_consistent(registry: AdapterRegistry, where: str) -> None:
    """All that is registered can be used and unloaded, and then nothing is held."""
    store = registry._store
    for adapter in registry._adapters:
        adapter.running = adapter.requests = 0  # what was interrupted is gone
    for name in list(registry._by_name):
        adapter = registry.find(name)
        use(registry, adapter)
        for module in adapter.packed.weights.modules:
            at = (module.layer, int(module.target), adapter.slot)
            assert store.tables.linear.lora_ranks[at] == module.rank, where
            assert store.tables.linear.scalings[at] == torch.tensor(module.scaling), where
        assert store.enabled[adapter.slot] == 1, where
    for name in list(registry._by_name):
        registry.unload(name)
    assert registry.infos() == [], where
    assert (store.used_bytes, store.enabled) == (0, [0, 0]), where
    assert not any(table.any() for table in store.tables.tensors().values()), where
    last = registry.register("last", packed(12), True)
    use(registry, last)
    assert last.slot == 0, where
