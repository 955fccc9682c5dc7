"""512 greedy tokens with adapters on experts: errors stay flat, the graph keeps eager's bits."""

from dataclasses import replace

import pytest
import torch

from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS
from tests.engine.programme import as_bits

TOKENS = 512
LAST = 64
ADAPTERS = {
    "experts": {"rank": 8, "targets": ("gate_proj", "up_proj", "down_proj"), "strength": 3.0},
    "some": {
        "rank": 5,
        "targets": ("gate", "gate_proj", "up_proj", "down_proj"),
        "experts": (0, 2, 3),
        "strength": 4.0,
    },
}
BATCHES = {1: ["experts"], 8: ["experts", None, "some", None, "experts", None, None, "some"]}
# How much more errors may grow over the whole decode than those of base rows, as a part of the
# tolerance of one position. On the CPU that is about the mean error, ten times what grows there.
SLOPE_SHARE = 0.02


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return AdaptedModel.make("mixtral", tmp_path_factory.mktemp("mixtral"), ADAPTERS)


def errors_of(mixtral, output):
    """[TOKENS]: |Δlogprob| to the oracle at each position."""
    return torch.tensor(mixtral.oracle.errors(output), dtype=torch.float64)


def growth(errors):
    """By how much a straight line through the errors rises from the first to the last."""
    at = torch.linspace(-0.5, 0.5, len(errors), dtype=errors.dtype)
    return ((at * errors).sum() / (at * at).sum()).item()


def check_flat(errors, names, tolerance):
    """`errors` of each row: below the tolerance at the end, and growing as base rows' do."""
    for name, row in zip(names, errors, strict=True):
        assert row[-LAST:].max() <= tolerance, f"{name}: {row[-LAST:].max():.2g} off at the end"
    base = [abs(growth(row)) for name, row in zip(names, errors, strict=True) if name is None]
    allowed = SLOPE_SHARE * tolerance + max(base, default=0.0)
    for name, row in zip(names, errors, strict=True):
        assert growth(row) <= allowed, f"{name}: grows by {growth(row):.2g}, not {allowed:.2g}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_512_tokens(mixtral, backend, batch):
    names = BATCHES[batch]
    prompts = [prompt_of(4 + row, row) for row in range(batch)]
    runs = []
    for graphs in (backend.graphs, "off"):
        options = {"graph_batch_sizes": [batch], "max_seq_len": TOKENS + 16, "debug": False}
        with mixtral.engine(replace(backend, graphs=graphs), **options) as engine:
            runs.append(engine.generate(prompts, greedy(TOKENS, ignore_eos=True), names))
            assert engine.stats().replays >= TOKENS - 1
    assert [as_bits(output) for output in runs[0]] == [as_bits(output) for output in runs[1]]
    errors = [errors_of(mixtral, output) for output in runs[0]]
    check_flat(errors, names, backend.tolerance)
    for output in runs[0]:
        for name in mixtral.oracle.models.keys() - {output.adapter}:
            others = torch.tensor(mixtral.oracle.errors(output, name)[-LAST:])
            assert others.median() > 100 * backend.tolerance, f"{output.adapter} as {name}"


def test_an_error_that_grows_is_seen():
    """A drift of a third of what one position may be off, under noise of a hundredth."""
    tolerance, names = 1e-4, [None, "a"]
    noise = 1e-6 * torch.rand(2, TOKENS, dtype=torch.float64)
    check_flat(noise, names, tolerance)
    drift = torch.stack([torch.zeros(TOKENS), torch.linspace(0, tolerance / 3, TOKENS)])
    with pytest.raises(AssertionError, match="a: grows by"):
        check_flat(noise + drift, names, tolerance)
    with pytest.raises(AssertionError, match="off at the end"):
        check_flat(noise + 4 * drift, names, tolerance)
