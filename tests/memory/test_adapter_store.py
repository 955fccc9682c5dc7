"""The adapter store: what the tables say is what lies in the arena, through loads and evictions."""

from dataclasses import replace

import pytest
import torch

from memory.adapter_store import AdapterStore
from memory.adapter_tables import AdapterTables
from memory.adapter_weights import AdapterWeights
from memory.extents import ALIGNMENT_BYTES
from memory.lora_targets import DENSE_TARGETS, EXPERT_TARGETS, NUM_LINEAR_TARGETS, Target
from memory.packed_adapter import PackedAdapter, pack_adapter
from tests.memory.tiny_dims import TINY_MOE, TinyDims, random_adapter

DIMS = TinyDims()
CPU = torch.device("cpu")
MAX_RANK = 8
ALL = (*DENSE_TARGETS, Target.ROUTER, *EXPERT_TARGETS)


def packed(rank: int, targets=DENSE_TARGETS, seed: int = 0, dtype=torch.float32) -> PackedAdapter:
    return pack_adapter(random_adapter(DIMS, rank, targets, seed), dtype, pinned=False)


def make_store(max_loras: int = 3, ranks: int = 24, dtype=torch.float32) -> AdapterStore:
    """Room for one adapter of rank `ranks` on every module."""
    arena = pack_adapter(random_adapter(DIMS, ranks), dtype, pinned=False).bytes
    return AdapterStore(DIMS, max_loras, MAX_RANK, arena, dtype, CPU)


def load(store: AdapterStore, slot: int, adapter: PackedAdapter) -> None:
    store.begin_load(slot, adapter)
    store.finish_load(slot)


def at_address(store: AdapterStore, address: int, rows: int, columns: int) -> torch.Tensor:
    offset = address - store.arena.data_ptr()
    assert offset % ALIGNMENT_BYTES == 0
    assert 0 <= offset < store.arena.numel() * store.arena.element_size()
    start = offset // store.arena.element_size()
    return store.arena[start : start + rows * columns].view(rows, columns)


def assert_slot_holds(
    store: AdapterStore, slot: int, adapter: PackedAdapter | None, dims: TinyDims = DIMS
) -> None:
    """Every entry of `slot`, present or absent; the weights are read back from the arena."""
    weights = () if adapter is None else adapter.weights.modules
    modules = {(m.layer, m.target, m.expert): m for m in weights}
    assert store.enabled[slot] == (adapter is not None)
    for layer in range(dims.num_layers):
        for target in Target:
            tables, row, columns = store.tables.linear, int(target), [(None, ())]
            if target in EXPERT_TARGETS:
                if store.tables.experts is None:
                    continue
                tables, row = store.tables.experts.linear, target - NUM_LINEAR_TARGETS
                columns = [(expert, (expert,)) for expert in range(dims.moe.num_experts)]
            for expert, column in columns:
                at = (layer, row, slot, *column)
                module = modules.get((layer, target, expert))
                if module is None:
                    assert (tables.lora_ranks[at], tables.scalings[at]) == (0, 0)
                    assert (tables.a_ptrs[at], tables.b_ptrs[at]) == (0, 0)
                    continue
                rank, (out, width) = module.rank, dims.target_shape(target)
                assert tables.lora_ranks[at] == rank
                assert tables.scalings[at] == torch.tensor(module.scaling)
                a = at_address(store, tables.a_ptrs[at].item(), rank, width)
                b = at_address(store, tables.b_ptrs[at].item(), out, rank)
                assert torch.equal(a, module.a)
                assert torch.equal(b, module.b)


def test_experts_have_columns_of_their_own():
    """A fuller adapter leaves; of the one that follows, only its own experts have a rank."""
    full = pack_adapter(random_adapter(TINY_MOE, 5, ALL), torch.float32, pinned=False)
    some = random_adapter(TINY_MOE, 3, EXPERT_TARGETS, seed=1)
    some = AdapterWeights("some", tuple(m for m in some.modules if m.expert in (0, 2)))
    shared_a = some.modules[0].a
    gate = Target.EXPERT_GATE_PROJ
    some = AdapterWeights(
        "some", tuple(replace(m, a=shared_a) if m.target == gate else m for m in some.modules)
    )
    some = pack_adapter(some, torch.float32, pinned=False)
    store = AdapterStore(TINY_MOE, 2, MAX_RANK, full.bytes + some.bytes, torch.float32, CPU)
    outer = store.tables.experts
    for adapter in (full, some):
        load(store, 1, adapter)
        assert_slot_holds(store, 1, adapter, TINY_MOE)
        assert_slot_holds(store, 0, None, TINY_MOE)
        is_shared = adapter is some
        assert outer.outer_ranks[0, :, 1].tolist() == [3 * is_shared, 0, 0]
        address = outer.linear.a_ptrs[0, 0, 1, 2].item() if is_shared else 0
        assert outer.outer_ptrs[0, :, 1].tolist() == [address, 0, 0]
        store.evict(1)
        assert_slot_holds(store, 1, None, TINY_MOE)
        assert not outer.outer_ranks.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_point_at_the_weights_of_each_slot(dtype):
    store = make_store(dtype=dtype)
    first = packed(5, dtype=dtype)
    last = packed(3, [Target.K_PROJ, Target.DOWN_PROJ], seed=1, dtype=dtype)
    load(store, 2, last)
    load(store, 0, first)
    for slot, adapter in enumerate((first, None, last)):
        assert_slot_holds(store, slot, adapter)
    assert store.used_bytes == first.bytes + last.bytes


def test_nothing_is_in_the_tables_before_the_load_is_finished():
    store = make_store()
    adapter = packed(4)
    store.begin_load(1, adapter)
    assert_slot_holds(store, 1, None)
    store.finish_load(1)
    assert_slot_holds(store, 1, adapter)


def test_the_host_copy_is_not_needed_after_the_load():
    store = make_store()
    adapter, again = packed(4), packed(4)
    load(store, 0, adapter)
    adapter.buffer.fill_(torch.nan)
    assert_slot_holds(store, 0, again)


def test_a_slot_forgets_its_last_adapter():
    store = make_store()
    neighbour, before = packed(2, seed=1), packed(8)
    after = packed(1, [Target.O_PROJ], seed=2)
    load(store, 0, neighbour)
    load(store, 1, before)
    store.evict(1)
    assert_slot_holds(store, 1, None)
    load(store, 1, after)
    assert_slot_holds(store, 1, after)
    assert_slot_holds(store, 0, neighbour)
    assert store.used_bytes == neighbour.bytes + after.bytes


def test_table_addresses_never_change():
    store = make_store()
    before = {name: tensor.data_ptr() for name, tensor in store.tables.tensors().items()}
    arena = store.arena.data_ptr()
    for cycle in range(10):
        load(store, cycle % 3, packed(1 + cycle % MAX_RANK, seed=cycle))
        store.evict(cycle % 3)
    assert before == {name: tensor.data_ptr() for name, tensor in store.tables.tensors().items()}
    assert store.arena.data_ptr() == arena
    assert store.used_bytes == 0
    assert store.enabled == [0, 0, 0]


def test_a_full_arena_says_so_and_what_would_help():
    store = make_store(ranks=16)
    load(store, 0, packed(6))
    load(store, 1, packed(8))
    large = packed(7)
    assert not store.would_fit(large)
    assert store.would_fit(large, without=[1])
    assert not store.would_fit(large, without=[0])  # holes of 6 and of 2: neither is enough
    assert store.would_fit(packed(16), without=[0, 1])
    assert not store.would_fit(packed(17), without=[0, 1])
    with pytest.raises(AssertionError, match="no extent"):
        store.begin_load(2, large)
    assert_slot_holds(store, 0, packed(6))  # asking took nothing away
    assert_slot_holds(store, 1, packed(8))


def test_a_slot_is_filled_once():
    store = make_store()
    load(store, 0, packed(2))
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        store.begin_load(0, packed(2))
    with pytest.raises(AssertionError, match="bfloat16"):
        store.begin_load(1, packed(2, dtype=torch.bfloat16))


def test_synthetic_adapters_stay_inside_the_arena_and_leave():
    store = make_store(ranks=8)
    adapter = packed(5)
    load(store, 1, adapter)
    with store.synthetic():
        assert (store.tables.linear.lora_ranks[:, : len(DENSE_TARGETS)] == MAX_RANK).all()
        assert (store.tables.linear.lora_ranks[:, len(DENSE_TARGETS) :] == 0).all()
        for target in DENSE_TARGETS:
            out, width = DIMS.target_shape(target)
            at = (1, int(target), 2)
            at_address(store, store.tables.linear.a_ptrs[at].item(), MAX_RANK, width)
            at_address(store, store.tables.linear.b_ptrs[at].item(), out, MAX_RANK)
    assert_slot_holds(store, 1, adapter)
    assert_slot_holds(store, 2, None)


def test_synthetic_rank_is_what_a_small_arena_holds():
    widest = max(max(DIMS.target_shape(target)) for target in DENSE_TARGETS)
    store = AdapterStore(DIMS, 2, MAX_RANK, 4 * widest * 3, torch.float32, CPU)
    with store.synthetic():
        assert store.tables.linear.lora_ranks.max() == 3


def test_zeroed_hides_every_adapter_and_puts_them_back():
    store = make_store()
    adapter = packed(5)
    load(store, 1, adapter)
    with store.zeroed():
        assert not any(tensor.any() for tensor in store.tables.tensors().values())
    assert_slot_holds(store, 1, adapter)
    with pytest.raises(RuntimeError, match="capture failed"), store.zeroed():
        raise RuntimeError("capture failed")
    assert_slot_holds(store, 1, adapter)


def test_a_store_without_slots():
    store = AdapterStore(DIMS, 0, MAX_RANK, 0, torch.float32, CPU)
    assert not store.would_fit(packed(1))
    with store.synthetic(), store.zeroed():
        assert store.tables.linear.lora_ranks.numel() == 0


def test_scalings_are_float32_whatever_the_default_dtype_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        store, adapter = make_store(), packed(4)
        load(store, 0, adapter)
    finally:
        torch.set_default_dtype(torch.float32)
    assert adapter.weights.modules[0].scaling == 0.37
    assert store.tables.linear.scalings[0, 0, 0] == torch.tensor(0.37)
    assert_slot_holds(store, 0, adapter)


@pytest.mark.parametrize("fails", [1, 2])
def test_an_eviction_that_fails_leaves_the_slot_held_and_of_use(fails, monkeypatch):
    """`write_slot` breaks off before and after it wrote; the slot is used again, or emptied."""
    store, adapter, next_one = make_store(), packed(4), packed(8)
    load(store, 1, adapter)
    with monkeypatch.context() as patch:
        write_slot = AdapterTables.write_slot

        def break_off(tables, slot, entries):
            if fails == 2:
                write_slot(tables, slot, entries)
            raise KeyboardInterrupt

        patch.setattr(AdapterTables, "write_slot", break_off)
        with pytest.raises(KeyboardInterrupt):
            store.evict(1)
    assert store.slot_of(adapter) == 1
    assert store.used_bytes == adapter.bytes
    store.finish_load(1)
    assert_slot_holds(store, 1, adapter)
    store.evict(1)
    assert (store.slot_of(adapter), store.used_bytes) == (None, 0)
    load(store, 1, next_one)
    assert_slot_holds(store, 1, next_one)


def test_an_adapter_lies_in_one_slot_at_most():
    store, adapter = make_store(), packed(4)
    load(store, 1, adapter)
    with pytest.raises(AssertionError, match="already in slot 1"):
        store.begin_load(0, adapter)
    assert store.free_slot() == 0


def test_a_column_is_staged_in_one_copy_and_an_empty_one_in_none():
    store = make_store()
    load(store, 0, packed(4))
    assert store.tables.staging.copies == 1
    store.evict(0)
    assert store.tables.staging.copies == 1


@pytest.mark.gpu
def test_on_the_gpu_loads_and_evictions_wait_for_no_step_that_is_under_way():
    adapters = [
        pack_adapter(random_adapter(DIMS, 2, seed=seed), torch.float32, pinned=True)
        for seed in range(6)
    ]
    arena = 3 * adapters[0].bytes
    store = AdapterStore(DIMS, 3, MAX_RANK, arena, torch.float32, torch.device("cuda"))
    load(store, 0, adapters[0])
    store.evict(0)  # every kernel that the next ones need is loaded by now
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    before = torch.cuda.Event()
    before.record()
    for slot in range(3):
        load(store, slot, adapters[slot])
    for slot in range(3):
        store.evict(slot)
    assert not before.query()
    torch.cuda.synchronize()
    assert not store.tables.linear.lora_ranks.any()


@pytest.mark.gpu
def test_on_the_gpu_the_first_load_waits_for_the_last_use_of_the_arena_s_bytes():
    """The arena takes bytes that another tensor gave back while a step still reads them."""
    device = torch.device("cuda")
    adapter = pack_adapter(random_adapter(DIMS, 8), torch.float32, pinned=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.full_like(adapter.buffer, 7.0, device=device)
    address = before.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    seen = before.clone()
    del before
    store = AdapterStore(DIMS, 1, MAX_RANK, adapter.bytes, torch.float32, device)
    load(store, 0, adapter)
    if store.arena_address != address:
        pytest.skip("the allocator gave the arena other bytes")
    assert (seen == 7.0).all()
    assert torch.equal(store.arena.cpu(), adapter.buffer)


@pytest.mark.gpu
def test_on_the_gpu_a_load_overwrites_only_what_no_launched_step_reads():
    """A step reads an adapter, slowly; it is evicted and its bytes are given to another."""
    device = torch.device("cuda")
    first, second = (
        pack_adapter(random_adapter(DIMS, 8, seed=s), torch.float32, pinned=True) for s in (0, 1)
    )
    store = AdapterStore(DIMS, 1, MAX_RANK, first.bytes, torch.float32, device)
    load(store, 0, first)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    seen = store.arena.clone()
    store.evict(0)
    load(store, 0, second)
    assert torch.equal(seen.cpu(), first.buffer)
    assert torch.equal(store.arena.cpu(), second.buffer)
    assert store.tables.linear.a_ptrs[0, 0, 0].item() == store.arena.data_ptr()
