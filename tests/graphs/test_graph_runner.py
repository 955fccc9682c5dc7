"""Capture order, masks and failures; bucket choice, padding, fallback, guards and counts."""

import copy
from types import SimpleNamespace

import pytest
import torch

from graphs.errors import CaptureError
from graphs.graph_capturer import GraphCapturer
from graphs.graph_key import GraphKey
from graphs.graph_runner import GraphRunner
from graphs.replay_guard import BufferGeneration
from tests.graphs.toy_step import CountingMasks, ToyBuffers, ToyModel

SIZES = [2, 8, 4]


def _engine(backend, device, *, debug=False, **options):
    """Captured toy graphs, with everything a test may want to look at or break."""
    model, events = ToyModel(device), []
    largest, made = ToyBuffers.of(8, device), {}

    def buffers(size):
        if size > 8:
            return made.setdefault(size, ToyBuffers.of(size, device))
        views = {name: tensor[:size] for name, tensor in largest.tensors().items()}
        return made.setdefault(size, ToyBuffers(**views))

    def step(buffers, key):
        events.append(f"step {len(buffers.ids)}")
        model.step(buffers)

    capturer = GraphCapturer(
        backend,
        step,
        buffers,
        CountingMasks(events),
        prepare=lambda buffers: buffers.ids.zero_(),
        progress=lambda captured: events.append(f"done {captured.key.batch_size}"),
        **options,
    )
    captured = capturer.capture(map(GraphKey, SIZES))
    runner = GraphRunner(captured, step, buffers, capturer.stats, debug=debug)
    return SimpleNamespace(
        model=model, events=events, captured=captured, runner=runner, made=made, largest=largest
    )


def _stage(ids):
    def stage(buffers):
        buffers.ids.zero_()
        buffers.ids[: len(ids)].copy_(ids)
        buffers.state.zero_()

    return stage


@pytest.fixture(params=["tape", "off", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return request.param


def test_capture_warms_up_with_an_adapter_and_records_without_largest_first(backend, device):
    engine = _engine(backend, device)
    one = ["synthetic on", "step", "step", "synthetic off", "zeroed on", "step", "zeroed off"]
    if backend == "off":
        one.remove("step")
        one = ["synthetic on", "step", "step", "synthetic off", "zeroed on", "zeroed off"]
    expected = []
    for size in (8, 4, 2):
        expected += [f"step {size}" if event == "step" else event for event in one]
        expected.append(f"done {size}")
    assert engine.events == expected
    stats = engine.runner.stats
    assert stats.captured == [GraphKey(8), GraphKey(4), GraphKey(2)]
    assert stats.capture_seconds > 0
    assert stats.capture_bytes == sum(step.graph.bytes for step in engine.captured.values())
    assert (stats.capture_bytes > 0) or backend != "tape"


def test_rows_run_in_the_smallest_bucket_that_holds_them(backend, device):
    engine = _engine(backend, device)
    engine.events.clear()
    for rows in (1, 2, 3, 8, 5, 3):
        ids = torch.arange(rows, device=device) + 1
        buffers = engine.runner.run(rows, _stage(ids))
        bucket = len(buffers.ids)
        assert bucket == next(size for size in (2, 4, 8) if size >= rows)
        eager = ToyBuffers.of(bucket, device)
        _stage(ids)(eager)
        with torch.inference_mode():
            engine.model.step(eager)
        for name, tensor in eager.tensors().items():
            assert torch.equal(tensor, buffers.tensors()[name]), (rows, name)
    stats = engine.runner.stats
    assert stats.replays == {GraphKey(2): 2, GraphKey(4): 2, GraphKey(8): 2}
    assert stats.total_replays == 6
    assert stats.padded_rows == 1 + 0 + 1 + 0 + 3 + 1
    assert stats.eager_fallbacks == 0
    assert bool(engine.events) is (backend == "off")  # the step's Python ran only there


def test_a_batch_above_the_largest_bucket_runs_eagerly_and_is_counted(backend, device):
    engine = _engine(backend, device)
    ids = torch.arange(9, device=device)
    buffers = engine.runner.run(9, _stage(ids))
    eager = ToyBuffers.of(9, device)
    _stage(ids)(eager)
    with torch.inference_mode():
        engine.model.step(eager)
    assert torch.equal(buffers.out, eager.out)
    assert engine.runner.stats.eager_fallbacks == 1
    assert engine.runner.stats.total_replays == 0


def test_a_reallocated_buffer_is_refused_by_generation_and_in_debug_by_itself(backend, device):
    generation = BufferGeneration()
    for debug in (False, True):
        engine = _engine(backend, device, debug=debug, generation=generation)
        stage = _stage(torch.arange(3, device=device))
        engine.runner.run(3, stage)
        engine.made[4].out = engine.made[4].out.clone()
        if debug:
            with pytest.raises(CaptureError, match="out: address was"):
                engine.runner.run(3, stage)
        else:
            engine.runner.run(3, stage)  # unseen without a bump
            generation.bump()
            with pytest.raises(CaptureError, match="out: address was"):
                engine.runner.run(3, stage)
            with pytest.raises(CaptureError, match="generation"):
                engine.runner.run(2, stage)  # conservative: any bump stops every graph


def test_shared_tensors_are_guarded_too(backend, device):
    tables = {"table": torch.zeros(3, device=device)}
    engine = _engine(backend, device, debug=True, shared_tensors=lambda: tables)
    engine.runner.run(2, _stage(torch.arange(2, device=device)))
    tables["table"] = torch.zeros(3, device=device)
    with pytest.raises(CaptureError, match="table: address was"):
        engine.runner.run(2, _stage(torch.arange(2, device=device)))


def test_a_failure_closes_every_graph_captured_before(device, backend):
    if backend == "off":
        pytest.skip("refuses nothing")
    kept = []

    def step(buffers, key):
        buffers.state.add_(1)
        if len(buffers.ids) == 2:
            buffers.state.sum().item()

    masks = CountingMasks([])
    capturer = GraphCapturer(
        backend, step, lambda size: ToyBuffers.of(size, device), masks, progress=kept.append
    )
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        capturer.capture(map(GraphKey, SIZES))
    assert masks.events[-1] == "zeroed off"
    assert [captured.key.batch_size for captured in kept] == [8, 4]
    for captured in kept:
        with pytest.raises(CaptureError, match="holds no step"):
            captured.graph.replay()
    assert capturer.stats.captured == []


def test_poison_reaches_the_scratch_of_each_batch_size():
    engine = _engine("tape", "cpu", poison=lambda buffers: [buffers.out])
    buffers = engine.runner.run(3, _stage(torch.arange(3)))
    clean = copy.deepcopy(buffers)
    engine.runner.run(3, _stage(torch.arange(3)))
    assert torch.equal(clean.out, buffers.out)
    assert not buffers.out.isnan().any()


def test_close_releases_every_graph(backend, device):
    engine = _engine(backend, device)
    engine.runner.close()
    with pytest.raises(CaptureError, match="holds no step"):
        engine.runner.run(2, _stage(torch.arange(2, device=device)))


def test_two_graphs_of_a_size_and_the_batch_says_which(backend, device):
    largest, seen = ToyBuffers.of(4, device), []

    def step(buffers, key):
        seen.append(key)
        buffers.out.fill_(2.0 if key.lora else 1.0)

    keys = [GraphKey(4, lora) for lora in (False, True)]
    capturer = GraphCapturer(backend, step, lambda size: largest, CountingMasks([]))
    captured = capturer.capture(keys)
    assert capturer.stats.captured == [GraphKey(4, True), GraphKey(4, False)]
    runner = GraphRunner(captured, step, lambda size: largest, capturer.stats)
    for lora in (True, False, True):
        buffers = runner.run(3, lambda buffers: None, lora)
        assert (buffers.out == (2.0 if lora else 1.0)).all()
    assert runner.stats.replays == {GraphKey(4, True): 2, GraphKey(4, False): 1}
    runner.run(5, lambda buffers: None, lora=False)
    assert seen[-1] == GraphKey(5, False)
