"""Rows of a batch and the graph they run in: padding, mixes with the base model, buckets.

Each row is judged by the oracle of its own adapter at every position.
"""

import pytest
import torch

from engine import Engine, RequestError
from engine.request import Sequence
from graphs.cuda_graph import CudaStepGraph
from graphs.graph_key import GraphKey
from graphs.tape_graph import TapeStepGraph
from memory.page_pool import DUMMY_PAGE
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of, run_to_the_end
from tests.engine.backends import BACKENDS
from tests.engine.programme import as_bits
from tests.random_adapters import ALL

ADAPTERS = {
    "a": {"rank": 8},
    "b": {"rank": 5, "targets": ("q_proj", "o_proj"), "strength": 4.0},
    "c": {"rank": 12, "targets": ("gate_proj", "up_proj", "down_proj"), "strength": 4.0},
}
MIX = ["a", None, "b", "c", "a", None, "c", "b"]
SUCCESSION = [
    ["a", "a"],
    [None, None],
    ["a", None],
    [None, "a"],
    ["a", None, "b", "a", None],
    ["a", "a", "a", "a"],
    [None, None, None, None],
    ["b", "a", "b"],
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return AdaptedModel.make("llama", tmp_path_factory.mktemp("llama"), ADAPTERS)


def prompts_for(names):
    return [prompt_of(3 + row % 7, row) for row in range(len(names))]


def sequence_of(engine: Engine, request_id: str) -> Sequence:
    return next(s for s in engine._scheduler.running if s.request.request_id == request_id)


def kv_cache(engine: Engine) -> torch.Tensor:
    """[pages, page size, all of a token], a copy."""
    engine._scope.wait()  # its stream is not the one that copies here
    (cache,) = engine.memory.kv_cache.tensors().values()  # [2, layers, pages, page size, …]
    return cache.permute(2, 3, 0, 1, 4, 5).flatten(2).cpu().clone()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_steps_leave_the_kv_of_an_idle_request_alone(llama, backend):
    options = {"max_batch_size": 17, "graph_batch_sizes": [1, 4, 8, 16]}
    with llama.engine(backend, **options) as engine:
        engine.add_request(prompt_of(20), greedy(24), "a", "idle")
        while not (held := [s for s in engine._scheduler.running if len(s.output_ids) > 4]):
            engine.step()
        engine._scheduler.running.remove(held[0])  # alive, with slot and pages, and in no step
        before = kv_cache(engine)[held[0].pages]
        for batch in (16, 3, 5):
            names = (MIX + MIX)[:batch]
            llama.check(engine.generate(prompts_for(names), greedy(6), names), backend)
        assert torch.equal(kv_cache(engine)[held[0].pages], before)
        assert before.any()
        engine._scheduler.running.append(held[0])
        llama.check([run_to_the_end(engine)["idle"]], backend)
        stats = engine.stats()
        assert {1, 4, 8, 16} == set(stats.replays_by_batch_size)
        assert stats.padded_rows > 0
        assert stats.eager_fallbacks == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_step_writes_one_token_of_each_row_and_the_dummy_page(llama, backend):
    names = ["a", None, "b"]
    with llama.engine(backend, graph_batch_sizes=[8]) as engine:
        ids = [
            engine.add_request(prompt, greedy(30), name)
            for prompt, name in zip(prompts_for(names), names, strict=True)
        ]
        for _ in range(4):
            engine.step()
        size = engine.memory.kv_cache.page_size
        rows = [sequence_of(engine, request_id) for request_id in ids]
        for _ in range(20):  # over the end of a page
            positions = [row.next_position for row in rows]
            before = kv_cache(engine)
            engine.step()
            written = {
                (row.pages[position // size], position % size)
                for row, position in zip(rows, positions, strict=True)
            }
            changed = (kv_cache(engine) != before).any(2).nonzero().tolist()
            assert {(page, at) for page, at in changed if page != DUMMY_PAGE} == written
        llama.check(list(run_to_the_end(engine).values()), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_and_without_adapter_follow_each_other(llama, backend):
    with llama.engine(backend, graph_batch_sizes=[2, 4], max_batch_size=5) as engine:
        for names in SUCCESSION:
            outputs = engine.generate(prompts_for(names), greedy(8), names)
            llama.check(outputs, backend)
            for output in outputs:
                (completion,) = output.outputs
                stopped = completion.token_ids[-1] == 2  # which the oracle would choose too
                assert completion.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [5, 20, 70])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_rows_of_the_base_model_keep_their_bits_as_adapters_join_and_leave(
    tmp_path, name, rows, backend
):
    """From the graph without the LoRA path to the one with it and back, in steps of few rows, of
    more than a tile of them, and of more than the own product takes."""
    model = AdaptedModel.make(name, tmp_path, ADAPTERS)
    options = {"dtype": "bfloat16", "max_batch_size": rows, "graph_batch_sizes": [rows]}
    base, logs = rows // 2, []
    with model.engine(backend, **options, prefill_chunk_tokens=512, debug=False) as engine:
        for names in ((None, None), ("a", "b"), ("c", None)):
            for row in range(base):
                engine.add_request(prompt_of(4, row), greedy(10, ignore_eos=True), None, f"{row}")
            outputs = {}
            for _ in range(4):
                outputs |= {output.request_id: output for output in engine.step()}
            for row in range(base, rows - 1):
                engine.add_request(
                    prompt_of(4, row), greedy(3, ignore_eos=True), names[row % 2], f"{row}"
                )
            outputs |= run_to_the_end(engine)
            logs.append([as_bits(outputs[f"{row}"]) for row in range(base)])
        both = engine.runner.stats.replays
        assert min(both[GraphKey(rows, lora)] for lora in (True, False)) > 3
    assert len(logs[0]) == base
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mix_changes_as_rows_end(llama, backend):
    """Rows leave one by one, so that compositions follow each other without a prefill between:
    [a, –, b, a, –, c], [a, –, b, a, c], … and last the base model alone."""
    names = ["a", None, "b", "a", None, "c"]
    params = [greedy(count, ignore_eos=True) for count in (12, 21, 9, 6, 3, 15)]
    with llama.engine(backend) as engine:
        outputs = engine.generate(prompts_for(names), params, names)
        assert set(engine.stats().replays_by_batch_size) == {1, 2, 4, 8}
    llama.check(outputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_adapters_loaded_after_capture(tmp_path, name, backend, monkeypatch):
    """Nothing is loaded at capture; then an adapter for each module alone, over 50 tokens."""
    adapters = {target: {"rank": 4, "targets": (target,), "strength": 6.0} for target in ALL}
    model = AdaptedModel.make(name, tmp_path, adapters)
    names = [None, *ALL]
    with model.engine(backend, load=(), max_loras=7, graph_batch_sizes=[8]) as engine:

        def refuse(self, fn):
            raise AssertionError("captured while serving")

        monkeypatch.setattr(TapeStepGraph, "capture", refuse)
        monkeypatch.setattr(CudaStepGraph, "capture", refuse)
        for adapter, path in model.adapters.items():
            engine.load_adapter(adapter, path)
        outputs = engine.generate(prompts_for(names), greedy(50, ignore_eos=True), names)
        stats = engine.stats()
        assert stats.captured_batch_sizes == (8,)
        assert stats.replays >= 49
        assert stats.eager_fallbacks == 0
    model.check(outputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_more_than_the_largest_bucket(llama, backend):
    options = {"max_batch_size": 6, "graph_batch_sizes": [1, 4]}
    with llama.engine(backend, **options) as engine:
        for batch, runs_eagerly in ((4, False), (5, True), (3, False)):
            before = engine.stats()
            outputs = engine.generate(prompts_for(MIX[:batch]), greedy(6), MIX[:batch])
            llama.check(outputs, backend)
            stats = engine.stats()
            assert (stats.eager_fallbacks > before.eager_fallbacks) == runs_eagerly


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_up_to_the_last_position(llama, backend):
    """63 + 1 and 1 + 63 tokens of 64; one more is refused, and nothing else suffers."""
    names = ["a", None, "b", None]
    prompts = [prompt_of(63, 1), prompt_of(63, 2), prompt_of(1, 3), prompt_of(1, 4)]
    params = [greedy(count, ignore_eos=True) for count in (1, 1, 63, 63)]
    with llama.engine(backend, max_seq_len=64, prefill_chunk_tokens=40) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, params, names)
            assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
            llama.check(outputs, backend)
            for prompt in prompts[::2]:
                with pytest.raises(RequestError):
                    engine.generate(prompt, greedy(65 - len(prompt)), "a")


@pytest.mark.parametrize("backend", BACKENDS)
def test_contexts_grow_over_pages_to_the_end_of_the_block_table(llama, backend):
    """Prompts around the page size of 16, decoded to `max_seq_len`, pages taken one by one."""
    names = ["a", None, "b", "c"]
    lengths = [13, 15, 16, 17]
    prompts = [prompt_of(length, length) for length in lengths]
    params = [greedy(96 - length, ignore_eos=True) for length in lengths]
    options = {"max_seq_len": 96, "graph_batch_sizes": [4], "kv_cache_tokens": 4 * 96}
    with llama.engine(backend, **options) as engine:
        outputs = engine.generate(prompts, params, names)
        stats = engine.stats()
        assert (stats.eager_fallbacks, stats.preemptions, stats.kv_pages_used) == (0, 0, 0)
    llama.check(outputs, backend)
