"""gather_step_inputs: launcher against twin, twin against a loop over rows."""

import pytest
import torch

from kernels.step_inputs import (
    gather_step_inputs,
    gather_step_inputs_torch,
    gather_step_inputs_triton,
)
from tests.kernels.cross_compile import compile_launches

OUTPUTS = ("token_ids", "positions", "seq_lens", "kv_slots", "row_adapter", "row_num_logprobs")
MAX_PAGES = 5
COLUMN, COLUMNS = 4, 8
POISON = -77
SHAPES = [(1, 2, 16), (3, 5, 16), (8, 9, 1), (130, 7, 6), (257, 300, 32)]  # rows, slots, page size


def tables(num_requests: int, page_size: int) -> list[torch.Tensor]:
    """Positions from 0 to the last the table holds; the dummy is the last slot."""
    generator = torch.Generator().manual_seed(num_requests * 100 + page_size)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    positions = draw(0, MAX_PAGES * page_size, num_requests)
    positions[0] = MAX_PAGES * page_size - 1
    positions[-1] = 0
    logprobs = draw(-1, 21, num_requests, COLUMNS)
    return [
        draw(0, 50_000, num_requests),
        positions,
        draw(-1, 8, num_requests),
        draw(1, 900, num_requests, MAX_PAGES),
        logprobs[:, COLUMN],
    ]


def rows_of(num_rows: int, num_requests: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randint(0, num_requests, (num_rows,), generator=generator, dtype=torch.int32)
    rows[-1] = num_requests - 1
    rows[0] = 0
    return rows


def run(op, rows: torch.Tensor, given: list[torch.Tensor], page_size: int) -> list[list[int]]:
    """The outputs, between guards that must keep their poison."""
    count = rows.shape[0]
    padded = [
        torch.full((count + 8,), POISON, dtype=torch.int32, device=rows.device) for _ in OUTPUTS
    ]
    op(rows, *given, page_size, *(tensor[4 : count + 4] for tensor in padded))
    for tensor in padded:
        assert tensor[:4].tolist() == tensor[count + 4 :].tolist() == [POISON] * 4
    return [tensor[4 : count + 4].tolist() for tensor in padded]


def by_hand(rows: torch.Tensor, given: list[torch.Tensor], page_size: int) -> list[list[int]]:
    last_token, positions, adapters, block_tables, logprobs = (tensor.tolist() for tensor in given)
    dummy = len(last_token) - 1
    found = []
    for request in rows.tolist():
        position = positions[request]
        page = block_tables[request][min(position // page_size, MAX_PAGES - 1)]
        found.append(
            [
                last_token[request],
                position,
                0 if request == dummy else position + 1,
                page * page_size + position % page_size,
                adapters[request],
                logprobs[request],
            ]
        )
    return [list(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_twin_gathers_by_request_slot(shape):
    num_rows, num_requests, page_size = shape
    rows, given = rows_of(num_rows, num_requests), tables(num_requests, page_size)
    expected = by_hand(rows, given, page_size)
    assert run(gather_step_inputs_torch, rows, given, page_size) == expected
    assert run(gather_step_inputs, rows, given, page_size) == expected


@pytest.mark.parametrize("op", [gather_step_inputs, gather_step_inputs_torch])
def test_a_position_beyond_the_table_uses_its_last_page(op):
    given = tables(3, 16)
    given[1][1] = MAX_PAGES * 16 + 35
    rows = torch.tensor([1], dtype=torch.int32)
    assert run(op, rows, given, 16) == by_hand(rows, given, 16)
    assert run(op, rows, given, 16)[3] == [given[3][1, -1].item() * 16 + 3]


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_twin(kernel_device, shape):
    num_rows, num_requests, page_size = shape
    rows, given = rows_of(num_rows, num_requests), tables(num_requests, page_size)
    given[1][1 % num_requests] = MAX_PAGES * page_size + 35  # beyond the table
    expected = run(gather_step_inputs_torch, rows, given, page_size)
    moved = [tensor.to(kernel_device) for tensor in given[:-1]]
    whole = torch.full((num_requests, COLUMNS), POISON, dtype=torch.int32, device=kernel_device)
    whole[:, COLUMN] = given[-1].to(kernel_device)
    moved.append(whole[:, COLUMN])  # still a strided column
    before = [tensor.clone() for tensor in moved]
    found = run(gather_step_inputs_triton, rows.to(kernel_device), moved, page_size)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(moved, before, strict=True))


def test_launcher_refuses_wrong_shapes_and_dtypes():
    rows, given = rows_of(4, 3), tables(3, 16)
    with pytest.raises(AssertionError, match="int64"):
        run(gather_step_inputs_triton, rows.long(), given, 16)
    with pytest.raises(AssertionError, match="block_tables"):
        run(gather_step_inputs_triton, rows, [*given[:3], given[3][:2], given[4]], 16)
    apart = torch.zeros(3, 10, dtype=torch.int32)[:, :MAX_PAGES]
    with pytest.raises(AssertionError, match="contiguous"):
        run(gather_step_inputs_triton, rows, [*given[:3], apart, given[4]], 16)
    with pytest.raises(AssertionError, match="num_logprobs"):
        run(gather_step_inputs_triton, rows, [*given[:4], given[4][:2]], 16)


@pytest.mark.parametrize("num_rows", [1, 64, 1024])
def test_compiles_for_every_target(num_rows):
    outputs = [torch.zeros(num_rows, dtype=torch.int32) for _ in OUTPUTS]
    given = tables(65, 16)
    launches = compile_launches(
        gather_step_inputs_triton, rows_of(num_rows, 65), *given, 16, *outputs
    )
    assert launches == 1
