"""What only a CUDA graph does: one pool for all sizes, and leaving a capture that CUDA broke."""

import pytest
import torch

from graphs.cuda_graph import CudaStepGraph
from graphs.errors import CaptureError

pytestmark = pytest.mark.gpu


@pytest.fixture
def place():
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def _works(stream) -> None:
    """Allocation, clean-up, eager work, a new capture on the same stream and its replay."""
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    x = torch.ones(1000, device="cuda")
    graph = CudaStepGraph(torch.cuda.graph_pool_handle(), stream)
    graph.capture(lambda: x.mul_(2).add_(torch.zeros_like(x)))
    graph.replay()
    graph.replay()
    assert x.sum().item() == 4000
    graph.close()


def _synchronize(x):
    torch.cuda.synchronize()


def _copy_from_pageable_memory(x):
    x.copy_(torch.ones(x.shape, device="cpu"))


def _leave_a_branch_unjoined(x):
    branch = torch.cuda.Stream()
    branch.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(branch):
        x.add_(1)


@pytest.mark.parametrize("fault", [_synchronize, _copy_from_pageable_memory])
def test_a_fault_that_only_cuda_sees_is_named_by_its_line(place, fault):
    x = torch.zeros(1000, device="cuda")

    def step():
        x.add_(1)
        fault(x)

    with pytest.raises(CaptureError, match=r"test_cuda_graph.py:\d+ `(torch.cuda.sync|x.copy_)"):
        CudaStepGraph(*place).capture(step)
    _works(place[1])


def test_an_unjoined_branch_is_a_capture_error(place):
    x = torch.zeros(1000, device="cuda")
    with pytest.raises(CaptureError, match="unjoined"):
        CudaStepGraph(*place).capture(lambda: _leave_a_branch_unjoined(x))
    _works(place[1])


def test_a_joined_branch_is_captured(place):
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")

    def step():
        caller = torch.cuda.current_stream()
        branch.wait_stream(caller)
        with torch.cuda.stream(branch):
            y.add_(1)
        x.add_(1)
        caller.wait_stream(branch)
        x.add_(y)

    branch = torch.cuda.Stream()
    graph = CudaStepGraph(*place)
    graph.capture(step)
    assert x.sum().item() == 0  # a capture runs nothing
    graph.replay()
    graph.replay()
    assert x[0].item() == 1 + 1 + 1 + 2


def test_smaller_graphs_live_in_the_memory_of_the_largest(place):
    """Case: graph memory grows with the largest batch, not with the number of batches."""
    width, outputs, graphs = 1 << 20, {}, {}
    x = torch.rand(32, width, device="cuda")
    for rows in (32, 16, 8, 1):
        out = outputs[rows] = torch.zeros(rows, device="cuda")

        def step(rows=rows, out=out):
            out.copy_((x[:rows] * 2 + 1).sum(1))

        step()
        graphs[rows] = CudaStepGraph(*place)
        graphs[rows].capture(step)
    assert graphs[32].bytes >= 32 * width * 4
    assert sum(graphs[rows].bytes for rows in (16, 8, 1)) <= graphs[32].bytes / 4
    for rows in (1, 32, 8, 16):
        x.uniform_()
        graphs[rows].replay()
        assert torch.equal(outputs[rows], (x[:rows] * 2 + 1).sum(1))
    before, _ = torch.cuda.mem_get_info()
    for graph in graphs.values():
        graph.close()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before


def test_replay_launches_on_the_current_stream(place):
    x = torch.zeros(1000, device="cuda")
    graph = CudaStepGraph(*place)
    graph.capture(lambda: x.add_(1))
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        graph.replay()
    other.synchronize()
    assert x[0].item() == 1
