"""The side branch: a fork sees what came before it, a join all that the branch wrote."""

import pytest
import torch

from engine import Engine
from engine.scheduler import StepPlan
from engine.side_branch import SideBranch
from tests.tiny_models import save_model

DELAY = 20_000_000  # clock cycles, some ten milliseconds


def replayed(step):
    """`step` captured as a graph and replayed once."""
    for _ in range(2):  # the second time after its kernels were loaded
        torch.cuda.synchronize()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("joins_first", [True, False])
def test_the_join_is_what_makes_results_visible(joins_first):
    side, x, y = SideBranch(torch.device("cuda")), *torch.zeros(2, 8, device="cuda")

    def step():
        x.zero_()
        y.fill_(5)
        with side.forked():
            torch.cuda._sleep(DELAY)
            x.fill_(1)
        if joins_first:
            side.join()
        y.copy_(x)
        side.join()

    replayed(step)
    assert y.tolist() == [float(joins_first)] * 8


@pytest.mark.gpu
def test_a_fork_waits_for_what_was_launched_before_it():
    side, x, y = SideBranch(torch.device("cuda")), *torch.zeros(2, 8, device="cuda")

    def step():
        x.zero_()
        torch.cuda._sleep(DELAY)
        x.fill_(2)
        with side.forked():
            y.copy_(x)
        side.join()

    replayed(step)
    assert y.tolist() == [2.0] * 8


@pytest.mark.gpu
def test_a_launch_that_broke_off_beside_the_branch_waits_for_it(tmp_path):
    path = save_model("llama", tmp_path)
    keywords = {"max_batch_size": 2, "max_seq_len": 64, "graph_batch_sizes": [1]}
    with Engine(path, device="cuda", tokenizer=None, **keywords) as engine:
        runner, x = engine.runner, torch.zeros(8, device="cuda")
        torch.cuda.synchronize()

        def break_off(_):
            with runner._side.forked():
                torch.cuda._sleep(DELAY)
                x.fill_(1)
            raise RuntimeError("no kernel for this")

        runner.prefill.run = break_off
        plan = StepPlan(prefill=[None])
        with engine._scope.entered():
            with pytest.raises(RuntimeError, match="no kernel"):
                runner.launch(plan)
            y = x.clone()
        torch.cuda.synchronize()
        assert y.tolist() == [1.0] * 8


def test_on_the_cpu_everything_runs_in_order():
    side, x = SideBranch(torch.device("cpu")), torch.zeros(2)
    with side.forked():
        x.add_(1)
    side.join()
    assert x.tolist() == [1.0, 1.0]
