"""Adapters of experts, routers and shared experts: every form of file, and all that is refused."""

import math

import pytest
import torch

from engine.errors import AdapterError
from memory.lora_targets import Target
from tests.engine.adapter_writer import write
from tests.engine.expert_adapter_writer import (
    BLOCK,
    EXPERT_SLICES,
    EXPERTS,
    HIDDEN,
    NAMINGS,
    RANK,
    TinyMixture,
    by_place,
    expert_name,
    expert_tensors,
    fused_tensors,
    pair,
    random_factors,
    read,
    stacked_tensors,
    without,
)

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATE, UP, DOWN = EXPERT_SLICES


def assert_held(module, tensors, name):
    assert torch.equal(module.a, tensors[f"{name}.lora_A.weight"])
    assert torch.equal(module.b, tensors[f"{name}.lora_B.weight"])


# ---- a key per expert


@pytest.mark.parametrize("experts", [range(EXPERTS), (0, 2, 5), (3,)])
@pytest.mark.parametrize("naming", NAMINGS)
def test_keys_of_single_experts(tmp_path, naming, experts):
    tensors = expert_tensors(experts, naming)
    folder = write(tmp_path, tensors, target_modules=list(NAMINGS[naming][1]))
    modules = by_place(read(folder))
    assert modules.keys() == {(target, expert) for target in EXPERT_SLICES for expert in experts}
    for (target, expert), module in modules.items():
        assert_held(module, tensors, expert_name(expert, target, naming))
        assert (module.layer, module.scaling) == (0, 1.5)


@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_reach_single_experts(tmp_path, rslora):
    tensors = expert_tensors((0, 1)) | expert_tensors((11 % EXPERTS,), rank=2)
    folder = write(
        tmp_path,
        tensors,
        use_rslora=rslora,
        rank_pattern={"experts.5": 7, r"experts\.5\..*": 2},
        alpha_pattern={"0.mlp.experts.1.up_proj": 9},
    )
    for (target, expert), module in by_place(read(folder)).items():
        rank = 2 if expert == 5 else 4
        alpha = 9 if (target, expert) == (UP, 1) else 6
        assert module.rank == rank
        assert module.scaling == alpha / (math.sqrt(rank) if rslora else rank)


def test_router_and_shared_expert(tmp_path):
    names = {
        Target.ROUTER: "gate",
        Target.SHARED_GATE_PROJ: "shared_expert.gate_proj",
        Target.SHARED_UP_PROJ: "shared_expert.up_proj",
        Target.SHARED_DOWN_PROJ: "shared_expert.down_proj",
        Target.SHARED_EXPERT_GATE: "shared_expert_gate",
    }
    tensors = {}
    for target, name in names.items():
        tensors |= pair(f"{BLOCK}.{name}", *TinyMixture().target_shape(target))
    listed = ["gate", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"]
    modules = by_place(read(write(tmp_path, tensors, target_modules=listed)))
    assert modules.keys() == {(target, None) for target in names}
    for (target, _), module in modules.items():
        assert_held(module, tensors, f"{BLOCK}.{names[target]}")


def test_a_router_may_be_a_parameter_with_patterns_of_its_own(tmp_path):
    name = f"{BLOCK}.gate".replace("mlp", "block_sparse_moe")
    folder = write(
        tmp_path,
        pair(name, EXPERTS, HIDDEN, rank=3),
        target_modules=[],
        target_parameters=["gate.weight"],
        rank_pattern={"gate.weight": 3, "gate": 5},
        alpha_pattern={"gate": 100},
    )
    (module,) = read(folder).modules
    assert (module.target, module.rank, module.scaling) == (Target.ROUTER, 3, 6 / 3)


def test_dense_layers_of_a_mixture(tmp_path):
    tensors = pair(BLOCK.replace("layers.0", "layers.1") + ".up_proj", 40, HIDDEN)
    (module,) = read(write(tmp_path, tensors)).modules
    assert (module.layer, module.target, module.expert) == (1, Target.UP_PROJ, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda key: "_orig_mod." + key,
        lambda key: key.replace("experts", "experts._orig_mod"),
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace("model.layers", "model.language_model.layers"),
        lambda key: key.replace(".weight", ".default.weight"),
    ],
    ids=["compiled", "experts compiled", "no peft prefix", "deeper", "adapter name"],
)
def test_unusual_prefixes_bind_every_tensor(tmp_path, change):
    for name, tensors in {
        "single": expert_tensors(),
        "fused": fused_tensors(),
        "stacked": stacked_tensors("w1", 1, EXPERTS) | pair(f"{BLOCK}.gate", EXPERTS, HIDDEN),
    }.items():
        config = {"target_parameters": BOTH} if name == "fused" else {"target_modules": None}
        plain = by_place(read(write(tmp_path / name, tensors, **config)))
        renamed = {change(key): tensor for key, tensor in tensors.items()}
        modules = by_place(read(write(tmp_path / f"{name} renamed", renamed, **config)))
        assert modules.keys() == plain.keys()
        for place, module in modules.items():
            assert torch.equal(module.a, plain[place].a)
            assert torch.equal(module.b, plain[place].b)


# ---- stacks


@pytest.mark.parametrize("counts", [(1, EXPERTS), (EXPERTS, 1), (EXPERTS, EXPERTS), (1, 1)])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("w1", (GATE,)),
        ("w3", (UP,)),
        ("w2", (DOWN,)),
        ("gate_proj", (GATE,)),
        ("up_proj", (UP,)),
        ("down_proj", (DOWN,)),
        ("gate_up_proj", (GATE, UP)),
    ],
)
def test_stacks_of_factors(tmp_path, name, targets, counts):
    tensors = stacked_tensors(name, *counts)
    modules = by_place(read(write(tmp_path, tensors)))
    assert modules.keys() == {(target, e) for target in targets for e in range(EXPERTS)}
    a, b = (tensors[f"{BLOCK}.experts.{name}.lora_{factor}.weight"] for factor in "AB")
    for (target, expert), module in modules.items():
        assert torch.equal(module.a, a[expert % len(a)])
        rows = b[expert % len(b)].chunk(len(targets))
        assert torch.equal(module.b, rows[targets.index(target)])
        assert module.scaling == 1.5
        first = modules[target, 0]
        assert (module.a is first.a) == (counts[0] == 1 or expert == 0)
        assert (module.b is first.b) == (counts[1] == 1 or expert == 0)
        assert module.a is modules[targets[0], expert].a


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": None},
        {"target_modules": "all-linear"},
        {"target_modules": ["experts"]},
        {"target_modules": ["q_proj", "gate_up_proj"]},
        {"target_modules": r".*\.experts\.w1"},
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ],
)
def test_configs_name_stacks_in_many_ways(tmp_path, config):
    assert len(read(write(tmp_path, stacked_tensors("w1", 1, EXPERTS), **config)).modules) == 6


# ---- what is refused


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (expert_tensors((6,)), {}, r"experts\.6\.down_proj.*expert 6.*experts 0 to 5"),
        (
            {k.replace("layers.0", "layers.1"): t for k, t in expert_tensors((0,)).items()},
            {},
            r"layers\.1\.mlp\.experts\.0.*which layer 1 lacks.*accepted.*down_proj",
        ),
        (pair(f"{BLOCK}.up_proj", 40, HIDDEN), {}, r"up_proj, which layer 0 lacks.*experts"),
        (
            without(expert_tensors((0, 1)), "1.up_proj.lora_B"),
            {},
            r"experts\.1\.up_proj\.lora_A.*no lora_B",
        ),
        (
            expert_tensors((0,)) | expert_tensors((0,), "mixtral"),
            {"target_modules": None},
            "same factor|another name",
        ),
        (
            without(expert_tensors((0,)), "lora_B")
            | without(expert_tensors((0,), "mixtral"), "lora_A"),
            {"target_modules": None},
            "another name",
        ),
        (
            expert_tensors((0,)) | stacked_tensors("w1", 1, EXPERTS),
            {"target_modules": None},
            r"experts\.gate_proj of expert 0",
        ),
        (expert_tensors((0,)), {"target_modules": ["w1"]}, r"down_proj.*target_modules"),
        (expert_tensors((0,)), {"exclude_modules": r".*experts.*"}, "exclude_modules"),
        (expert_tensors((0,), rank=5), {}, r"\[5, 24\].*\[4, 24\]"),
        (expert_tensors((0,), "mixtral"), {}, r"w1\.lora_A.*target"),
        (
            {f"{BLOCK}.experts.0.lora_A.weight": torch.ones(4, HIDDEN)},
            {},
            r"experts\.0\.lora_A.*names no module",
        ),
    ],
)
def test_refusals_of_single_experts(tmp_path, tensors, config, message):
    with pytest.raises(AdapterError, match=rf"adapter_model\.safetensors: .*{message}"):
        read(write(tmp_path, tensors, **config))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (stacked_tensors("w1", 1, 5), {}, r"lora_B.*\[5, 24, 4\].*\[6, 24, 4\] \(experts or 1"),
        (stacked_tensors("w1", 2, EXPERTS), {}, r"lora_A.*\[2, 4, 32\].*\[6, 4, 32\]"),
        (stacked_tensors("w1", 1, EXPERTS, rank=8), {}, r"lora_A.*\[1, 8, 32\].*\[1, 4, 32\]"),
        (
            stacked_tensors("gate_up_proj", 1, 6)
            | {f"{BLOCK}.experts.gate_up_proj.lora_A.weight": random_factors(1, 8, HIDDEN)},
            {},
            r"lora_A.*\[1, 8, 32\].*\[1, 4, 32\]",
        ),
        (
            stacked_tensors("w1", 1, EXPERTS)
            | {f"{BLOCK}.experts.w1.lora_A.weight": random_factors(RANK, HIDDEN)},
            {},
            r"lora_A.*\[4, 32\].*\[6, 4, 32\]",
        ),
        (
            {f"{BLOCK}.experts.w3.lora_{factor}.weight": torch.zeros(0) for factor in "AB"},
            {},
            r"w3\.lora_A.*shape \[0\]",
        ),
        (
            stacked_tensors("w1", 1, EXPERTS) | stacked_tensors("gate_up_proj", 1, EXPERTS),
            {},
            r"experts\.gate_proj of expert 0",
        ),
        (stacked_tensors("w1", 1, EXPERTS), {"target_modules": ["w3"]}, r"experts\.w1.*target"),
        (stacked_tensors("w1", 1, EXPERTS), {"exclude_modules": ["experts"]}, "target"),
        (stacked_tensors("w1", 1, EXPERTS), {"alpha_pattern": {"gate_proj": 7}}, "alpha"),
        (stacked_tensors("w1", 1, EXPERTS), {"rank_pattern": {"experts": 8}}, "rank_pattern"),
    ],
)
def test_refusals_of_stacks(tmp_path, tensors, config, message):
    with pytest.raises(AdapterError, match=rf"adapter_model\.safetensors: .*{message}"):
        read(write(tmp_path, tensors, **config))


@pytest.mark.parametrize(
    "tensors",
    [fused_tensors(("down_proj",)), stacked_tensors("w2", EXPERTS, 1), expert_tensors((0,))],
)
def test_overflow_in_the_engine_s_dtype_is_found_in_every_form(tmp_path, tensors):
    key = next(key for key in tensors if key.endswith("lora_B.weight"))
    tensors = {**tensors, key: torch.full_like(tensors[key], 1e5)}
    folder = write(tmp_path, tensors, target_parameters=BOTH[1:])
    read(folder)
    with pytest.raises(AdapterError, match=r"lora_B.*overflows in float16"):
        read(folder, dtype=torch.float16)
