"""Preemption: a request that lost its KV pages comes back as the request it was.

The oracle cannot tell a recomputed prefix from any other, so no output may either.
"""

import pytest

from engine import SamplingParams
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS

ADAPTERS = {f"adapter {rank}": {"rank": rank} for rank in (1, 2, 4, 5, 7, 8, 12, 16)}
OPTIONS = {
    "max_batch_size": 9,
    "graph_batch_sizes": [1, 2, 4, 9],
    "max_loras": 8,
    "prefill_chunk_tokens": 16,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return AdaptedModel.make("llama", tmp_path_factory.mktemp("llama"), ADAPTERS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("max_loras", "kv_tokens"), [(8, 224), (3, 128)])
def test_adapters_survive_recompute(llama, backend, max_loras, kv_tokens):
    """Nine requests of 40 to 72 tokens; where slots are few too, some lose theirs meanwhile."""
    names = [*ADAPTERS, None]
    prompts = [prompt_of(12 + 4 * row, row) for row in range(len(names))]
    options = OPTIONS | {"max_loras": max_loras, "kv_cache_tokens": kv_tokens}
    with llama.engine(backend, **options) as engine:
        outputs = engine.generate(prompts, greedy(28, ignore_eos=True), names)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.preemptions == sum(output.metrics.preemptions for output in outputs)
        assert stats.kv_pages_used == 0
        preempted = {output.adapter for output in outputs if output.metrics.preemptions}
        assert preempted - {None}
        assert [info.requests for info in engine.adapters()] == [0] * len(ADAPTERS)
    assert {output.num_tokens for output in outputs} == {28}
    llama.check(outputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_completions_survive_recompute(llama, backend):
    """Sampled ones, whose tokens must go on from what was drawn before."""
    params = SamplingParams(n=4, max_tokens=40, temperature=0.9, logprobs=3, ignore_eos=True)
    names = ["adapter 5", None, "adapter 16"]
    options = OPTIONS | {"kv_cache_tokens": 160}
    with llama.engine(backend, **options) as engine:
        outputs = engine.generate([prompt_of(20, row) for row in range(3)], params, names)
        assert engine.stats().preemptions > 0
    assert {len(c.token_ids) for output in outputs for c in output.outputs} == {40}
    llama.check(outputs, backend, is_greedy=False)
