"""The byte budget: rows, what is left, and errors that say what to cut."""

import pytest

from memory.budget import MIB, Budget
from memory.errors import CapacityError, EngineError


def planned() -> Budget:
    budget = Budget(100 * MIB)
    budget.plan("weights", 60 * MIB, "dtype")
    budget.plan("workspace", 30 * MIB, "prefill_chunk_tokens")
    return budget


def test_rows_add_up_to_what_is_left():
    budget = planned()
    assert budget.planned_bytes == 90 * MIB
    assert budget.left_bytes == 10 * MIB
    budget.plan("KV cache", 10 * MIB, "kv_cache_tokens")
    assert budget.left_bytes == 0
    budget.plan("graphs", 0, "graph_batch_sizes")


def test_a_shortfall_names_the_row_that_fails_and_the_largest_with_its_knob():
    with pytest.raises(CapacityError) as caught:
        planned().plan("adapters", 10 * MIB + 1, "lora_memory_bytes")
    message = str(caught.value)
    assert "adapters: 10.0 MiB needed and 10.0 MiB of 100.0 MiB left" in message
    assert (
        "the largest row is weights with 60.0 MiB: change dtype, or memory_fraction if" in message
    )
    assert isinstance(caught.value, EngineError)
    assert isinstance(caught.value, RuntimeError)


def test_the_row_that_fails_may_be_the_one_to_cut():
    with pytest.raises(CapacityError, match=r"largest row is KV cache .* change kv_cache_tokens,"):
        planned().plan("KV cache", 4000 * MIB, "kv_cache_tokens")


def test_the_error_shows_every_row():
    with pytest.raises(CapacityError) as caught:
        planned().plan("adapters", 50 * MIB, "lora_memory_bytes")
    lines = [line.split() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        ["memory", "planned", "MiB", "taken", "MiB"],
        ["weights", "60.0", "-"],
        ["workspace", "30.0", "-"],
        ["adapters", "50.0", "-"],
        ["sum", "140.0"],
        ["budget", "100.0"],
    ]


def test_the_table_shows_planned_beside_taken():
    budget = planned()
    budget.record("workspace", 25 * MIB)
    lines = [line.split() for line in budget.table().splitlines()]
    assert ["workspace", "30.0", "25.0"] in lines
    assert ["weights", "60.0", "-"] in lines
    assert budget.row("workspace").actual_bytes == 25 * MIB
