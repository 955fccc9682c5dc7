"""Adapters that come, go, fail and queue while requests run."""

import random
import re
import time

import pytest

from engine import AdapterError, SamplingParams, UnknownAdapterError
from engine.scheduler import MAX_OVERTAKEN
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of, run_to_the_end
from tests.engine.backends import BACKENDS
from tests.engine.broken_adapters import save_broken, write_copy
from tests.engine.programme import as_bits

ADAPTERS = {
    "a": {"rank": 8},
    "b": {"rank": 5},
    "c": {"rank": 3, "targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "strength": 4.0},
    "d": {"rank": 16, "targets": ("gate_proj", "up_proj", "down_proj"), "strength": 4.0},
    "e": {"rank": 12},
    "q and v": {"rank": 4, "targets": ("q_proj", "v_proj"), "strength": 6.0},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return AdaptedModel.make("llama", tmp_path_factory.mktemp("llama"), ADAPTERS)


def prompts_for(names):
    return [prompt_of(3 + row % 6, row) for row in range(len(names))]


def add_all(engine, names, params):
    """Queue a request of each name; `params` are one for all, or by row."""
    each = params if isinstance(params, list) else [params] * len(names)
    rows = zip(prompts_for(names), each, names, strict=True)
    return [engine.add_request(*row) for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_loads_beside_live_streams(llama, backend, tmp_path):
    """Each fails alone and by name; the streams keep every bit of an undisturbed run."""
    broken = save_broken(llama.adapters["q and v"], tmp_path)
    names = ["a", None, "b", "a"]
    runs = []
    for disturbed in (False, True):
        with llama.engine(backend, load=("a", "b")) as engine:
            add_all(engine, names, greedy(5 * len(broken), ignore_eos=True))
            outputs = {}
            for name in broken:
                for _ in range(3):
                    outputs |= {output.request_id: output for output in engine.step()}
                listed = engine.adapters()
                path, message = broken[name]
                if disturbed:
                    with pytest.raises(AdapterError, match=message):
                        engine.load_adapter(name, path)
                    assert engine.adapters() == listed
            outputs |= run_to_the_end(engine)
            llama.check([outputs[key] for key in sorted(outputs)], backend)
            runs.append([as_bits(outputs[key]) for key in sorted(outputs)])
            if disturbed:
                engine.load_adapter("q and v", llama.adapters["q and v"])
                live = engine.generate(prompts_for("123"), greedy(6), ["a", None, "q and v"])
                llama.check(live, backend)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace("model.layers", "model.model.layers"),
        lambda key: key.replace("model.layers", "model.decoder.layers"),
    ],
    ids=["_orig_mod", "no prefix", "nested", "nested in another"],
)
def test_other_key_layouts_are_bound_whole_or_refused(llama, backend, rename, tmp_path):
    def change(config, tensors):
        return {rename(key): tensor for key, tensor in tensors.items()}

    path = write_copy(llama.adapters["q and v"], tmp_path / "renamed", change)
    with llama.engine(backend, load=("a",), graph_batch_sizes=[2]) as engine:
        loaded, refusal = ["a"], None
        try:
            engine.load_adapter("q and v", path)
            loaded.append("q and v")
        except AdapterError as error:
            refusal = str(error)
        assert refusal is None or re.search(r"self_attn\.[qv]_proj\.lora_", refusal)
        assert [info.name for info in engine.adapters()] == loaded
        for name in loaded:
            llama.check(engine.generate(prompts_for("12"), greedy(6), [name, None]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unload_while_decoding(llama, backend):
    """Running requests finish on the old weights, new ones are refused, the name is free."""
    names = ["a", "b", None, "a"]
    with llama.engine(backend, load=("a", "b"), max_loras=2) as engine:
        old = add_all(engine, names, greedy(24, ignore_eos=True))
        for _ in range(6):
            engine.step()
        started = time.perf_counter()
        engine.unload_adapter("a")
        assert time.perf_counter() - started < 10
        for ask in (engine.add_request, engine.generate, engine.stream):
            with pytest.raises(UnknownAdapterError, match="'a'"):
                ask([5, 6], greedy(4), "a")
        with pytest.raises(UnknownAdapterError, match="'a'"):
            engine.unload_adapter("a")
        assert {info.name: info.requests for info in engine.adapters()} == {"a": 2, "b": 1}
        engine.load_adapter("a", llama.adapters["c"])  # another version of the name, no slot yet
        new = add_all(engine, ["a", "b"], greedy(12, ignore_eos=True))
        outputs = run_to_the_end(engine)
        judged = ["a", "b", None, "a", "c", "b"]
        llama.check([outputs[key] for key in (*old, *new)], backend, judged)
        assert sorted(info.name for info in engine.adapters()) == ["a", "b"]
        assert engine.stats().kv_pages_used == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_unload_after_and_during_sixteen_completions(llama, backend):
    params = SamplingParams(n=16, max_tokens=6, logprobs=3, ignore_eos=True, seed=7)
    options = {"max_batch_size": 16, "graph_batch_sizes": [8, 16], "max_loras": 2}
    with llama.engine(backend, load=("a",), **options) as engine:
        for turn in range(3):
            outputs = engine.generate(prompt_of(5, turn), params, "a")
            assert len({tuple(completion.token_ids) for completion in outputs[0].outputs}) > 1
            llama.check(outputs, backend, is_greedy=False)
        engine.unload_adapter("a")
        assert engine.adapters() == []
        engine.load_adapter("b", llama.adapters["b"])
        engine.add_request(prompt_of(5), params, "b", "many")
        for _ in range(3):
            engine.step()
        engine.unload_adapter("b")
        llama.check([run_to_the_end(engine)["many"]], backend, is_greedy=False)
        assert engine.adapters() == []
        for name in ("c", "d"):  # both slots, for good
            engine.load_adapter(name, llama.adapters[name], pinned=True)
        llama.check(engine.generate(prompts_for("123"), greedy(6), ["c", None, "d"]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unload_after_aborts_at_random_points(llama, backend):
    draw = random.Random(3)
    options = {"max_batch_size": 4, "graph_batch_sizes": [4], "prefill_chunk_tokens": 8}
    with llama.engine(backend, load=("a",), max_loras=1, **options) as engine:
        outputs, alive = {}, []

        def step():
            for output in engine.step():
                outputs[output.request_id] = output
                if output.finished and output.request_id in alive:
                    alive.remove(output.request_id)

        for turn in range(20):
            for index in range(draw.randint(1, 2)):
                prompt, params = prompt_of(draw.randint(1, 30), turn), greedy(30, ignore_eos=True)
                alive.append(engine.add_request(prompt, params, "a", f"{turn}.{index}"))
            for _ in range(draw.randint(0, 5)):
                step()
            victim = draw.choice(alive)
            assert engine.abort(victim)
            assert not engine.abort(victim)
            step()
            assert outputs[victim].finished, "whoever waits for it is told"
            assert outputs[victim].outputs[0].finish_reason == "abort"
        outputs |= run_to_the_end(engine)
        assert not engine.has_unfinished()
        stream = engine.stream(prompt_of(4), greedy(40, ignore_eos=True), "a")
        next(stream)
        stream.close()  # an abort, too
        assert [info.requests for info in engine.adapters()] == [0]
        spoken = [output for output in outputs.values() if output.num_tokens]
        assert len(spoken) > 5
        llama.check(spoken, backend)
        engine.unload_adapter("a")
        assert engine.adapters() == []
        engine.load_adapter("b", llama.adapters["b"], pinned=True)
        llama.check(engine.generate(prompts_for("12"), greedy(6), ["b", None]), backend)
        assert engine.stats().kv_pages_used == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_slots_and_the_base_in_one_step(llama, backend):
    names = ["a", None, "b"]
    with llama.engine(backend, max_loras=2, graph_batch_sizes=[3]) as engine:
        outputs = engine.generate(prompts_for(names), greedy(10, ignore_eos=True), names)
        llama.check(outputs, backend)
        assert engine.stats().replays == 9, "one replay a token: nobody waited for a slot"


@pytest.mark.parametrize("backend", BACKENDS)
def test_five_adapters_over_many_requests_and_two_slots(llama, backend):
    draw = random.Random(4)
    names = [draw.choice(["a", "b", "c", "d", "e", None]) for _ in range(200)]
    params = [greedy(draw.randint(2, 6), ignore_eos=True) for _ in names]
    with llama.engine(backend, max_loras=2) as engine:
        outputs = engine.generate(prompts_for(names), params, names)
        stats = engine.stats()
        assert stats.adapter_evictions >= 3
        assert [info.requests for info in engine.adapters()] == [0] * len(ADAPTERS)
    llama.check(outputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_adapter_does_not_starve_another(llama, backend):
    """One slot and the queue A, B, base, A × many: B waits its turn and no longer, others go by."""
    many = MAX_OVERTAKEN + 40
    names = ["a", "b", None, *["a"] * many]
    params = [
        greedy(2 + row % 5, ignore_eos=True) for row in range(len(names))
    ]  # never all at once
    options = {"max_loras": 1, "max_batch_size": 4, "graph_batch_sizes": [4]}
    with llama.engine(backend, **options) as engine:
        first, behind, base, *rest = add_all(engine, names, params)
        ends, outputs = [], {}
        while engine.has_unfinished():
            for output in engine.step():
                outputs[output.request_id] = output
                if output.finished:
                    ends.append(output.request_id)
    assert len(ends) == len(names)
    assert ends.index(base) < 4, "the base model needs no slot"
    assert 4 < ends.index(behind) <= MAX_OVERTAKEN + 4, "passed by some, and by no more than that"
    llama.check([outputs[key] for key in (first, behind, base, *rest[-8:])], backend)
