"""Everything at once: random requests, adapters that come and go, aborts, too few pages and slots.

Each output is judged by the oracle of the weights that its adapter's name stood for when it was
asked for.
"""

import random

import pytest

from engine import SamplingParams
from tests.engine.adapted_model import AdaptedModel, prompt_of
from tests.engine.backends import BACKENDS

ADAPTERS = {
    "a": {"rank": 8},
    "b": {"rank": 5, "rank_pattern": {"k_proj": 2}},
    "c": {"rank": 3, "targets": ("q_proj", "v_proj", "o_proj"), "strength": 5.0},
    "d": {"rank": 16, "targets": ("gate_proj", "up_proj", "down_proj"), "strength": 4.0},
}
REQUESTS = 24


def random_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        n=draw.choice((1, 1, 1, 3)),
        max_tokens=draw.randint(2, 24),
        temperature=draw.choice((0.0, 0.9)),
        top_k=draw.choice((0, 5)),
        repetition_penalty=draw.choice((1.0, 1.2)),
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=draw.choice((None, None, 2)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "prefix_caching"), [("mistral", False), ("qwen3", True)])
def test_random_traffic(tmp_path, name, prefix_caching, backend):
    model = AdaptedModel.make(name, tmp_path, ADAPTERS)
    draw = random.Random(name)
    options = {
        "max_batch_size": 6,
        "graph_batch_sizes": [1, 2],
        "max_loras": 2,
        "max_seq_len": 96,
        "kv_cache_tokens": 128,
        "prefill_chunk_tokens": 16,
        "enable_prefix_caching": prefix_caching,
    }
    with model.engine(backend, load=(), **options) as engine:
        loaded, served, outputs = {}, {}, {}  # name → weights; id → weights; id → output
        while len(served) < REQUESTS or engine.has_unfinished():
            if len(served) < REQUESTS:
                change_adapters(engine, model, loaded, draw)
                shared = prompt_of(40, draw.randint(0, 2))
                prompt = shared[: draw.randint(1, 40)] + prompt_of(draw.randint(0, 9), 9)
                adapter = draw.choice([None, *loaded])
                request_id = engine.add_request(prompt, random_params(draw), adapter)
                served[request_id] = loaded.get(adapter)
                if draw.random() < 0.1:
                    engine.abort(draw.choice(list(served)))
            for _ in range(draw.choice((1, 1, 4))):
                outputs |= {output.request_id: output for output in engine.step()}
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.adapter_evictions > 0
        assert stats.eager_fallbacks > 0
        assert [info.requests for info in engine.adapters()] == [0] * len(loaded)
    assert outputs.keys() == served.keys()
    told = [key for key, output in outputs.items() if all(c.token_ids for c in output.outputs)]
    assert len(told) > REQUESTS // 2
    judged = [outputs[key] for key in told]
    model.check(judged, backend, [served[key] for key in told], is_greedy=False)
    for output, weights in zip(judged, (served[key] for key in told), strict=True):
        check_prompt_logprobs(model, output, weights, backend)


def change_adapters(engine, model, loaded, draw):
    """Now and then, unload a name or load one, with the weights of any."""
    if draw.random() < 0.5:
        name = draw.choice(list(ADAPTERS))
        if name in loaded:
            engine.unload_adapter(name)
            del loaded[name]
        else:
            loaded[name] = draw.choice(list(ADAPTERS))
            engine.load_adapter(name, model.adapters[loaded[name]])


def check_prompt_logprobs(model, output, weights, backend):
    """Complete, whatever was preempted or reused, and those of the same weights."""
    if output.prompt_logprobs is None:
        return
    ids = output.prompt_token_ids
    reference = model.oracle.logprobs(weights, ids)
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    for position, row in enumerate(output.prompt_logprobs[1:]):
        assert ids[position + 1] in row
        for token, value in row.items():
            assert abs(reference[position, token].item() - value) <= backend.tolerance
