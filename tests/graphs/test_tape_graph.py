"""What only the tape does: fixed outputs, poison, views, and its own accounting."""

import time

import pytest
import torch

from graphs.errors import CaptureError
from graphs.tape_graph import TapeStepGraph


def test_new_tensors_keep_the_address_they_had_while_recording():
    x, seen = torch.ones(3), []
    graph = TapeStepGraph()

    def step():
        y = x * 2
        seen.append(y)
        seen.append(y[1:])

    graph.capture(step)
    x.fill_(5)
    graph.replay()
    assert seen[0].tolist() == [10.0] * 3
    assert seen[1].tolist() == [10.0] * 2
    assert graph.bytes == 12


@pytest.mark.parametrize(
    ("dtype", "shows"),
    [
        (torch.float32, lambda t: t.isnan().all()),
        (torch.bfloat16, lambda t: t.isnan().all()),
        (torch.int32, lambda t: (t == 2**31 - 1).all()),
        (torch.int64, lambda t: (t == 2**63 - 1).all()),
        (torch.uint8, lambda t: (t == 255).all()),
        (torch.bool, lambda t: t.all()),
    ],
)
def test_poison_shows_where_a_step_reads_what_an_earlier_one_left(dtype, shows):
    scratch, out = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)

    def step():
        stale = torch.empty(6, 2, dtype=dtype).T  # never written
        out[0].copy_(stale[0, :3])
        out[1].copy_(scratch[1])

    for poison, expected in ((None, False), ([scratch], True)):
        graph = TapeStepGraph(poison)
        scratch.zero_()
        out.zero_()
        graph.capture(step)
        graph.replay()
        assert bool(shows(out[1])) is expected
        if expected:
            assert shows(out[0])


def test_poison_does_not_touch_a_step_that_writes_before_it_reads():
    x, out = torch.arange(4.0), torch.zeros(4)

    def step():
        y = torch.empty(4)
        y.copy_(x)
        y += torch.ones(4)
        out.copy_(torch.stack([y, y * 2]).sum(0))

    graph = TapeStepGraph([])
    graph.capture(step)
    for shift in (0, 10):
        x.copy_(torch.arange(4.0) + shift)
        graph.replay()
        assert torch.equal(out, (x + 1) * 3)


def test_a_capture_that_fails_in_the_middle_can_be_tried_again():
    x, fail = torch.ones(1), [True]

    def step():
        x.mul_(2)
        if fail[0]:
            x.item()

    graph = TapeStepGraph()
    with pytest.raises(CaptureError):
        graph.capture(step)
    with pytest.raises(CaptureError, match="holds no step"):
        graph.replay()
    fail[0] = False
    graph.capture(step)
    x.fill_(1)
    graph.replay()
    assert x.item() == 2  # nothing of the first attempt was recorded


def test_an_op_that_resizes_its_output_is_refused():
    x, out = torch.ones(3), torch.empty(0)
    with pytest.raises(CaptureError, match=r"aten.add.out.*resizes"):
        TapeStepGraph().capture(lambda: torch.add(x, x, out=out))


def test_an_operation_that_only_the_dispatcher_sees_is_recorded():
    x, made = torch.ones(3), []

    def step():
        made.append(torch.FloatTensor(3))
        made[0].copy_(x)

    graph = TapeStepGraph([])
    graph.capture(step)
    graph.replay()
    assert torch.equal(made[0], x)


def test_replay_costs_microseconds_per_operation():
    """Twenty times what it takes: only a replay through Python modes (100 µs) would fail."""
    x = torch.ones(8)
    graph = TapeStepGraph()
    graph.capture(lambda: [x.mul_(1.0) for _ in range(1000)])
    seconds = min(_timed(graph.replay) for _ in range(3))
    assert seconds / 1000 < 50e-6


def _timed(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def test_a_collective_with_a_handle_is_refused_and_one_inside_an_op_is_recorded(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(2)
        with pytest.raises(CaptureError, match=r"c10d.allreduce_.*handle to wait for"):
            TapeStepGraph().capture(lambda: torch.distributed.all_reduce(x))
    finally:
        torch.distributed.destroy_process_group()
