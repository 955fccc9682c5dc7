"""Graph output equals eager output bit for bit: the tape on the CPU, CUDA graphs on a GPU.

"Eager" is `graphs="off"`: the same padded step over the same static buffers, launched from
Python. Both run one programme of joins, ends, aborts and adapter swaps.
"""

from itertools import pairwise

import pytest

from engine import Engine, SamplingParams
from tests.engine.programme import as_bits, run_programme
from tests.random_adapters import ALL, ROUTED, save_adapter
from tests.tiny_models import build_model, save_model

BACKENDS = [
    pytest.param(("cpu", "tape"), id="tape"),
    pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
]


ADAPTERS = {
    "full": {"rank": 8},
    "partial": {"rank": 5, "targets": ("q_proj", "down_proj")},
    "wide": {"rank": 33, "targets": ("v_proj", "up_proj")},
    "mixed": {"rank": 16, "rank_pattern": {"k_proj": 3}},
}
EXPERT_ADAPTERS = {
    "full": {"rank": 8, "targets": (*ALL, *ROUTED)},
    "partial": {"rank": 5, "targets": ("q_proj", "down_proj"), "experts": range(0, 60, 2)},
    "wide": {"rank": 33, "targets": ("gate", "up_proj"), "strength": 6.0},
    "mixed": {
        "rank": 16,
        "targets": ("gate_proj", "up_proj", "down_proj"),
        "expert_rank": lambda expert, target: 1 + (expert + len(target)) % 16,
    },
}
MODELS = {"llama": ADAPTERS, "qwen2_moe": EXPERT_ADAPTERS}
PROGRAMMES = [("llama", 1), ("llama", 2), ("qwen2_moe", 2)]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    directory, name = tmp_path_factory.mktemp("model"), request.param
    path, model = save_model(name, directory), build_model(name)
    adapters = {
        adapter: save_adapter(model, directory / adapter, seed=seed, **keywords)
        for seed, (adapter, keywords) in enumerate(MODELS[name].items(), start=1)
    }
    return path, adapters


def build(path, device, graphs, **keywords):
    defaults = {
        "max_batch_size": 8,
        "graph_batch_sizes": [1, 2, 4, 8],
        "max_seq_len": 128,
        "max_loras": 3,
        "kv_cache_tokens": 224,
        "prefill_chunk_tokens": 48,
        "tokenizer": None,
        "debug": True,
    }
    return Engine(path, device=device, graphs=graphs, **defaults | keywords)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("checkpoint", "seed"), PROGRAMMES, indirect=["checkpoint"])
def test_a_programme_of_joins_ends_and_swaps(checkpoint, backend, seed):
    path, adapters = checkpoint
    device, graphs = backend
    logs = []
    for chosen in (graphs, "off"):
        with build(path, device, chosen) as engine:
            logs.append(run_programme(engine, adapters, seed, arrivals=30))
            stats = engine.stats()
            assert stats.replays > 40
            assert stats.eager_fallbacks == 0
            assert stats.kv_pages_used == 0
            assert stats.preemptions > 0, "the pool is small enough to preempt"
            assert stats.adapter_evictions > 0
    assert logs[0] == logs[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_used_engine_gives_the_bits_of_a_fresh_one(checkpoint, backend):
    path, adapters = checkpoint
    device, graphs = backend
    prompts = [[7 + row, 8, 9] for row in range(5)]
    params = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True, logprobs=2)
    names = [None, "full", "partial", "wide", "full"]
    with build(path, device, graphs, max_loras=4, adapters=adapters) as engine:
        fresh = engine.generate(prompts, params, names)
        engine.generate(prompts[::-1], params, names)
        engine.unload_adapter("mixed")
        engine.load_adapter("mixed", adapters["full"])
        used = engine.generate(prompts, params, names)
    assert [as_bits(o)[1:] for o in fresh] == [as_bits(o)[1:] for o in used]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_batch_size(checkpoint, backend):
    """Rows of every kind at batches up to the largest bucket and one above it."""
    path, adapters = checkpoint
    device, graphs = backend
    largest = 33 if device == "cuda" else 9
    sizes = [1, 2, 4, 8, 16, 24, 32] if device == "cuda" else [1, 2, 4, 8]
    batches = range(1, largest + 1)
    cycle = [None, "full", "wide", None, "partial", "mixed"]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    logs = []
    for chosen in (graphs, "off"):
        options = {
            "max_batch_size": largest,
            "graph_batch_sizes": sizes,
            "kv_cache_tokens": 4096,
            "max_loras": 4,
        }
        with build(path, device, chosen, adapters=adapters, **options) as engine:
            log = []
            for batch in batches:
                prompts = [[row + 3, batch + 3, 11] for row in range(batch)]
                names = [cycle[(row + batch) % len(cycle)] for row in range(batch)]
                log.append([as_bits(o)[1:] for o in engine.generate(prompts, params, names)])
            logs.append(log)
            stats = engine.stats()
            assert set(stats.replays_by_batch_size) == set(sizes)
            assert stats.eager_fallbacks > 0, "the largest batch is above every bucket"
    assert logs[0] == logs[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_swapped_between_two_replays_of_one_graph(checkpoint, backend):
    """The graph that decoded one adapter's rows decodes another's, loaded since, unchanged."""
    path, adapters = checkpoint
    device, graphs = backend
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    with build(path, device, graphs, max_loras=1, graph_batch_sizes=[1]) as engine:
        outputs = {}
        for name in ("full", "partial", "wide", "full"):
            engine.load_adapter("one", adapters[name])
            (output,) = engine.generate([5, 6, 7], params, "one")
            bits = as_bits(output)[2:]
            assert outputs.setdefault(name, bits) == bits
            engine.unload_adapter("one")
        assert len(set(outputs.values())) == 3
        assert engine.stats().captured_batch_sizes == (1,)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpoint", ["qwen2_moe"], indirect=True)
def test_routes_change_under_a_graph(checkpoint, backend):
    """The experts of every row at every step of one graph are eager's, and others each time; a
    row of padding takes none."""
    path, adapters = checkpoint
    device, graphs = backend
    names = [None, "full", "wide", "mixed"]
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    runs = []
    for chosen in (graphs, "off"):
        options = {"adapters": adapters, "max_loras": 4, "graph_batch_sizes": [5]}
        with build(path, device, chosen, **options) as engine:
            for row, name in enumerate(names):
                engine.add_request([7 + row, 8, 9], params, name)
            routes = []
            while engine.has_unfinished():
                replays = engine.stats().replays
                engine.step()
                if engine.stats().replays > replays:
                    engine._scope.wait()
                    moe = engine.runner.graphs.buffers_for(4).workspace.moe
                    routes.append(moe.topk_ids.sort(1).values.tolist())  # of the last layer
        runs.append(routes)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 23
    assert all(step[len(names)] == [-1] * 4 for step in runs[0])
    assert all(before != after for before, after in pairwise(runs[0]))
    for row, name in enumerate(names):
        assert len({tuple(step[row]) for step in runs[0]}) > 10, name
