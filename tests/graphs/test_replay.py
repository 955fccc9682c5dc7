"""Replay against the eager step, bit for bit, and what a graph holds after failures."""

import copy

import pytest
import torch

from graphs.eager_graph import EagerStepGraph
from graphs.errors import CaptureError
from tests.graphs.toy_step import ToyBuffers, ToyModel, record


def _assert_same(a: ToyBuffers, b: ToyBuffers) -> None:
    for name, tensor in a.tensors().items():
        assert torch.equal(tensor, b.tensors()[name]), name


@pytest.mark.parametrize("inference", [False, True])
def test_replay_equals_the_eager_step_bit_for_bit(backend, device, inference):
    model, graphed = ToyModel(device), ToyBuffers.of(5, device)
    with torch.inference_mode(inference), torch.no_grad():
        model.step(graphed)  # warm-up
        graph = record(backend, lambda: model.step(graphed))
        eager = copy.deepcopy(graphed)
        for step in range(6):
            if step % 3 == 0:
                ids = torch.tensor([7, 0, 39, step, 11], device=device)
                graphed.ids.copy_(ids)
                eager.ids.copy_(ids)
            graph.replay()
            model.step(eager)
            _assert_same(graphed, eager)


def test_a_step_of_a_graph_differs_when_its_input_does(backend, device):
    """The comparison above can fail."""
    model, graphed = ToyModel(device), ToyBuffers.of(5, device)
    with torch.no_grad():
        model.step(graphed)
    graph = record(backend, lambda: model.step(graphed))
    graphed.state.zero_()
    graphed.ids.fill_(3)
    graph.replay()
    first = graphed.out.clone()
    graphed.state.zero_()
    graphed.ids.fill_(4)
    graph.replay()
    assert not torch.equal(first, graphed.out)


def test_replay_does_not_run_the_python_of_the_step(backend, device):
    calls, x = [], torch.zeros(2, device=device)

    def step():
        calls.append(1)
        x.add_(1)

    graph = record(backend, step)
    x.zero_()
    graph.replay()
    graph.replay()
    assert len(calls) == 1
    assert x.tolist() == [2.0, 2.0]


def test_a_failed_capture_leaves_no_graph_and_the_buffers_usable(backend, device):
    x = torch.ones(4, device=device)

    def bad():
        y = x * 2
        x.copy_(y * y.sum().item())

    with pytest.raises(CaptureError, match=r"_local_scalar_dense.*test_replay.py:\d+ `x.copy_"):
        record(backend, bad)
    good = record(backend, lambda: x.mul_(2))
    x.fill_(1)
    good.replay()
    assert x.tolist() == [2.0] * 4


def test_an_error_of_the_step_itself_is_not_disguised(backend, device):
    def broken():
        raise KeyError("slot")

    with pytest.raises(KeyError, match="slot"):
        record(backend, broken)


def test_a_closed_graph_refuses_replay(backend, device):
    x = torch.zeros(1, device=device)
    graph = record(backend, lambda: x.add_(1))
    graph.close()
    graph.close()
    assert graph.bytes == 0
    with pytest.raises(CaptureError, match="holds no step"):
        graph.replay()


def test_the_eager_backend_runs_the_step():
    x = torch.zeros(1)
    graph = EagerStepGraph()
    with pytest.raises(CaptureError):
        graph.replay()
    graph.capture(lambda: x.add_(1))
    assert x.item() == 0
    graph.replay()
    assert x.item() == 1
