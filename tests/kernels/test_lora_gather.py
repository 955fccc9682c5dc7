"""lora_gather against the segmented twins and against merged weights."""

import pytest
import torch

from graphs.cuda_graph import CudaStepGraph
from graphs.tape_graph import TapeStepGraph
from kernels import lora_gather as gather_module
from kernels.lora_gather import lora_gather
from tests.kernels.packed_adapters import PackedAdapters, pack_adapters
from tests.kernels.test_sgemm import (
    CASES,
    Case,
    activations,
    assert_close,
    bits_on,
    delta_added,
    packed,
)


def gather(case: Case, adapters: PackedAdapters, enabled: list[int], x, y) -> None:
    lora_gather(
        x,
        adapters.arena,
        adapters.arena.data_ptr(),
        adapters.a_ptrs,
        adapters.b_ptrs,
        adapters.lora_ranks,
        adapters.scalings,
        torch.tensor(case.rows, dtype=torch.int32, device=x.device),
        torch.tensor(enabled, dtype=torch.int32, device=x.device),
        case.max_rank,
        case.slice_sizes,
        y,
    )


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_twins_and_merged_weights(name):
    case, adapters = CASES[name], packed(CASES[name])
    x, y = activations(case, "cpu")
    base = y.clone()
    gather(case, adapters, [1] * len(case.ranks[0]), x, y)
    assert_close(y, delta_added("torch", case, adapters), case.dtype)
    assert_close(y, adapters.reference(x, case.rows, base), case.dtype)
    base_rows = [row for row, slot in enumerate(case.rows) if slot < 0]
    assert torch.equal(y[base_rows], base[base_rows])
    assert y._base[:, y.shape[1] :].isnan().all()


def test_disabled_and_unknown_slots_add_nothing():
    case, adapters = CASES["qkv_distinct"], packed(CASES["qkv_distinct"])
    enabled = [slot % 2 for slot in range(9)]
    x, y = activations(case, "cpu")
    base = y.clone()
    gather(case, adapters, enabled, x, y)
    live = [slot if slot >= 0 and enabled[slot] else -1 for slot in case.rows]
    assert_close(y, adapters.reference(x, live, base), case.dtype)
    unknown = Case(**(vars(case) | {"rows": [9, 100, -7] + [-1] * 7}))
    x, y = activations(case, "cpu")
    gather(unknown, adapters, [1] * 9, x, y)
    assert torch.equal(y, base)


def test_chunks_of_rows_change_nothing(monkeypatch):
    case, adapters = CASES["skewed"], packed(CASES["skewed"])
    results = []
    for elements in (1 << 24, 3 * 64 * 130):
        monkeypatch.setattr(gather_module, "_CHUNK_ELEMENTS", elements)
        x, y = activations(case, "cpu")
        gather(case, adapters, [1] * 9, x, y)
        results.append(y)
    assert_close(results[0], results[1], case.dtype)


def test_slots_do_not_change_bits():
    case = CASES["qkv_distinct"]
    slot_of = [2, 0, 4, 1, 8, 7, 3, 5, 6]
    results = []
    for order in (list(range(9)), slot_of):
        ranks = [[row[slot] for slot in order] for row in case.ranks]
        rows = [order.index(slot) if slot >= 0 else -1 for slot in case.rows]
        adapters = pack_adapters(ranks, case.in_features, case.slice_sizes, case.dtype, order)
        x, y = activations(case, "cpu")
        gather(Case(**(vars(case) | {"ranks": ranks, "rows": rows})), adapters, [1] * 9, x, y)
        results.append(y)
    assert torch.equal(*results)


def test_a_tape_holds_it_and_replays_with_new_rows():
    case, adapters = CASES["qkv_distinct"], packed(CASES["qkv_distinct"])
    x, y = activations(case, "cpu")
    base, address = y.clone(), adapters.arena.data_ptr()
    rows = torch.full((len(case.rows),), -1, dtype=torch.int32)
    enabled = torch.ones(9, dtype=torch.int32)
    tables = (adapters.a_ptrs, adapters.b_ptrs, adapters.lora_ranks, adapters.scalings)
    shapes = (case.max_rank, case.slice_sizes)

    def step() -> None:
        y.copy_(base)
        lora_gather(x, adapters.arena, address, *tables, rows, enabled, *shapes, y)

    graph = TapeStepGraph(poison=())
    graph.capture(step)
    graph.replay()
    assert torch.equal(y, base)
    rows.copy_(torch.tensor(case.rows, dtype=torch.int32))
    graph.replay()
    assert_close(y, adapters.reference(x, case.rows, base), case.dtype)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_with_new_rows_and_ranks():
    case = CASES["qkv_distinct_bf16"]
    device = torch.device("cuda")
    adapters = packed(case).to(device)
    x, y = activations(case, device)
    base, tables = y.clone(), (adapters.a_ptrs, adapters.b_ptrs)
    address = adapters.arena.data_ptr()
    rows = torch.full((len(case.rows),), -1, dtype=torch.int32, device=device)
    enabled = torch.zeros(9, dtype=torch.int32, device=device)

    def step() -> None:
        y.copy_(base)
        lora_gather(
            x,
            adapters.arena,
            address,
            *tables,
            adapters.lora_ranks,
            adapters.scalings,
            rows,
            enabled,
            case.max_rank,
            case.slice_sizes,
            y,
        )

    step()
    graph = CudaStepGraph(torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    graph.capture(step)
    graph.replay()
    assert torch.equal(y, base)
    rows.copy_(torch.tensor(case.rows, dtype=torch.int32))
    enabled.fill_(1)
    graph.replay()
    expected = packed(case).reference(x.cpu(), case.rows, base.cpu())
    assert_close(y.cpu(), expected, case.dtype)
    assert_close(y.cpu(), bits_on("triton", device, case, packed(case), x, base), case.dtype)
