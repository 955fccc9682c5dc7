"""Engines that cannot be built, and what cannot fit into one: the error names the fault."""

import shutil

import pytest
import torch

from engine import (
    AdapterError,
    CapacityError,
    CheckpointError,
    Engine,
    EngineError,
    RequestError,
    SamplingParams,
    UnknownAdapterError,
)
from engine.shown import shown
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model
from tests.tiny_tokenizer import save_tokenizer

SIZES = {
    "device": "cpu",
    "max_batch_size": 4,
    "max_seq_len": 128,
    "prefill_chunk_tokens": 32,
    "max_lora_rank": 8,
    "max_loras": 2,
    "graphs": "off",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("engines"), build_model("llama")
    return {
        "model": save_tokenizer(save_model("llama", folder)),
        "a": save_adapter(model, folder / "a", 8, seed=1),
        "b": save_adapter(model, folder / "b", 3, ("q_proj", "down_proj"), seed=2),
        "rank 9": save_adapter(model, folder / "rank 9", 9, seed=3),
    }


KEYWORDS = [
    ({"max_batch": 4}, ["max_batch", "max_batch_size", "tokenizer", "adapters"]),
    ({"device": "tpu"}, ["device='tpu'", "'cpu'", "'cuda'"]),
    ({"device": 0}, ["device=0", "'cuda:N'"]),
    ({"device": ""}, ["device=''", "'cpu'"]),
    ({"device": "cpu:1"}, ["device='cpu:1'", "'cpu'"]),
    ({"device": "cuda:99"}, ["device='cuda:99'", "CUDA devices are present"]),
    ({"dtype": "int8"}, ["dtype='int8'", "'bfloat16'"]),
    ({"dtype": torch.float32}, ["dtype=torch.float32", "'float32'"]),
    ({"graphs": "on"}, ["graphs='on'", "'tape'"]),
    ({"graphs": "cuda"}, ["graphs='cuda'", "cpu", "'tape'"]),
    ({"graph_batch_sizes": 4}, ["graph_batch_sizes=4", "list"]),
    ({"graph_batch_sizes": []}, ["graph_batch_sizes=[]", "is empty"]),
    ({"graph_batch_sizes": [0]}, ["graph_batch_sizes", "0", "1 to max_batch_size=4"]),
    ({"graph_batch_sizes": [1, 5]}, ["graph_batch_sizes", "5", "max_batch_size=4"]),
    ({"graph_batch_sizes": [1.0]}, ["graph_batch_sizes", "1.0", "whole numbers"]),
    ({"max_batch_size": 0}, ["max_batch_size=0", "from 1"]),
    ({"max_batch_size": "4"}, ["max_batch_size='4'", "whole number"]),
    ({"max_seq_len": 1}, ["max_seq_len=1", "from 2"]),
    ({"max_seq_len": 2049}, ["max_seq_len=2049", "2048"]),
    ({"max_loras": -1}, ["max_loras=-1", "from 0"]),
    ({"max_lora_rank": 0}, ["max_lora_rank=0", "from 1"]),
    ({"lora_memory_bytes": 0}, ["lora_memory_bytes=0", "from 1"]),
    ({"max_cpu_loras": 0}, ["max_cpu_loras=0", "from 1"]),
    ({"memory_fraction": 0}, ["memory_fraction=0", "at most 1"]),
    ({"memory_fraction": 1.5}, ["memory_fraction=1.5", "at most 1"]),
    ({"memory_fraction": float("nan")}, ["memory_fraction=nan", "at most 1"]),
    ({"memory_fraction": "half"}, ["memory_fraction='half'", "number"]),
    ({"kv_cache_tokens": 0}, ["kv_cache_tokens=0", "from 1"]),
    ({"prefill_chunk_tokens": 0}, ["prefill_chunk_tokens=0", "from 1"]),
    ({"enable_prefix_caching": 1}, ["enable_prefix_caching=1", "True, False"]),
    ({"tensor_parallel_size": 0}, ["tensor_parallel_size=0", "from 1"]),
    ({"tensor_parallel_size": 3}, ["tensor_parallel_size=3"]),
    ({"lora_backend": "cutlass"}, ["lora_backend='cutlass'", "'sgemm'"]),
    ({"lora_backend": "sgmv"}, ["lora_backend='sgmv'", "accepted: 'auto', 'torch', 'sgemm'"]),
    ({"seed": 0.5}, ["seed=0.5", "whole number"]),
    ({"seed": None}, ["seed=None", "whole number"]),
    ({"adapters": ["a"]}, ["adapters=['a']", "names"]),
    ({"tokenizer": 5}, ["tokenizer=5", "path"]),
    ({"max_loras": 10**5000}, ["max_loras=<integer of about 5001 digits>", "from 0"]),
    ({"device": 10**5000}, ["device=<integer of about"]),
    ({"memory_fraction": 10**5000}, ["memory_fraction=<integer of about", "at most 1"]),
    ({"graph_batch_sizes": [10**5000]}, ["graph_batch_sizes", "<integer of about", "1 to max"]),
    ({"tokenizer": 10**5000}, ["tokenizer=<integer of about", "path"]),
    ({"adapters": -(10**5000)}, ["adapters=-<integer of about", "names"]),
    ({"debug": "yes"}, ["debug='yes'", "True, False"]),
]


@pytest.mark.parametrize(("keywords", "parts"), KEYWORDS, ids=lambda v: shown(v)[:40])
def test_bad_keywords_name_themselves_and_what_is_accepted(paths, keywords, parts):
    with pytest.raises(RequestError) as caught:
        Engine(paths["model"], **{**SIZES, **keywords})
    assert isinstance(caught.value, EngineError)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_keywords_are_keywords(paths):
    with pytest.raises(TypeError):
        Engine(paths["model"], {"a": paths["a"]})


@pytest.mark.parametrize("model", [None, 5, ""])
def test_the_model_must_be_a_path(model):
    with pytest.raises(RequestError, match=f"model={model!r}"):
        Engine(model, device="cpu")


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.6)])


def model_copy(paths, tmp_path, change):
    path = shutil.copytree(paths["model"], tmp_path / "model")
    change(path)
    return path


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda path: shutil.rmtree(path), ["model", "no such directory"]),
        (lambda path: cut(path / "model.safetensors"), ["model.safetensors", "complete"]),
        (lambda path: (path / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
        (lambda path: (path / "config.json").unlink(), ["config.json"]),
        (lambda path: cut(path / "config.json"), ["config.json", "JSON"]),
        (lambda path: cut(path / "tokenizer.json"), ["model", "tokenizer"]),
    ],
    ids=["missing", "cut", "no weights", "no config", "cut config", "cut tokenizer"],
)
def test_broken_checkpoints_name_the_file(paths, tmp_path, change, parts):
    path = model_copy(paths, tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        Engine(path, **SIZES)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_an_adapter_that_fails_at_the_start_closes_the_engine(paths, monkeypatch):
    closed, close = [], Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine) or close(engine))
    with pytest.raises(AdapterError, match="rank 9"):
        Engine(paths["model"], adapters={"a": paths["a"], "c": paths["rank 9"]}, **SIZES)
    assert len(closed) == 1


# Memory that cannot be had


@pytest.fixture(scope="module")
def small(paths):
    """Two pages of KV, room for one of the small adapters, one host place."""
    sizes = {**SIZES, "kv_cache_tokens": 32, "lora_memory_bytes": 200_000}
    with Engine(paths["model"], tokenizer=None, **sizes) as engine:
        yield engine


def test_requests_that_can_never_fit(small):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    fits = [5] * 30  # the last token drawn needs no place
    assert len(small.generate(fits, params)[0].outputs[0].token_ids) == 3
    with pytest.raises(CapacityError) as caught:
        small.generate([fits, [*fits, 5]], params)
    for part in ("request", "3 KV pages", "has 2", "kv_cache_tokens"):
        assert part in str(caught.value)
    assert not small.has_unfinished()
    assert small.stats().kv_pages_used == 0


def test_adapters_that_can_never_fit(small, paths):
    small.load_adapter("b", paths["b"])
    with pytest.raises(CapacityError, match=r"'a' takes \d+ bytes.*lora_memory_bytes"):
        small.load_adapter("a", paths["a"])
    assert [info.name for info in small.adapters()] == ["b"]
    output = small.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True), "b")[0]
    assert len(output.outputs[0].token_ids) == 3


def test_an_engine_without_adapter_slots(paths):
    with Engine(paths["model"], **{**SIZES, "max_loras": 0}) as engine:
        with pytest.raises(CapacityError, match=r"'a'.*max_loras=0"):
            engine.load_adapter("a", paths["a"])
        with pytest.raises(UnknownAdapterError, match="'a' is not loaded; loaded: none"):
            engine.add_request([5], adapter="a")
        assert len(engine.generate("ba", SamplingParams(max_tokens=2, ignore_eos=True))) == 1
