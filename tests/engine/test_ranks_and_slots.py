"""Ranks, scalings and slots: any rank beside any other, nothing left of who had a slot before."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import AdapterError, Engine
from tests.engine.adapted_model import DEFAULTS, AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS
from tests.oracle import Oracle
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model

RANKS = (1, 3, 5, 8, 12, 16, 24, 33, 64)
SLOT_LEAVERS = {
    "everything": {"rank": 16},
    "one module": {"rank": 2, "targets": ("v_proj",), "layers": (1,), "strength": 9.0},
    "two layers": {
        "rank": 3,
        "targets": ("o_proj", "down_proj"),
        "layers": (0, 2),
        "strength": 5.0,
    },
    "thin up": {"rank": 5, "targets": ("gate_proj", "up_proj"), "rank_pattern": {"up_proj": 1}},
}
SCALINGS = {
    "rslora": {"rank": 9, "use_rslora": True, "lora_alpha": 2.9},
    "alpha pattern": {
        "rank": 6,
        "alpha_pattern": {"q_proj": 5.0, "layers.1.mlp.down_proj": 0.7, "o_proj": 9.5},
    },
    "rank pattern": {"rank": 4, "rank_pattern": {"k_proj": 3, "up_proj": 11, "o_proj": 1}},
    "all of them": {
        "rank": 7,
        "use_rslora": True,
        "lora_alpha": 1.3,
        "rank_pattern": {"v_proj": 2, "gate_proj": 13},
        "alpha_pattern": {"v_proj": 3.1, "layers.2.mlp.gate_proj": 4.2},
    },
    "no alpha": {"rank": 5, "lora_alpha": 8},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    adapters = {f"rank {rank}": {"rank": rank} for rank in RANKS}
    return AdaptedModel.make("llama", tmp_path_factory.mktemp("ranks"), adapters)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_rank", [64, 8])
def test_every_rank_beside_every_other(ranks, backend, max_rank):
    """In one batch and alone; the intermediate size of 344 is a multiple of 8 and no more."""
    small = [f"rank {rank}" for rank in RANKS if rank <= max_rank]
    names = [None, *small[::2], *small[1::2]]
    options = {"max_loras": len(small), "max_lora_rank": max_rank, "max_batch_size": len(names)}
    with ranks.engine(backend, small, graph_batch_sizes=[1, len(names)], **options) as engine:
        prompts = [prompt_of(3 + row, row) for row in range(len(names))]
        ranks.check(engine.generate(prompts, greedy(8), names), backend)
        alone = [engine.generate(prompt_of(4), greedy(4), name)[0] for name in names]
        ranks.check(alone, backend)
        if max_rank < 64:
            with pytest.raises(AdapterError, match="rank 12"):
                engine.load_adapter("rank 12", ranks.adapters["rank 12"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_keeps_nothing_of_the_adapter_before(tmp_path, backend):
    """One slot: adapters of fewer modules, layers and ranks follow one that had them all."""
    model = AdaptedModel.make("llama", tmp_path, SLOT_LEAVERS)
    order = ["everything", "one module", "everything", "two layers", "thin up", "one module"]
    with model.engine(backend, max_loras=1, graph_batch_sizes=[3]) as engine:
        for turn, name in enumerate(order):
            prompts = [prompt_of(5 + row, turn + row) for row in range(3)]
            model.check(engine.generate(prompts, greedy(8), [name, None, name]), backend)
        assert engine.stats().adapter_evictions == len(order) - 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_scalings_and_patterns(tmp_path, name, backend):
    model = AdaptedModel.make(name, tmp_path, SCALINGS)
    config = model.adapters["no alpha"] / "adapter_config.json"
    settings = json.loads(config.read_text())
    del settings["lora_alpha"]
    config.write_text(json.dumps(settings))
    names = [*SCALINGS, None]
    prompts = [prompt_of(4 + row, row) for row in range(len(names))]
    with model.engine(backend, max_loras=len(SCALINGS)) as engine:
        model.check(engine.generate(prompts, greedy(8), names), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float32_adapter_on_a_bfloat16_base(tmp_path, backend):
    """Entries of 1e-4 beside 3.0: no farther from the float32 oracle than twice PEFT's bfloat16.

    Both round the same things, the base's activations, and the engine the adapter's factors too,
    which PEFT keeps in float32: a sum in bfloat16 or a scale applied twice is far above that.
    """
    peft = pytest.importorskip("peft")
    model = build_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    path = save_adapter(model.float(), tmp_path / "adapter", 8)
    save_file(
        spiky(load_file(path / "adapter_model.safetensors")), path / "adapter_model.safetensors"
    )
    names = ["uneven", None, "uneven", "uneven"]
    prompts = [prompt_of(6 + row, row) for row in range(len(names))]
    options = DEFAULTS | {"device": backend.device, "graphs": backend.graphs, "dtype": "bfloat16"}
    with Engine(tmp_path / "model", adapters={"uneven": path}, **options) as engine:
        outputs = engine.generate(prompts, greedy(60, ignore_eos=True), names)
    oracle = Oracle(model, {"uneven": path})
    halved = build_model("llama").to(torch.bfloat16)
    theirs = Oracle(peft.PeftModel.from_pretrained(halved, path).eval(), {})
    for output in outputs:
        if output.adapter is not None:
            assert mean_error(oracle, output) <= 2 * peft_error(oracle, theirs, output)
            assert mean_error(oracle, output, None) > 0.5


def spiky(tensors):
    """Factors whose entries are 3.0 here and there and about 1e-4 elsewhere."""
    generator = torch.Generator().manual_seed(5)
    uneven = {}
    for key, tensor in tensors.items():
        large = torch.rand(tensor.shape, generator=generator) < 0.02
        small = 1e-4 * torch.randn(tensor.shape, generator=generator)
        uneven[key] = torch.where(large, 3.0 * small.sign(), small)
    return uneven


def mean_error(oracle, output, adapter=...):
    errors = oracle.errors(output, adapter)
    return sum(errors) / len(errors)


def peft_error(oracle, theirs, output):
    """What PEFT's bfloat16 run is off at the same positions and tokens."""
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    first = len(output.prompt_token_ids) - 1
    gaps = oracle.logprobs(output.adapter, ids[:-1]) - theirs.logprobs(None, ids[:-1])
    rows = zip(gaps[first:], output.outputs[0].logprobs, strict=True)
    errors = [max(abs(row[token].item()) for token in reported) for row, reported in rows]
    return sum(errors) / len(errors)
