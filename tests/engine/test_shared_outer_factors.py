"""Adapters that share their outer factors over all experts of a layer: A of gate and up, B of down.

Served from stacked files; the oracle merges the same factors written out expert by expert. Beside
them in a batch are adapters that share inner factors, only some, or none.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import engine.engine as engine_module
import engine.expert_delta as expert_delta
from tests.engine.adapted_model import AdaptedModel, greedy, prompt_of
from tests.engine.backends import BACKENDS
from tests.oracle import Oracle
from tests.random_adapters import save_adapter
from tests.tiny_models import build_model, save_model

MLP = ("gate_proj", "up_proj", "down_proj")
RANK = 7
OWN_RANK = 4  # of projections that are not stacked
# By projection, which factors all experts share. Those that share none have keys of their own for
# each expert, in the same file.
FORMS = {
    "outer": {"gate_proj": "A", "up_proj": "A", "down_proj": "B"},
    "outer few": {"gate_proj": "A", "up_proj": "A", "down_proj": "B"},
    "outer fused": {"gate_up_proj": "A", "down_proj": "B"},
    "outer gate": {"gate_proj": "A", "up_proj": "", "down_proj": ""},
    "inner": {"gate_proj": "B", "up_proj": "B", "down_proj": "A"},
    "both": {"gate_proj": "AB", "up_proj": "AB", "down_proj": "AB"},
}
OUTER = {  # the ranks of gate, up and down that are to be multiplied once a token
    "outer": [RANK, RANK, RANK],
    "outer few": [RANK, RANK, RANK],
    "outer fused": [RANK, RANK, RANK],
    "outer gate": [RANK, 0, 0],
    "inner": [0, 0, 0],
    "both": [RANK, RANK, RANK],
    "ordinary": [0, 0, 0],
}
STRENGTH = {"mixtral": 3.0, "qwen2_moe": 12.0}
NAMES = [*FORMS, "ordinary", None]


def absent_in_few(num_experts):
    return set(range(num_experts)) - set(range(1, num_experts, 3))


def save_twice(model, form, path, plain, strength, absent, seed):
    """Write an adapter in its form at `path`, and the same factors expert by expert at `plain`,
    without those of experts in `absent`."""
    generator = torch.Generator().manual_seed(seed)
    alpha, served, factors = 2.9, {}, {}
    for block, target, parts, weight in experts_of(model):
        if target not in form:
            continue
        (count, out, width), shared = weight.shape, form[target]
        rank = RANK if shared else OWN_RANK
        a = torch.randn(1 if "A" in shared else count, rank, width, generator=generator)
        b = torch.randn(1 if "B" in shared else count, out, rank, generator=generator)
        a /= width**0.5
        b *= strength * 0.1 * weight.detach().std() * width**0.5 * rank**0.5 / alpha
        by_expert = {}
        for expert in set(range(count)) - absent:
            of_a, of_b = a[expert % len(a)], b[expert % len(b)]
            for part, part_b in zip(parts, of_b.chunk(len(parts)), strict=True):
                by_expert |= pair(f"{block}.{expert}.{part}", of_a, part_b)
        served |= pair(f"{block}.{target}", a, b) if shared else by_expert
        factors |= by_expert
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": alpha,
        "target_modules": list(form),
        "rank_pattern": {target: OWN_RANK for target, shared in form.items() if not shared},
    }
    for directory, tensors in ((path, served), (plain, factors)):
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "adapter_model.safetensors")


def pair(module, a, b):
    key = f"base_model.model.{module}"
    return {f"{key}.lora_A.weight": a.clone(), f"{key}.lora_B.weight": b.clone()}


def experts_of(model):
    """Every stack of experts' weights [E, out, in]: path, name, the projections in its rows."""
    for name, weight in model.named_parameters():
        block, _, projection = name.rpartition(".")
        if projection == "down_proj" and weight.dim() == 3:
            yield block, projection, (projection,), weight
        elif projection == "gate_up_proj":
            yield block, projection, ("gate_proj", "up_proj"), weight
            gate, up = weight.chunk(2, dim=1)
            yield block, "gate_proj", ("gate_proj",), gate
            yield block, "up_proj", ("up_proj",), up


@pytest.fixture(scope="module", params=STRENGTH)
def mixture(request, tmp_path_factory):
    name = request.param
    directory, model = tmp_path_factory.mktemp(name), build_model(name)
    served, reference = {}, {}
    for seed, (adapter, form) in enumerate(FORMS.items(), start=1):
        served[adapter], reference[adapter] = directory / adapter, directory / "plain" / adapter
        experts = absent_in_few(num_experts_of(model)) if "few" in adapter else set()
        save_twice(model, form, served[adapter], reference[adapter], STRENGTH[name], experts, seed)
    served["ordinary"] = save_adapter(
        model, directory / "ordinary", 5, MLP, seed=99, strength=STRENGTH[name]
    )
    reference["ordinary"] = served["ordinary"]
    return AdaptedModel(save_model(name, directory), served, Oracle(model, reference))


def num_experts_of(model):
    return getattr(model.config, "num_experts", None) or model.config.num_local_experts


@pytest.fixture
def open_engine(mixture, monkeypatch):
    """Engines that read "outer few" without some experts, which no stacked file can say."""
    read = engine_module.read_adapter
    absent = absent_in_few(num_experts_of(mixture.oracle.models[None]))

    def read_some(path, *others):
        weights = read(path, *others)
        if path.name != "outer few":
            return weights
        return replace(weights, modules=tuple(m for m in weights.modules if m.expert not in absent))

    monkeypatch.setattr(engine_module, "read_adapter", read_some)

    def build(backend, **keywords):
        return mixture.engine(backend, **{"max_loras": 7, **keywords})

    return build


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_factors_beside_others(mixture, open_engine, backend):
    """With the pairs of a prefill grouped, and taken one by one."""
    top_k = mixture.oracle.models[None].config.num_experts_per_tok
    tokens = expert_delta.MAX_PAIRWISE // top_k + 40
    with open_engine(backend, prefill_chunk_tokens=tokens) as engine:
        for length in (tokens // len(NAMES) - 1, 6):
            prompts = [prompt_of(length, length + row) for row in range(len(NAMES))]
            outputs = engine.generate(prompts, greedy(8, ignore_eos=True), NAMES)
            mixture.check(outputs, backend)
        check_tables(engine)


def check_tables(engine):
    """What is shared, and nothing else, is in the tables of outer factors; its bytes count once."""
    tables = engine.memory.adapters.tables.experts
    infos = {info.name: info for info in engine.adapters()}
    for name, expected in OUTER.items():
        assert tables.outer_ranks[0, :, infos[name].slot].tolist() == expected, name
    assert infos["both"].bytes < infos["outer"].bytes < infos["outer gate"].bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_forgets_the_factors_that_were_shared(mixture, open_engine, backend):
    order = ["outer", "ordinary", "outer gate", "inner", "outer few", "ordinary", "both", "outer"]
    with open_engine(backend, max_loras=1, graph_batch_sizes=[3]) as engine:
        for turn, name in enumerate(order):
            prompts = [prompt_of(5 + row, turn + row) for row in range(3)]
            outputs = engine.generate(prompts, greedy(6, ignore_eos=True), [name, None, name])
            mixture.check(outputs, backend)
        assert engine.stats().adapter_evictions == len(order) - 1
