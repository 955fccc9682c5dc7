"""An engine from its start to its end: adapters, counts, reuse, failures, close."""

import gc
import weakref

import pytest

from engine import (
    AdapterError,
    AdapterInfo,
    CapacityError,
    CaptureError,
    Engine,
    RequestError,
    SamplingParams,
    UnknownAdapterError,
)
from engine.adapter_files import read_adapter
from engine.tokenizer import load_tokenizer
from tests.api_engine import PROMPTS, SIZES, greedy, ids, run
from tests.tiny_models import save_model
from tests.tiny_tokenizer import BOS

# Adapters


def test_adapters_lists_what_is_registered(engine, paths):
    infos = engine.adapters()
    assert [info.name for info in infos] == ["a", "b"]
    first, second = infos
    assert isinstance(first, AdapterInfo)
    assert (first.rank, second.rank) == (8, 3)
    assert first.path == str(paths["a"])
    assert second.target_modules == ("down_proj", "q_proj")
    assert {first.slot, second.slot} == {0, 1}
    assert not first.pinned
    assert 0 < second.bytes < first.bytes


def test_adapters_counts_requests(engine):
    names = [engine.add_request([5, 6], greedy(4), "a") for _ in range(7)]
    engine.add_request([5, 6], greedy(4))
    assert [info.requests for info in engine.adapters()] == [7, 0]
    engine.step()
    engine.abort(names[0])
    assert [info.requests for info in engine.adapters()] == [6, 0]
    run(engine)


def test_load_and_unload_while_a_request_runs(engine, paths):
    expected = ids(engine.generate([5, 6], greedy(12), "a"))[0]
    request_id = engine.add_request([5, 6], greedy(12), "a")
    engine.step()
    info = engine.load_adapter("c", paths["b"])  # both slots are taken: into host memory
    assert (info.name, info.slot, info.requests) == ("c", None, 0)
    engine.unload_adapter("a")
    with pytest.raises(UnknownAdapterError, match="'a' is not loaded; loaded: b, c"):
        engine.add_request([5], greedy(), "a")
    assert engine.load_adapter("a", paths["b"]).rank == 3  # a new version, at once
    assert sum(info.name == "a" for info in engine.adapters()) == 2
    output = [output for output in run(engine) if output.request_id == request_id][-1]
    assert output.outputs[0].token_ids == expected
    assert output.adapter == "a"
    new = engine.generate([[5, 6]] * 2, greedy(12), ["a", "b"])
    assert ids(new)[0] == ids(new)[1] != expected
    engine.unload_adapter("c")
    engine.unload_adapter("a")
    engine.load_adapter("a", paths["a"])
    engine.unload_adapter("b")
    engine.load_adapter("b", paths["b"])
    assert [info.name for info in engine.adapters()] == ["a", "b"]


def test_of_two_loads_of_one_name_one_wins(engine, paths, monkeypatch):
    def read_while_another_loads(*args):
        monkeypatch.setattr("engine.engine.read_adapter", read_adapter)
        engine.load_adapter("c", paths["b"])
        return read_adapter(*args)

    monkeypatch.setattr("engine.engine.read_adapter", read_while_another_loads)
    with pytest.raises(AdapterError, match="'c' is already loaded"):
        engine.load_adapter("c", paths["a"])
    assert [info.name for info in engine.adapters()] == ["a", "b", "c"]
    assert engine.adapters()[2].path == str(paths["b"])
    engine.unload_adapter("c")


def test_unload_beside_completions_and_aborts(engine, oracle, paths):
    params = SamplingParams(n=7, max_tokens=9, ignore_eos=True)
    names = [engine.add_request(PROMPTS[row], params, "a") for row in range(3)]
    for row in range(12):
        names.append(engine.add_request(PROMPTS[row % 3], params, "a"))
        engine.step()
        if row % 2:
            assert engine.abort(names.pop(row // 2))
    engine.unload_adapter("a")
    with pytest.raises(UnknownAdapterError, match="'a'"):
        engine.add_request([5], adapter="a")
    draining = engine.adapters()[-1]
    assert (draining.name, draining.requests) == ("a", len(names))
    for name in names[2:]:
        assert engine.abort(name)
    last = {output.request_id: output for output in run(engine)}
    assert [len(c.token_ids) for name in names[:2] for c in last[name].outputs] == [9] * 14
    assert [info.name for info in engine.adapters()] == ["b"]
    info = engine.load_adapter("a", paths["a"])
    assert info.slot is not None
    oracle.check(engine.generate(PROMPTS[0], greedy(3, logprobs=2), "a")[0])
    engine.unload_adapter("b")
    engine.load_adapter("b", paths["b"])


def test_a_request_whose_adapter_finds_no_room_ends_alone(paths):
    sizes = {**SIZES, "max_loras": 1, "graph_batch_sizes": [1]}
    with Engine(paths["model"], **sizes, tokenizer=None) as engine:
        assert engine.load_adapter("a", paths["a"], pinned=True).pinned
        engine.load_adapter("b", paths["b"])
        broken = engine.add_request([5, 6], greedy(4), "b")
        good = engine.add_request([5, 6], greedy(4), "a")
        outputs = {output.request_id: output for output in run(engine)}
        assert isinstance(outputs[broken].error, CapacityError)
        assert "'b'" in str(outputs[broken].error)
        assert outputs[broken].finished
        assert outputs[broken].outputs[0].finish_reason == "abort"
        assert outputs[good].error is None
        assert len(outputs[good].outputs[0].token_ids) == 4


# The engine itself


def test_replays_with_and_without_adapters_count_by_batch_size(paths):
    with Engine(paths["model"], **SIZES, adapters={"a": paths["a"]}, tokenizer=None) as engine:
        for count, name in ((4, None), (6, "a"), (9, None)):
            engine.generate([5, 6], greedy(count), name)
        engine.generate([[5, 6], [7]], greedy(3), [None, "a"])
        stats = engine.stats()
        assert stats.replays_by_batch_size == {1: 3 + 5 + 8, 4: 2}
        assert stats.replays == 3 + 5 + 8 + 2


def test_stats_count(engine):
    engine.generate([5, 6], greedy(2))  # stage the one-row bucket
    before = engine.stats()
    engine.generate([5, 6], greedy(11))
    after = engine.stats()
    assert after.graphs == "tape"
    assert after.captured_batch_sizes == (1, 4)
    assert after.replays - before.replays == 10
    ones = [stats.replays_by_batch_size.get(1, 0) for stats in (before, after)]
    assert ones[1] - ones[0] == 10
    assert after.prefill_chunks - before.prefill_chunks == 1
    assert after.padded_rows == before.padded_rows
    assert after.eager_fallbacks == before.eager_fallbacks
    assert after.host_to_device_copies - before.host_to_device_copies <= 5
    assert after.kv_pages_used == 0
    assert after.kv_pages_free == before.kv_pages_free > 0
    assert (after.adapter_loads, after.adapter_evictions) == (
        before.adapter_loads,
        before.adapter_evictions,
    )
    assert after.capture_seconds > 0
    assert after.capture_bytes >= 0


def test_stats_count_padding_and_fallbacks(engine):
    before = engine.stats()
    engine.generate([[5, 6]] * 3, greedy(5))
    padded = engine.stats()
    assert padded.padded_rows - before.padded_rows == 4
    engine.generate([[5, 6]] * 5, greedy(5))  # above the largest captured size
    assert engine.stats().eager_fallbacks - padded.eager_fallbacks == 4
    assert engine.stats().replays == padded.replays


def test_stats_count_pages_while_a_request_runs(engine):
    free = engine.stats().kv_pages_free
    engine.add_request([5] * 20, greedy(4))
    engine.step()
    stats = engine.stats()
    assert stats.kv_pages_used >= 2
    assert stats.kv_pages_used + stats.kv_pages_free == free
    run(engine)


def test_a_used_engine_gives_the_bits_of_a_fresh_one(engine, paths):
    params = SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True, n=2)
    adapters = {name: paths[name] for name in "ab"}

    def bits(engine):
        outputs = engine.generate(PROMPTS, params, ["a", None, "b"])
        return [output.outputs for output in outputs]

    with Engine(paths["model"], adapters=adapters, **SIZES, enable_prefix_caching=False) as fresh:
        expected = bits(fresh)
    engine.generate([[9] * 40, [7]], SamplingParams(max_tokens=3), adapters="b")
    aborted = engine.add_request([5, 6], greedy(50), "a")
    engine.step()
    engine.abort(aborted)
    assert bits(engine) == expected
    assert [output.finished for output in engine.step()] == [True]  # the aborted one


def test_a_failed_launch_loses_no_request(engine, oracle, monkeypatch):
    params = greedy(8, logprobs=2)
    names = [engine.add_request(PROMPTS[0], params, "a"), engine.add_request(PROMPTS[1], params)]
    outputs = {output.request_id: output for _ in range(4) for output in engine.step()}
    names.append(engine.add_request(PROMPTS[2], params, "b"))

    def refuse(rows, stage, lora):
        raise CaptureError("positions: not the tensor that was captured")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.graphs, "run", refuse)
        with pytest.raises(CaptureError, match="positions"):
            engine.step()
    outputs |= {output.request_id: output for output in run(engine)}
    for name in names:
        assert outputs[name].error is None
        assert len(outputs[name].outputs[0].token_ids) == 8
        oracle.check(outputs[name])


@pytest.mark.parametrize("tokenizer", ["directory", "object"])
def test_tokenizer_may_be_given(paths, tmp_path, tokenizer):
    bare = save_model("llama", tmp_path)
    given = paths["model"] if tokenizer == "directory" else load_tokenizer(paths["model"])
    with Engine(bare, tokenizer=given, **{**SIZES, "graph_batch_sizes": [1]}) as engine:
        output = engine.generate("ba", greedy(5))[0]
        assert output.prompt_token_ids[0] == BOS
        assert output.outputs[0].text == engine.tokenizer.decode(output.outputs[0].token_ids)


def test_close(paths):
    adapters = {"a": paths["a"]}
    with Engine(paths["model"], adapters=adapters, tokenizer=None, **SIZES) as engine:
        output = engine.generate([5, 6], greedy(3), "a")[0]  # ids need no tokenizer
        assert output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(RequestError, match="tokenizer"):
            engine.generate("ba")
        with pytest.raises(RequestError, match=r"stop=.* tokenizer"):
            engine.generate([5], SamplingParams(stop="x"))
        engine.add_request([5, 6], greedy(3), request_id="lost")
        outputs = engine.stream([5, 6], greedy(3))
        next(outputs)
        held = [
            weakref.ref(tensor)
            for tensor in (
                *engine.memory.kv_cache.tensors().values(),
                *engine.memory.workspace.tensors().values(),
                engine.memory.adapters.arena,
                engine.runner._step._decoder.weights.embedding,
            )
        ]
        assert all(ref() is not None for ref in held)
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    engine.close()  # again
    assert not engine.has_unfinished()
    assert engine.abort("lost") is False
    for call in (
        lambda: engine.generate([5]),
        lambda: engine.generate([]),
        lambda: engine.stream([5]),
        lambda: engine.add_request([5]),
        lambda: engine.step(),
        lambda: engine.load_adapter("b", paths["b"]),
        lambda: engine.unload_adapter("a"),
        lambda: engine.adapters(),
        lambda: engine.stats(),
        lambda: engine.__enter__(),
        lambda: next(outputs),
    ):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_the_with_block_closes_on_an_error(paths):
    engine = Engine(paths["model"], tokenizer=None, **{**SIZES, "graph_batch_sizes": [1]})
    with pytest.raises(KeyError, match="ours"), engine:
        raise KeyError("ours")
    with pytest.raises(RequestError, match="closed"):
        engine.step()


def test_every_row_of_the_budget_says_what_it_took(paths):
    with Engine(paths["model"], tokenizer=None, **{**SIZES, "graph_batch_sizes": [1]}) as engine:
        rows = {row.name: row for row in engine.memory.budget.rows}
        assert rows["weights"].actual_bytes == rows["weights"].planned_bytes
        assert all(row.actual_bytes is not None for row in rows.values())
