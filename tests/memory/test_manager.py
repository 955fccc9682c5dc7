"""The manager's plan on the CPU: what fits, what is left for the KV cache, and what to cut."""

import os
from dataclasses import replace

import pytest
import torch

from kernels.linear_arrangement import parts_in_product
from kernels.linear_config import H200, tiles_for
from kernels.moe_lora_shrink import moe_shrink_arrivals, moe_shrink_split_k
from kernels.sampling_tables import NUM_LOGPROBS, REPETITION, TOP_P
from memory.budget import Budget
from memory.errors import CapacityError
from memory.kv_cache import page_bytes
from memory.manager import MemoryConfig, MemoryManager
from memory.model_dims import MoEDims
from memory.packed_adapter import pack_adapter
from tests.memory.tiny_dims import TinyDims, random_adapter

CPU = torch.device("cpu")
CONFIG = MemoryConfig(
    max_batch_size=4,
    max_seq_len=100,
    max_loras=2,
    max_lora_rank=8,
    prefill_chunk_tokens=16,
    page_size=16,
    num_graphs=2,
    memory_fraction=0.9,
    lora_memory_bytes=None,
    kv_cache_tokens=None,
)
LARGE = TinyDims(  # an 8B model's, but for its layers: its weights are not allocated here
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=4096,
)


def make_manager(dims: TinyDims | None = None, weight_bytes: int = 1000, **config) -> MemoryManager:
    config = replace(CONFIG, **config)
    budget = with_weights(weight_bytes, config, CPU)
    return MemoryManager(dims or TinyDims(), config, budget, torch.float32, CPU)


def with_weights(weight_bytes: int, config: MemoryConfig, device: torch.device) -> Budget:
    budget = Budget.of_device(device, config.memory_fraction)
    budget.plan("weights", weight_bytes, "dtype")
    return budget


def test_every_request_fits_at_its_longest_where_memory_allows():
    manager = make_manager()
    assert manager.pages.num_pages == 4 * 7 + 1
    assert manager.kv_cache.keys[0].shape == (29, 16, 2, 16)
    assert manager.tables.block_tables.shape == (5, 8)  # 7 pages and one that stays dummy


@pytest.mark.parametrize(
    ("hidden", "rank", "most"), [(4096, 16, 300), (2048, 16, 70), (1024, 8, 8)]
)
def test_sums_in_parts_by_products_own_programs_fit_the_workspace(hidden, rank, most):
    manager = make_manager(
        TinyDims(hidden_size=hidden), prefill_chunk_tokens=most, max_lora_rank=rank
    )
    for tokens in range(1, most + 1):
        for partials in (1, 2, 4):
            for width in (hidden, 4 * hidden):
                config = tiles_for(tokens, hidden, width, H200)
                slots = (1, manager.config.max_loras, rank)
                parts = parts_in_product(config, hidden, width, partials, *slots, H200)
                assert tokens * parts * rank <= manager.workspace.shrunk.numel(), f"{tokens} rows"


@pytest.mark.parametrize(("experts", "rank", "most"), [(16, 24, 300), (16, 24, 8), (256, 4, 300)])
def test_sums_of_experts_in_parts_fit_the_workspace(experts, rank, most):
    """Of every number of rows."""
    moe = MoEDims(experts, 4, 768, 0, (True, True))
    dims = TinyDims(hidden_size=2048, moe=moe)
    manager = make_manager(dims, prefill_chunk_tokens=most, max_lora_rank=rank, kv_cache_tokens=64)
    workspace, parted = manager.workspace, 0
    for tokens in range(1, most + 1):
        pairs = tokens * moe.top_k
        for stack, width in ((2, dims.hidden_size), (1, moe.intermediate_size)):
            splits = moe_shrink_split_k(pairs, width)
            assert splits * pairs * stack * rank <= workspace.shrunk.numel(), f"{tokens} rows"
            if splits > 1:
                counters = moe_shrink_arrivals(pairs, stack, rank)
                assert counters <= workspace.shrink_arrivals.numel(), f"{tokens} rows"
                parted += 1
    assert parted


def test_kv_cache_stays_under_two_gib_by_default():
    manager = make_manager(LARGE, max_batch_size=64, max_seq_len=4096, max_lora_rank=1)
    kv = manager.budget.row("KV cache")
    assert 2**29 < kv.planned_bytes < 2 * 2**30
    assert kv.actual_bytes == kv.planned_bytes
    assert manager.pages.num_pages == kv.planned_bytes // page_bytes(LARGE, 16, torch.float32)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 2), (16, 2), (17, 3), (160, 11)])
def test_kv_cache_tokens_fix_the_pages_beside_the_dummy(tokens, pages):
    assert make_manager(kv_cache_tokens=tokens).pages.num_pages == pages


def test_what_is_planned_is_what_is_taken():
    manager = make_manager(max_loras=3)
    for name in ("tables", "workspace", "adapters", "KV cache"):
        row = manager.budget.row(name)
        assert row.actual_bytes == row.planned_bytes > 0, name
    arena = manager.adapters.arena
    planned = manager.budget.row("adapters").planned_bytes
    assert arena.numel() * arena.element_size() == planned


def test_default_arena_holds_an_adapter_of_the_largest_rank_in_every_slot():
    manager = make_manager(max_loras=3)
    for slot in range(3):
        adapter = pack_adapter(random_adapter(TinyDims(), 8), torch.float32, pinned=False)
        assert manager.adapters.would_fit(adapter)
        manager.adapters.begin_load(slot, adapter)


def test_default_arena_is_bounded_on_the_cpu():
    manager = make_manager(LARGE, max_loras=64, max_lora_rank=16, kv_cache_tokens=16)
    assert manager.budget.row("adapters").planned_bytes <= 2**30


def test_lora_memory_bytes_fixes_the_arena():
    assert make_manager(lora_memory_bytes=1000).adapters.capacity_bytes == 1024


def test_an_engine_without_slots_takes_no_adapter_memory():
    manager = make_manager(max_loras=0, lora_memory_bytes=10**9)
    assert manager.adapters.capacity_bytes == 0
    assert manager.workspace.shrunk.numel() == 0
    assert manager.step_buffers(4).adapter_enabled.numel() == 0


HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("changes", "row", "knob"),
    [
        ({"weight_bytes": 2**50}, "weights", "dtype"),
        ({"lora_memory_bytes": 2**50}, "adapters", "lora_memory_bytes"),
        ({"kv_cache_tokens": 2**40}, "KV cache", "kv_cache_tokens"),
        ({"weight_bytes": HOST_BYTES // 2, "memory_fraction": 0.4}, "weights", "dtype"),
    ],
)
def test_a_shortfall_names_the_row_and_the_knob(changes, row, knob):
    with pytest.raises(CapacityError) as caught:
        make_manager(**changes)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith(f"{row}: ")
    assert f"the largest row is {row}" in first_line
    changed, fraction = first_line.split(": change ")[1].split(", or memory_fraction")
    assert knob in changed
    assert fraction == " if that is below 1"


def test_a_large_batch_is_the_tables_row_to_cut():
    dims = TinyDims(vocab_size=2**40)
    with pytest.raises(CapacityError, match=r"^tables: .*change max_batch_size"):
        make_manager(dims, max_batch_size=1024)


def test_tables_start_as_the_dummy_request():
    tables = make_manager().tables
    assert (tables.num_slots, tables.dummy) == (5, 4)
    assert tables.adapter_slots.tolist() == [-1] * 5
    assert not tables.block_tables.any()
    assert (tables.sampling_floats[:, TOP_P] == 1).all()
    assert (tables.sampling_floats[:, REPETITION] == 1).all()
    assert (tables.sampling_ints[:, NUM_LOGPROBS] == -1).all()
    assert tables.seeds.dtype == torch.int64


@pytest.mark.parametrize("rows", range(1, 5))
def test_workspace_holds_the_partials_of_every_batch(rows):
    manager = make_manager(max_seq_len=4000, kv_cache_tokens=64)
    buffers = manager.step_buffers(rows)
    assert buffers.partial_out.numel() <= manager.workspace.attention_out.numel()
    assert buffers.partial_lse.numel() <= manager.workspace.attention_lse.numel()


def test_kv_pages_of_layers_are_apart_and_zero():
    manager = make_manager()
    cache = manager.kv_cache
    assert len(cache.keys) == len(cache.values) == 2
    for layer, tensor in enumerate([*cache.keys, *cache.values]):
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(layer + 1)
    assert [t.unique().tolist() for t in [*cache.keys, *cache.values]] == [[1], [2], [3], [4]]
    [(_, storage)] = cache.tensors().items()
    assert storage.numel() * storage.element_size() == 29 * page_bytes(
        manager.dims, 16, torch.float32
    )


@pytest.mark.gpu
def test_on_the_gpu_the_kv_cache_takes_what_is_left():
    device = torch.device("cuda")
    config = replace(CONFIG, max_batch_size=64, max_seq_len=100_000, memory_fraction=0.2)
    budget = with_weights(10**6, config, device)
    manager = MemoryManager(TinyDims(), config, budget, torch.bfloat16, device)
    total = torch.cuda.mem_get_info(device)[1]
    assert manager.budget.total_bytes <= 0.2 * total
    assert manager.budget.left_bytes >= 0
