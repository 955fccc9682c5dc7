"""What cannot be served: the right error, a message that names the fault, and nobody disturbed."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    AdapterError,
    CapacityError,
    Engine,
    EngineError,
    RequestError,
    SamplingParams,
    UnknownAdapterError,
)
from tests.oracle import Oracle
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model
from tests.tiny_tokenizer import save_tokenizer

SIZES = {
    "device": "cpu",
    "max_batch_size": 4,
    "max_seq_len": 128,
    "graph_batch_sizes": [1, 4],
    "prefill_chunk_tokens": 32,
    "kv_cache_tokens": 16 * 32,
    "max_lora_rank": 8,
    "max_loras": 2,
    "max_cpu_loras": 3,
}
ALSO_A = {
    RequestError: ValueError,
    UnknownAdapterError: KeyError,
    AdapterError: ValueError,
    CapacityError: RuntimeError,
}


def cut(path, share=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def adapter_copy(paths, name, change):
    """A copy of adapter a, changed."""
    path = shutil.copytree(paths["a"], paths["folder"] / name)
    change(path)
    return path


def edit_config(**values):
    def change(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def edit_tensors(change):
    def rewrite(path):
        file = path / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


@pytest.fixture(scope="module")
def paths(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    paths = {
        "folder": folder,
        "model": save_tokenizer(save_model("llama", folder)),
        "a": save_adapter(model, folder / "a", 8, seed=1),
        "b": save_adapter(model, folder / "b", 3, ("q_proj", "down_proj"), seed=2),
        "rank 9": save_adapter(model, folder / "rank 9", 9, seed=3),
        "pattern": save_adapter(model, folder / "pattern", 4, rank_pattern={"v_proj": 9}),
    }
    q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"

    def widen(tensors):
        tensors[q0 + "A.weight"] = torch.ones(8, 200)

    def deepen(tensors):
        for half in "AB":
            key = f"{q0}{half}.weight"
            tensors[key.replace("layers.0", "layers.3")] = tensors[key].clone()

    def halve(tensors):
        del tensors[q0 + "B.weight"]

    changes = {
        "wide": edit_tensors(widen),
        "deep": edit_tensors(deepen),
        "half": edit_tensors(halve),
        "cut": lambda path: cut(path / "adapter_model.safetensors"),
        "no config": lambda path: (path / "adapter_config.json").unlink(),
        "no tensors": lambda path: (path / "adapter_model.safetensors").unlink(),
        "no json": lambda path: (path / "adapter_config.json").write_text("{"),
        "dora": edit_config(use_dora=True),
    }
    return paths | {name: adapter_copy(paths, name, change) for name, change in changes.items()}


def good():
    return SamplingParams(max_tokens=4)


# Each call on a running engine: what it must raise, and what its message must name.
CALLS = {
    "text with half a character": (
        lambda e, p: e.add_request("\ud800"),
        RequestError,
        ["prompt", "Unicode"],
    ),
    "empty list": (lambda e, p: e.add_request([]), RequestError, ["prompt", "empty"]),
    "one empty of two": (
        lambda e, p: e.generate([[5], []], good()),
        RequestError,
        ["prompts[1]", "empty"],
    ),
    "no prompt": (lambda e, p: e.add_request(None), RequestError, ["prompt", "None"]),
    "a number": (lambda e, p: e.generate(5), RequestError, ["prompts", "5"]),
    "bytes": (lambda e, p: e.generate(b"ba"), RequestError, ["prompts", "b'ba'"]),
    "bytes in a list": (lambda e, p: e.generate([b"ba"]), RequestError, ["prompts[0]", "b'ba'"]),
    "floats": (lambda e, p: e.add_request([5, 6.5]), RequestError, ["prompt", "6.5", "token id"]),
    "bools": (lambda e, p: e.generate([[5], [True]]), RequestError, ["prompts[1]", "True"]),
    "text among ids": (lambda e, p: e.generate([[5, "ba"]]), RequestError, ["prompts[0]", "'ba'"]),
    "id above": (lambda e, p: e.add_request([5, 515]), RequestError, ["prompt", "515", "0 to 514"]),
    "id below": (lambda e, p: e.stream([-1]), RequestError, ["prompt", "-1", "0 to 514"]),
    "too long": (
        lambda e, p: e.generate([[5], [5] * 125], good()),
        RequestError,
        ["prompts[1]", "125", "max_tokens=4", "129", "max_seq_len=128"],
    ),
    "text too long": (
        lambda e, p: e.add_request("ba do " * 200, good()),
        RequestError,
        ["prompt", "max_seq_len=128"],
    ),
    "parameters as a dict": (
        lambda e, p: e.add_request([5], {"max_tokens": 4}),
        RequestError,
        ["sampling_params", "max_tokens", "SamplingParams"],
    ),
    "parameters in a list of another length": (
        lambda e, p: e.generate([[5], [6]], [good()] * 3),
        RequestError,
        ["sampling_params", "3", "2 prompts"],
    ),
    "parameters of a wrong kind in a list": (
        lambda e, p: e.generate([[5], [6]], [good(), 4]),
        RequestError,
        ["sampling_params", "4", "SamplingParams"],
    ),
    "stop token out of range": (
        lambda e, p: e.add_request([5], replace(good(), stop_token_ids=[3, 515])),
        RequestError,
        ["stop_token_ids", "515", "0 to 514"],
    ),
    "bias out of range": (
        lambda e, p: e.add_request([5], replace(good(), logit_bias={600: 1.0})),
        RequestError,
        ["logit_bias", "600", "0 to 514"],
    ),
    "bad parameter": (
        lambda e, p: e.add_request([5], SamplingParams(top_p=2.0)),
        RequestError,
        ["top_p=2.0", "0 to 1"],
    ),
    "unknown parameter": (
        lambda e, p: e.add_request([5], SamplingParams(beam_width=2)),
        RequestError,
        ["beam_width", "max_tokens", "logit_bias"],
    ),
    "too many logprobs": (
        lambda e, p: e.add_request([5], SamplingParams(logprobs=21)),
        RequestError,
        ["logprobs=21", "0 to 20"],
    ),
    "id in use": (
        lambda e, p: e.add_request([5], good(), request_id="running 0"),
        RequestError,
        ["request_id", "'running 0'", "already"],
    ),
    "id that is no string": (
        lambda e, p: e.add_request([5], good(), request_id=[5]),
        RequestError,
        ["request_id", "[5]", "string"],
    ),
    "empty id": (
        lambda e, p: e.add_request([5], good(), request_id=""),
        RequestError,
        ["request_id", "''", "string"],
    ),
    "unknown adapter": (
        lambda e, p: e.add_request([5], good(), "c"),
        UnknownAdapterError,
        ["'c'", "not loaded", "a, b"],
    ),
    "one unknown adapter of two": (
        lambda e, p: e.generate([[5], [6]], good(), ["a", "c"]),
        UnknownAdapterError,
        ["'c'", "a, b"],
    ),
    "adapters in a list of another length": (
        lambda e, p: e.generate([[5], [6]], good(), ["a"]),
        RequestError,
        ["adapters", "1", "2 prompts"],
    ),
    "adapters by number": (
        lambda e, p: e.generate([[5]], good(), [3]),
        RequestError,
        ["adapters", "3", "str"],
    ),
    "unload of what is not loaded": (
        lambda e, p: e.unload_adapter("c"),
        UnknownAdapterError,
        ["'c'", "a, b"],
    ),
    "name in use": (
        lambda e, p: e.load_adapter("a", p["b"]),
        AdapterError,
        ["'a'", "already loaded", "/a"],
    ),
    "no name": (lambda e, p: e.load_adapter("", p["b"]), AdapterError, ["''", "string"]),
    "name that is none": (lambda e, p: e.load_adapter(None, p["b"]), AdapterError, ["None"]),
    "no path": (lambda e, p: e.load_adapter("c", None), RequestError, ["path", "None"]),
    "missing directory": (
        lambda e, p: e.load_adapter("c", p["folder"] / "nowhere"),
        AdapterError,
        ["nowhere"],
    ),
    "a file": (
        lambda e, p: e.load_adapter("c", p["a"] / "adapter_config.json"),
        AdapterError,
        ["adapter_config.json"],
    ),
    "no config": (
        lambda e, p: e.load_adapter("c", p["no config"]),
        AdapterError,
        ["no config", "adapter_config.json"],
    ),
    "config that is no JSON": (
        lambda e, p: e.load_adapter("c", p["no json"]),
        AdapterError,
        ["no json", "adapter_config.json"],
    ),
    "no tensors": (
        lambda e, p: e.load_adapter("c", p["no tensors"]),
        AdapterError,
        ["no tensors", "safetensors"],
    ),
    "truncated": (
        lambda e, p: e.load_adapter("c", p["cut"]),
        AdapterError,
        ["cut", "adapter_model.safetensors"],
    ),
    "another hidden size": (
        lambda e, p: e.load_adapter("c", p["wide"]),
        AdapterError,
        ["layers.0.self_attn.q_proj", "200", "192"],
    ),
    "another depth": (
        lambda e, p: e.load_adapter("c", p["deep"]),
        AdapterError,
        ["layers.3.self_attn.q_proj", "3"],
    ),
    "half a module": (
        lambda e, p: e.load_adapter("c", p["half"]),
        AdapterError,
        ["layers.0.self_attn.q_proj"],
    ),
    "rank": (
        lambda e, p: e.load_adapter("c", p["rank 9"]),
        AdapterError,
        ["9", "max_lora_rank", "8"],
    ),
    "rank by pattern": (
        lambda e, p: e.load_adapter("c", p["pattern"]),
        AdapterError,
        ["v_proj", "9", "max_lora_rank", "8"],
    ),
    "DoRA": (lambda e, p: e.load_adapter("c", p["dora"]), AdapterError, ["use_dora"]),
    "pinned beside adapters in use": (
        lambda e, p: e.load_adapter("c", p["b"], pinned=True),
        CapacityError,
        ["'c'", "pinned"],
    ),
}


@pytest.fixture(scope="module")
def engine(paths):
    with Engine(
        paths["model"], adapters={"a": paths["a"], "b": paths["b"]}, **SIZES, debug=True
    ) as engine:
        yield engine


def start_four(engine):
    """Four requests that run for a while: the base, both adapters, greedy and drawn."""
    for row, adapter in enumerate(("a", None, "b", "a")):
        params = SamplingParams(
            max_tokens=70 + row,
            temperature=row % 2,
            seed=row,
            logprobs=3,
            ignore_eos=True,
            repetition_penalty=1.0 + 0.1 * row,
        )
        engine.add_request([5 + row, 6, 7], params, adapter, request_id=f"running {row}")
    return {f"running {row}": None for row in range(4)}


def run_to_the_end(engine, outputs):
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return {name: output.outputs for name, output in outputs.items()}


def state(engine):
    stats = engine.stats()
    loaded = [(i.name, i.path, i.slot, i.requests, i.pinned) for i in engine.adapters()]
    return loaded, stats.adapter_loads, stats.adapter_evictions, stats.preemptions


@pytest.fixture(scope="module")
def disturbed(engine, paths):
    """Every bad call, a step of four running requests after each: errors, and before and after."""
    start_four(engine)
    undisturbed = run_to_the_end(engine, {})
    outputs = start_four(engine)
    errors, moved = {}, []
    for _ in range(3):
        outputs |= {output.request_id: output for output in engine.step()}
    for name, (call, _, _) in CALLS.items():
        before = state(engine), engine.stats().kv_pages_used
        try:
            call(engine, paths)
            errors[name] = None
        except Exception as error:
            errors[name] = error
        if (state(engine), engine.stats().kv_pages_used) != before:
            moved.append(name)
        step = engine.step()
        assert {output.request_id for output in step} == set(outputs), name
        assert not any(output.finished for output in step), "make the running requests longer"
        outputs |= {output.request_id: output for output in step}
    return undisturbed, run_to_the_end(engine, outputs), errors, moved


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls_raise_and_name_the_fault(disturbed, name):
    _, kind, parts = CALLS[name]
    error = disturbed[2][name]
    assert type(error) is kind, repr(error)
    assert isinstance(error, EngineError)
    assert isinstance(error, ALSO_A[kind])
    for part in parts:
        assert part in str(error), str(error)
    assert len(str(error)) < 600


def test_running_requests_finish_with_the_bits_of_an_undisturbed_run(disturbed):
    undisturbed, after, _, _ = disturbed
    assert set(after) == {f"running {row}" for row in range(4)}
    assert after == undisturbed


def test_nothing_half_loaded_stays(disturbed, engine, model, paths):
    assert disturbed[3] == []
    assert [info.name for info in engine.adapters()] == ["a", "b"]
    assert engine.stats().kv_pages_used == 0
    oracle = Oracle(model, {"a": paths["a"], "b": paths["b"]})
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=3)
    for output in engine.generate([[5, 6]] * 3, params, ["a", None, "b"]):
        oracle.check(output)


def test_one_adapter_more_than_fits_into_host_memory(engine, paths):
    engine.load_adapter("c", paths["a"])
    with pytest.raises(CapacityError, match=r"'d'.*max_cpu_loras=3"):
        engine.load_adapter("d", paths["a"])
    assert [info.name for info in engine.adapters()] == ["a", "b", "c"]
    engine.unload_adapter("c")
