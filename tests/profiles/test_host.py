"""`profiles.host` without a GPU: clocks on a real engine, idle time on made-up records."""

from types import SimpleNamespace

import pytest

from memory.readback import Readback
from profiles.device_trace import DeviceTrace
from profiles.gpu_idle import (
    calls_per_step,
    copies_per_step,
    idle_between_replays,
    waits_and_copies,
)
from profiles.host import PARTS, changing_steps, measure, print_row, timed_steps, watch_parts
from profiles.host_clock import HostClock
from profiles.replay_marks import ReplayMarks
from tests.profiles.made_up_trace import span
from tests.profiles.tiny_shape import tiny_batch


class Host:
    def whole(self):
        return self.part() + self.part()

    def part(self):
        return 1


def test_parts_leave_out_the_parts_within_them(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    host = Host()
    with HostClock() as clock:
        clock.watch(host, "whole", "whole")
        clock.watch(Host, "part", "part")
        assert host.whole() == 2
    assert dict(clock.seconds) == {"whole": 3.0, "part": 7.0}
    assert dict(clock.calls) == {"whole": 1, "part": 2}
    assert vars(host) == {}
    assert Host().whole() == 2  # on no clock


def test_a_closed_clock_leaves_the_engine_as_it_was():
    with tiny_batch(tokens=32) as running:
        engine = running.engine
        owners = (engine, engine.runner, engine._loop, engine._scheduler, Readback)
        before = [dict(vars(owner)).keys() for owner in owners]
        wait = Readback.wait
        with HostClock() as clock:
            watch_parts(clock, engine)
            assert Readback.wait is not wait
        assert Readback.wait is wait
        assert [dict(vars(owner)).keys() for owner in owners] == before


def test_steps_are_told_apart_and_their_copies_counted():
    # Pages are taken 256 tokens ahead: a run of 260 steps meets one reservation.
    with tiny_batch(tokens=700, batch=2) as running:
        engine = running.engine
        loads = engine.stats().host_to_device_copies
        counter, parts = timed_steps(running, 260)
        assert engine.stats().host_to_device_copies == loads + sum(s.copies for s in counter.steps)
        cases = [step.case for step in counter.steps]
        assert cases.count("pages reserved") == 1
        assert cases.count("steady") == 259
        assert [s.copies for s in counter.steps if s.case == "steady"] == [0] * 259
        assert [s.copies for s in counter.steps if s.pages] == [1]
        assert parts.keys() == set(PARTS)
        assert parts["schedule"] > 0
        assert parts["launch replay"] > 0
        changing = changing_steps(running, "mix8", 20)
    changed = [step for step in changing.steps if step.changed]
    assert 2 <= len(changed) <= 8
    assert all(step.copies == 0 for step in changing.steps if step.case == "steady")
    assert any(step.copies >= 2 for step in changed)


class GpuClock:
    """torch.cuda.Event, on a clock of milliseconds that `now` sets."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = GpuClock.now

    def elapsed_time(self, end):
        return end.at - self.at


class TimedGraph:
    def __init__(self, takes):
        self.takes = takes

    def replay(self):
        GpuClock.now += self.takes


def test_time_between_replays_is_told_by_the_gpus_own_clock(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", GpuClock)
    one, other = TimedGraph(1.0), TimedGraph(2.0)
    captured = {key: SimpleNamespace(graph=graph) for key, graph in ((8, one), (16, other))}
    engine = SimpleNamespace(runner=SimpleNamespace(graphs=SimpleNamespace(_captured=captured)))
    with ReplayMarks(engine) as marks:
        for graph, pause in ((one, 0.1), (other, 0.2), (one, 0.6), (one, 5.0)):
            graph.replay()
            GpuClock.now += pause
    one.replay()
    assert vars(one) == {"takes": 1.0}
    assert marks.between_replays() == {
        "replays": 4,
        "step_us": 1633.33,
        "between_us": 300,
        "between_share": 0.18367,
        "median_between_us": 200,
        "longest_between_us": 600,
    }


def test_marks_of_no_replays_are_refused():
    engine = SimpleNamespace(runner=SimpleNamespace(graphs=SimpleNamespace(_captured={})))
    with ReplayMarks(engine) as marks, pytest.raises(SystemExit, match="marks of 0 replays"):
        marks.between_replays()


def test_all_runs_of_a_batch(capsys):
    steps = 12
    with tiny_batch(tokens=4 * steps + 192) as running:
        engine = running.engine
        for request in running.requests:
            engine.abort(request)
        row = {"model": "tiny", "batch": 4, **measure(engine, 4, "mix8", steps)}
    assert row["ms_per_replay"] > 0
    assert sum(case["steps"] for case in row["cases"] if case["case"] == "steady") == steps
    assert row["cases"][-1]["case"] == "composition changed"
    row |= {
        "marked": {
            "step_us": 60,
            "between_us": 7,
            "between_share": 7 / 60,
            "median_between_us": 6.5,
            "longest_between_us": 9,
        },
        "gpu": idle_between_replays(made_up_steps(), 4),
        "api_waits_and_copies_per_step": waits_and_copies(calls_per_step(made_up_steps())),
        "device_copies_per_step": copies_per_step(made_up_steps(), 4),
    }
    print_row(row)
    printed = capsys.readouterr().out
    assert "7.0 between replays (11.67%, median 6.5, at most 9.0)" in printed
    assert "6.0 idle between replays (10.00%, at most 6.0)" in printed
    assert "Memcpy DtoH (Device -> Pinned) 2" in printed


def made_up_steps(steps=4):
    """Replays of 50 µs every 60, two copies of 2 µs in between; in each a kernel's gap of 5."""
    events = []
    for step in range(steps):
        at, launch = 60.0 * step, {"correlation": 1000 + step}
        events += [
            span("cuda_runtime", "cudaGraphLaunch", at - 4, 2, **launch),
            span("cuda_runtime", "cudaMemcpyAsync", at - 2, 1, correlation=step),
            span("cuda_runtime", "cudaEventSynchronize", at + 1, 30, correlation=step + 500),
            span("kernel", "a", at, 20, stream=7, **launch),
            span("kernel", "beside", at + 5, 10, stream=7, **launch),
            span("kernel", "b", at + 25, 25, stream=7, **launch),
        ]
        for copy in (51, 54):
            name, args = "Memcpy DtoH (Device -> Pinned)", {"correlation": copy * 100 + step}
            events.append(span("gpu_memcpy", name, at + copy, 2, stream=7, **args))
    return DeviceTrace.from_events(events)


def test_idle_time_is_what_neither_replays_nor_copies_fill():
    idle = idle_between_replays(made_up_steps(), 4)
    assert idle == {
        "replays": 4,
        "step_us": 60,
        "idle_us": 6,
        "idle_share": 0.1,
        "longest_idle_us": 6,
        "other_kernels_us": 4,
        "replay_us": 50,
        "gaps_in_replay_us": 5,
    }


def test_calls_and_copies_are_counted_between_launches():
    trace = made_up_steps()
    assert calls_per_step(trace) == {
        "cudaEventSynchronize": 1,
        "cudaGraphLaunch": 1,
        "cudaMemcpyAsync": 1,
    }
    assert waits_and_copies(calls_per_step(trace)).keys() == {
        "cudaEventSynchronize",
        "cudaMemcpyAsync",
    }
    assert copies_per_step(trace, 4) == {"Memcpy DtoH (Device -> Pinned)": 2}


def test_too_few_replays_are_refused():
    with pytest.raises(SystemExit, match="1 replays"):
        idle_between_replays(made_up_steps(1), 1)
