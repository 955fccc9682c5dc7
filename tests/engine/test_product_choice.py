"""What an engine asks to be measured, when, and where the answers lie."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine.engine
import engine.product_choice
from engine import Engine, SamplingParams
from engine.architecture import Architecture
from engine.checkpoint import Checkpoint
from engine.config import cache_directory
from engine.decoder_weights import DecoderWeights
from engine.device_scope import DeviceScope
from engine.errors import CapacityError
from engine.product_choice import choose_products, weights_by_shape
from engine.random_source import RandomSource
from kernels.choice_file import ChoiceFile
from kernels.linear_choice import ShapeWeights, Trial, settle
from kernels.linear_config import (
    H200,
    LINEAR_TABLE,
    ROW_BUCKETS,
    LinearConfig,
    LinearTable,
    card,
    linear_config,
)
from kernels.linear_timer import GraphTimer, measuring_stamp
from tests.profiles.tiny_shape import DENSE, tiny_checkpoint

BF16 = torch.bfloat16
LLAMA_8B = DENSE | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
}
QWEN_MOE = LLAMA_8B | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "qkv_bias": True,
}
SIZES = {
    "max_batch_size": 20,
    "max_seq_len": 64,
    "max_loras": 0,
    "prefill_chunk_tokens": 32,
    "graph_batch_sizes": [2, 20],
    "device": "cpu",
    "tokenizer": None,
}


def shapes_of(config) -> dict[tuple[int, int], tuple[int, bool, bool]]:
    """(N, K): how many weights, whether partials are taken, whether there is a bias."""
    weights = DecoderWeights(Architecture.from_config(config), BF16, torch.device("meta"))
    return {
        (shape.product(1).out_features, shape.product(1).in_features): (
            len(shape.weights),
            shape.takes_partials,
            shape.bias is not None,
        )
        for shape in weights_by_shape(weights)
    }


def test_every_product_of_a_dense_step():
    assert shapes_of(LLAMA_8B) == {
        (6144, 4096): (32, False, False),
        (4096, 4096): (32, True, False),
        (28672, 4096): (32, False, False),
        (4096, 14336): (32, True, False),
        (128256, 4096): (1, False, False),
    }


def test_every_product_of_a_mixture_but_its_experts():
    assert shapes_of(QWEN_MOE) == {
        (6144, 4096): (3, False, True),
        (4096, 4096): (3, True, False),
        (11264, 4096): (2, False, False),
        (4096, 5632): (2, False, False),
        (28672, 4096): (1, False, False),
        (4096, 14336): (1, True, False),
        (128256, 4096): (1, False, False),
    }


def test_shapes_that_coincide_are_measured_as_the_stricter():
    for dense_layer in (0, 2):
        shapes = shapes_of(QWEN_MOE | {"intermediate_size": 5632, "mlp_only_layers": [dense_layer]})
        assert shapes[4096, 5632] == (3, False, False)


def test_before_the_memory_is_planned(monkeypatch, tmp_path):
    events = []

    def choose(weights, device, directory):
        assert not any(weight.isnan().any() for weight in (weights.head, weights.norm))
        events.append((device, directory))

    class Manager(engine.engine.MemoryManager):
        def __init__(self, *arguments):
            events.append("manager")
            super().__init__(*arguments)

    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ENCORE_MEASURE")
    monkeypatch.setattr(engine.engine, "choose_products", choose)
    monkeypatch.setattr(engine.engine, "MemoryManager", Manager)
    with Engine(tiny_checkpoint(DENSE), **SIZES):
        pass
    assert events == [(torch.device("cpu"), tmp_path), "manager"]
    monkeypatch.setenv("ENCORE_MEASURE", "0")
    with Engine(tiny_checkpoint(DENSE), **SIZES):
        pass
    assert events[2:] == ["manager"], "switched off, the rule decides"


def test_weights_that_do_not_fit_are_refused_before_they_are_read():
    checkpoint = tiny_checkpoint(DENSE)

    class Unread(RandomSource):
        def copy_into(self, *arguments, **keywords):
            raise AssertionError("read")

    unread = Checkpoint(checkpoint.architecture, Unread(checkpoint.architecture), path="tiny")
    with pytest.raises(CapacityError, match="weights"):
        Engine(unread, **SIZES, memory_fraction=1e-9)
    with pytest.raises(AssertionError, match="read"):
        Engine(unread, **SIZES)


@pytest.mark.parametrize(("capability", "asked"), [((9, 0), True), ((8, 9), False)])
def test_only_cards_that_have_the_kernel_are_measured(monkeypatch, tmp_path, capability, asked):
    calls = []
    device = torch.device("cuda", 0)
    found = replace(H200, name="A card", capability=capability)
    monkeypatch.setattr(engine.product_choice, "card", lambda device: found)
    monkeypatch.setattr(engine.product_choice, "GraphTimer", lambda device: "a timer")
    monkeypatch.setattr(engine.product_choice, "settle", lambda *given: calls.append(given))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    weights = DecoderWeights(Architecture.from_config(DENSE), BF16, torch.device("meta"))
    choose_products(weights, device, tmp_path)
    choose_products(weights, torch.device("cpu"), tmp_path)
    assert len(calls) == asked
    for shapes, rows, where, file, timer in calls:
        assert len(shapes) == len(shapes_of(DENSE))
        assert (rows, where, timer) == (ROW_BUCKETS, found, "a timer")
        assert file.path == tmp_path / "linear-A-card.json"


def test_too_little_memory_to_measure_in_is_no_error(monkeypatch, tmp_path, caplog):
    def settle(*arguments):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(engine.product_choice, "card", lambda device: H200)
    monkeypatch.setattr(engine.product_choice, "GraphTimer", lambda device: None)
    monkeypatch.setattr(engine.product_choice, "settle", settle)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    weights = DecoderWeights(Architecture.from_config(DENSE), BF16, torch.device("meta"))
    choose_products(weights, torch.device("cuda", 0), tmp_path)
    assert caplog.messages == ["cuda:0: products are chosen by rule, not measured: made up"]


def test_where_the_file_lies(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("ENCORE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path("/home/someone/.cache/encore")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path("/home/someone/.cache/encore")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/encore")
    monkeypatch.setenv("ENCORE_CACHE_DIR", "/own")
    assert cache_directory() == Path("/own")
    monkeypatch.setenv("ENCORE_CACHE_DIR", "")
    assert cache_directory() == Path("/caches/encore")


def test_no_home_is_no_error(monkeypatch):
    def refuse():
        raise RuntimeError("no home")

    for name in ("ENCORE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    assert cache_directory() is None


def test_the_stamp_names_versions_and_source():
    stamp = measuring_stamp()
    assert stamp["torch"] == torch.__version__
    assert set(stamp) == {"torch", "triton", "kernel"}
    assert stamp == measuring_stamp()


def test_each_kernel_is_compiled_once(monkeypatch):
    """Of one row and of sixteen it is the same, and threads would compile it at once."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    compiled = []
    monkeypatch.setattr(GraphTimer, "_compiles", lambda timer, trial: compiled.append(trial) or 1)
    timer = object.__new__(GraphTimer)
    timer._device = torch.device("cuda", 0)
    config = LinearConfig(16, 64, 128, 4, 5)
    weight = torch.empty(256, 128, dtype=BF16)
    trials = [
        Trial(config, torch.empty(rows, 128, dtype=BF16), weight, None, torch.empty(rows, 256))
        for rows in (1, 16)
    ]
    trials += [replace(trials[0], config=replace(config, num_stages=stages)) for stages in (3, 4)]
    assert timer.runs(trials) == [1] * 4
    assert len(compiled) == 3


def unmeasured(timer: GraphTimer, *arguments) -> float:
    raise AssertionError("measured again")


def has_kernel(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("the library's there")


@pytest.fixture
def fresh_table(monkeypatch):
    """Calls of it are like the start of another process."""

    def forget():
        monkeypatch.setattr(LINEAR_TABLE, "_choices", {})
        linear_config.cache_clear()

    forget()
    yield forget
    linear_config.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("takes_partials", [False, True])
def test_a_real_shape_is_measured(monkeypatch, tmp_path, takes_partials):
    device = torch.device("cuda", torch.cuda.current_device())
    has_kernel(device)
    size, layers = (4096, 4096), 12
    weights = [torch.randn(size, device=device, dtype=BF16) / 64 for _ in range(layers)]
    shape = ShapeWeights(weights, takes_partials=takes_partials)
    file = ChoiceFile(tmp_path, card(device).name, measuring_stamp())
    seconds, whole = [], GraphTimer.seconds

    def record(timer, trials):
        seconds.append((trials[0].config, whole(timer, trials)))
        return seconds[-1][1]

    tables = [LinearTable(), LinearTable()]
    monkeypatch.setattr(GraphTimer, "seconds", record)
    with DeviceScope(device).entered():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        settle([shape], [1, 8, 128], card(device), file, GraphTimer(device), tables[0])
        assert torch.cuda.memory_allocated(device) <= before + 64 * 2**20  # the library's workspace
        monkeypatch.setattr(GraphTimer, "seconds", unmeasured)
        settle([shape], [1, 8, 128], card(device), file, GraphTimer(device), tables[1])
    print(*seconds, sep="\n")
    assert len(seconds) >= 9
    bytes_read = weights[0].nbytes
    for _, taken in seconds:
        assert bytes_read / 10e12 < taken < bytes_read / 0.1e12
    for rows in (1, 16, 128):
        assert tables[0].holds(card(device), shape.product(rows))
        choices = {table.choice(card(device), shape.product(rows)) for table in tables}
        assert len(choices) == 1


@pytest.mark.gpu
def test_a_second_engine_finds_the_file(monkeypatch, tmp_path, fresh_table):
    has_kernel(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ENCORE_MEASURE", "1")
    config = LLAMA_8B | {"num_hidden_layers": 8, "hidden_size": 2048, "vocab_size": 32000}
    sizes = {**SIZES, "device": "cuda"}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[3 + row, 5, 7] for row in range(5)]
    outputs = []
    for _ in range(2):
        fresh_table()
        with Engine(tiny_checkpoint(config), **sizes) as started:
            assert LINEAR_TABLE._choices
            outputs.append([o.outputs[0].token_ids for o in started.generate(prompts, params)])
        assert [path.name for path in tmp_path.glob("linear-*.json")]
        monkeypatch.setattr(GraphTimer, "seconds", unmeasured)
    assert outputs[0] == outputs[1]
