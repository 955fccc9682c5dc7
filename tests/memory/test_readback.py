"""Read-backs: rows and logprobs as they were when the copy was launched, until they are read."""

import pytest
import torch

from memory.readback import Readback, ReadbackRing
from memory.step_outputs import MAX_LOGPROBS, StepOutputs

CPU = torch.device("cpu")


def fill(outputs: StepOutputs, step: int) -> None:
    rows = outputs.sampled.shape[0]
    outputs.sampled.copy_(torch.arange(rows) + 100 * step)
    outputs.target_logprob.copy_(-torch.arange(rows) - step - 0.25)
    outputs.top_ids.copy_(torch.arange(MAX_LOGPROBS).expand(rows, -1) + step)
    outputs.top_values.copy_(-torch.arange(MAX_LOGPROBS).float().expand(rows, -1) - step)


def check(readback: Readback, step: int, rows: int) -> None:
    results = readback.wait()
    assert results.token_ids == [row + 100 * step for row in range(rows)]
    assert results.logprobs == [-row - step - 0.25 for row in range(rows)]


def test_the_first_rows_and_their_likeliest_tokens():
    outputs = StepOutputs.allocate(5, CPU)
    fill(outputs, 3)
    ring = ReadbackRing(5, CPU)
    results = ring.start(outputs, 2, with_top=True).wait()
    assert results.token_ids == [300, 301]
    assert results.logprobs == [-3.25, -4.25]
    assert results.top(1, 3) == {3: -3.0, 4: -4.0, 5: -5.0}
    assert results.top(0, 0) == {}
    assert len(results.top(0, MAX_LOGPROBS)) == MAX_LOGPROBS


def test_top_tokens_are_left_out_where_nobody_asked():
    outputs = StepOutputs.allocate(5, CPU)
    results = ReadbackRing(5, CPU).start(outputs, 5, with_top=False).wait()
    assert (results.top_ids, results.top_logprobs) == ([], [])


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_a_smaller_batchs_outputs_lie_together_and_start_aligned(rows):
    whole = StepOutputs.allocate(8, CPU)
    outputs = whole.view(rows)
    fill(outputs, 1)
    assert outputs.chosen.is_contiguous()
    assert outputs.chosen.data_ptr() == whole.chosen.data_ptr()
    assert (outputs.target_logprob.data_ptr() - outputs.sampled.data_ptr()) % 16 == 0
    ring = ReadbackRing(8, CPU)
    check(ring.start(outputs, rows, with_top=False), 1, rows)
    check(ring.start(outputs, 1, with_top=False), 1, 1)


def test_results_are_those_of_the_launch_not_of_the_reading():
    outputs = StepOutputs.allocate(4, CPU)
    ring = ReadbackRing(4, CPU)
    fill(outputs, 1)
    first = ring.start(outputs, 4, with_top=True)
    fill(outputs, 2)
    check(first, 1, 4)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_unread_results_survive_any_number_of_later_copies(depth):
    """A step's results wait unread while the next one's prompt logprobs are read in pieces."""
    outputs = StepOutputs.allocate(4, CPU)
    ring = ReadbackRing(4, CPU, depth=depth)
    fill(outputs, 1)
    unread = ring.start(outputs, 4, with_top=False)
    for step in range(2, 12):
        fill(outputs, step)
        check(ring.start(outputs, 4, with_top=False), step, 4)
    many = []
    for step in range(20, 27):
        fill(outputs, step)
        many.append((ring.start(outputs, 4, with_top=False), step))
    check(unread, 1, 4)
    for readback, step in many:
        check(readback, step, 4)


def test_buffers_that_were_read_are_used_again():
    outputs = StepOutputs.allocate(4, CPU)
    ring = ReadbackRing(4, CPU, depth=2)
    for _ in range(10):
        first, second = (ring.start(outputs, 4, with_top=False) for _ in range(2))
        first.wait(), second.wait()
    assert len(ring._slots) == 2


def test_results_are_read_once():
    readback = ReadbackRing(4, CPU).start(StepOutputs.allocate(4, CPU), 4, with_top=False)
    readback.wait()
    with pytest.raises(AssertionError, match="once"):
        readback.wait()
