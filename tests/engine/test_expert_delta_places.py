"""Where the experts' deltas land: each put in the wrong place, the end-to-end check goes red.

Right is: the router's before softmax and top-k, gate's and up's before the activation, down's
before the weighted sum. The faults are made of the same kernels, which add a whole delta to
zeros, and hold in the graph as well as in prefill.
"""

import pytest

from engine.expert_delta import DOWN, GATE_UP, ExpertDelta
from kernels.activation import gated_activation
from kernels.lora_arguments import NO_LORA
from kernels.moe_combine import moe_combine
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS

ADAPTERS = {
    "gate up": {"rank": 8, "targets": ("gate_proj", "up_proj"), "strength": 6.0},
    "down": {"rank": 5, "targets": ("down_proj",), "strength": 6.0},
    "router": {"rank": 4, "targets": ("gate",), "strength": 12.0},
}
NAMES = [*ADAPTERS, None]


def add_gate_up_to(delta, y):
    """`y` [P, 2 I] += the deltas of gate and up, with nothing non-linear."""
    delta._align()
    outer_ranks = delta.lora.tables.experts.outer_ranks[delta.index, GATE_UP]
    shrunk = delta._shrunk(GATE_UP)
    delta._expand_grouped(shrunk, delta._tables(GATE_UP), outer_ranks, y)


def add_down_to(delta, y):
    """`y` [P, H] += the delta of down."""
    delta._align()
    shrunk = delta._shrunk(DOWN)
    delta._expand_grouped(shrunk, delta._tables(DOWN), None, y)


def gate_up_before_the_activation(delta, kind):
    moe = delta.moe
    add_gate_up_to(delta, moe.gate_up)
    gated_activation(moe.gate_up, *NO_LORA, kind, moe.activated)


def gate_up_after_the_activation(delta, kind):
    moe = delta.moe
    gated_activation(moe.gate_up, *NO_LORA, kind, moe.activated)
    moe.gate_up.zero_()
    add_gate_up_to(delta, moe.gate_up)
    for part in moe.gate_up.chunk(2, dim=1):
        moe.activated.add_(part)


def down_before_the_sum(delta, shared, shared_gate, out):
    moe = delta.moe
    add_down_to(delta, moe.down)
    moe_combine(moe.down, moe.topk_ids, moe.topk_weights, shared, shared_gate, out)


def down_after_the_sum(delta, shared, shared_gate, out):
    moe = delta.moe
    moe_combine(moe.down, moe.topk_ids, moe.topk_weights, shared, shared_gate, out)
    moe.down.zero_()
    add_down_to(delta, moe.down)
    for k in range(delta.top_k):
        out.add_(moe.down.view(len(out), delta.top_k, -1)[:, k])


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe"])
def mixture(request, tmp_path_factory):
    name = request.param
    return AdaptedModel.make(name, tmp_path_factory.mktemp(name), ADAPTERS)


def serve(mixture, backend):
    prompts = [prompt_of(5 + row, row) for row in range(len(NAMES))]
    with mixture.engine(backend, graph_batch_sizes=[4]) as engine:
        return engine.generate(prompts, greedy(8, ignore_eos=True), NAMES)


def check(mixture, backend, outputs, rows):
    mixture.check([outputs[row] for row in rows], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "right"),
    [
        ("add_gate_up", gate_up_before_the_activation),
        ("add_down_and_combine", down_before_the_sum),
    ],
)
def test_the_right_place_made_of_the_same_parts(mixture, backend, method, right, monkeypatch):
    """So that what follows is red for the place and not for the parts."""
    monkeypatch.setattr(ExpertDelta, method, right)
    mixture.check(serve(mixture, backend), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "wrong", "row"),
    [
        ("add_gate_up", gate_up_after_the_activation, 0),
        ("add_down_and_combine", down_after_the_sum, 1),
        ("router_tables", lambda delta: [None] * 7, 2),
    ],
)
def test_a_wrong_place_is_seen(mixture, backend, method, wrong, row, monkeypatch):
    """By the row of the adapter that has that delta, and by no other."""
    monkeypatch.setattr(ExpertDelta, method, wrong)
    outputs = serve(mixture, backend)
    with pytest.raises(AssertionError, match="off at"):
        check(mixture, backend, outputs, [row])
    check(mixture, backend, outputs, [other for other in range(len(NAMES)) if other != row])
