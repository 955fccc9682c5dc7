"""Adapters of experts by PEFT's target_parameters: two tensors hold all experts of a layer."""

import math

import pytest
import torch

from engine.errors import AdapterError
from tests.engine.adapter_writer import write
from tests.engine.expert_adapter_writer import (
    BLOCK,
    EXPERT_SLICES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TinyMixture,
    by_place,
    expert_tensors,
    fused_tensors,
    random_factors,
    read,
    stacked_tensors,
    without,
)

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATE, UP, DOWN = EXPERT_SLICES


def fused_deltas(tensors, which, swapped, experts=EXPERTS):
    """The change of each parameter [E, out, in], by PEFT's own equation, without the scaling."""
    deltas = {}
    for name in which:
        inner = ".base_layer" if name == "gate_up_proj" and len(which) == 2 else ""
        a = tensors[f"{BLOCK}.experts{inner}.lora_A.weight"]
        b = tensors[f"{BLOCK}.experts{inner}.lora_B.weight"]
        a = a.reshape(experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, experts)
        deltas[name] = torch.einsum(f"ore,eri->{'eio' if swapped else 'eoi'}", b, a)
    return deltas


def assert_deltas(modules, deltas, scaling=1.5):
    expected = {}
    if "gate_up_proj" in deltas:
        expected[GATE], expected[UP] = deltas["gate_up_proj"].chunk(2, dim=1)
    if "down_proj" in deltas:
        expected[DOWN] = deltas["down_proj"]
    assert modules.keys() == {(t, e) for t, delta in expected.items() for e in range(len(delta))}
    for (target, expert), module in modules.items():
        assert module.scaling == scaling
        torch.testing.assert_close(module.b @ module.a, expected[target][expert])
        if target == GATE:
            assert module.a is modules[UP, expert].a


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    "which", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)]
)
def test_fused_experts(tmp_path, which, swapped):
    tensors = fused_tensors(which, swapped)
    parameters = [f"mlp.experts.{name}" for name in which]
    modules = by_place(read(write(tmp_path, tensors, target_parameters=parameters)))
    assert_deltas(modules, fused_deltas(tensors, which, swapped))


def test_patterns_match_the_name_of_the_parameter(tmp_path):
    down = fused_tensors(rank=3)
    tensors = fused_tensors(rank=8) | {key: down[key] for key in down if "base_layer" not in key}
    folder = write(
        tmp_path,
        tensors,
        target_parameters=["gate_up_proj", "down_proj"],
        rank_pattern={r".*\.gate_up_proj": 8, "experts": 5, "experts.down_proj": 3},
        alpha_pattern={r".*\.gate_up_proj": 12},
        use_rslora=True,
    )
    readings = {m.target: (m.rank, m.scaling) for m in read(folder).modules}
    gate_up = (8, 12 / math.sqrt(8))
    assert readings == {GATE: gate_up, UP: gate_up, DOWN: (3, 6 / math.sqrt(3))}


SQUARE = {"gate_up_proj": TinyMixture(hidden=48), "down_proj": TinyMixture(hidden=INTERMEDIATE)}


@pytest.mark.parametrize("which", SQUARE)
@pytest.mark.parametrize(
    ("version", "swapped"),
    [
        ("0.17.1", True),
        ("0.18.2.dev0@abc", True),
        ("0.19.0", True),
        ("0.19.1", False),
        ("0.20.0.dev0", False),
        ("0.21.2", False),
        ("1.0.0", False),
    ],
)
def test_square_parameters_are_read_as_their_version_wrote_them(tmp_path, which, version, swapped):
    shapes = SQUARE[which]
    tensors = fused_tensors((which,), swapped, shapes=shapes)
    config = {"target_parameters": [f"experts.{which}"], "peft_version": version}
    modules = by_place(read(write(tmp_path, tensors, **config), shapes))
    assert_deltas(modules, fused_deltas(tensors, (which,), swapped))


@pytest.mark.parametrize("which", SQUARE)
@pytest.mark.parametrize("version", [None, "", "main", "0.19", "0.19.1.dev0@abc", 19])
def test_square_parameters_of_unknown_versions_are_refused(tmp_path, which, version):
    tensors = fused_tensors((which,), shapes=SQUARE[which])
    config = {"target_parameters": [f"experts.{which}"], "peft_version": version}
    with pytest.raises(AdapterError, match=r"experts\.lora_A.*swapped.*peft_version"):
        read(write(tmp_path, tensors, **config), SQUARE[which])


def test_a_single_expert_was_never_swapped(tmp_path):
    """PEFT then takes B A for the change of the weight, whatever the version."""
    shapes = TinyMixture(hidden=2 * INTERMEDIATE, num_experts=1)
    tensors = fused_tensors(("gate_up_proj",), shapes=shapes)
    config = {"target_parameters": BOTH[:1], "peft_version": "0.18.1"}
    modules = by_place(read(write(tmp_path, tensors, **config), shapes))
    assert_deltas(modules, fused_deltas(tensors, ("gate_up_proj",), False, experts=1))


@pytest.mark.parametrize("swapped", [False, True])
def test_one_parameter_s_shapes_tell_for_both(tmp_path, swapped):
    shapes, which = SQUARE["gate_up_proj"], ("gate_up_proj", "down_proj")
    tensors = fused_tensors(which, swapped, shapes=shapes)
    modules = by_place(read(write(tmp_path, tensors, target_parameters=BOTH), shapes))
    assert_deltas(modules, fused_deltas(tensors, which, swapped))


def test_two_orientations_are_refused(tmp_path):
    down = fused_tensors(swapped=True)
    tensors = fused_tensors() | {key: down[key] for key in down if "base_layer" not in key}
    with pytest.raises(AdapterError, match=r"experts\.lora_A.*other way round.*base_layer"):
        read(write(tmp_path, tensors, target_parameters=BOTH))


# ---- what is refused


def fused(which=("gate_up_proj", "down_proj"), **changes):
    return {**fused_tensors(which), **changes}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (fused(), {"target_parameters": BOTH[:1]}, r"experts\.lora_A.*down_proj.*does not target"),
        (fused(), {"target_parameters": None}, r"(gate_up|down)_proj.*does not target"),
        (without(fused(), "experts.lora"), {}, r"base_layer\.lora_A.*other is missing"),
        (without(fused(), "base_layer.lora_B"), {}, r"base_layer\.lora_A.*no lora_B"),
        (fused_tensors(rank=5), {}, r"lora_A.*\[30, 32\].*\[24, 32\].*experts · rank"),
        (
            fused(**{f"{BLOCK}.experts.lora_B.weight": random_factors(HIDDEN, 12)}),
            {},
            r"experts\.lora_B.*\[32, 12\].*\[32, 24\]",
        ),
        (
            fused(**{f"{BLOCK}.experts.lora_A.weight": random_factors(24, 23)}),
            {},
            r"experts\.lora_A.*\[24, 23\].*\[E·r, 32\] with B \[48, r·E\] for gate_up_proj",
        ),
        (
            fused(**{f"{BLOCK}.experts.lora_A.weight": random_factors(6, 4, 24)}),
            {},
            r"experts\.lora_A.*\[6, 4, 24\]",
        ),
        (
            fused(**{f"{BLOCK}.experts.lora_A.weight": torch.full((24, 24), math.nan)}),
            {},
            r"experts\.lora_A.*NaN",
        ),
        (fused(("down_proj",)), {}, r"target_parameters names 'mlp\.experts\.gate_up_proj'.*no f"),
        (
            fused(("down_proj",)) | stacked_tensors("w2", EXPERTS, 1),
            {"target_parameters": BOTH[1:]},
            r"experts\.down_proj of expert 0.*one of each",
        ),
        (
            expert_tensors(),
            {"target_parameters": [*BOTH, "gate.weight"]},
            "target_parameters names 'gate.weight'",
        ),
        (fused(), {"r": 70}, "rank 70.*max_lora_rank = 64"),
        (
            {key.replace("layers.0", "layers.1"): tensor for key, tensor in fused().items()},
            {},
            "which layer 1 lacks",
        ),
    ],
)
def test_refusals_of_fused_experts(tmp_path, tensors, config, message):
    with pytest.raises(AdapterError, match=message) as refusal:
        read(write(tmp_path, tensors, **{"target_parameters": BOTH, **config}))
    assert "accepted" in str(refusal.value)


class TwoSparseLayers(TinyMixture):
    """Experts in both layers."""

    def has_target(self, target, layer):
        return super().has_target(target, 0)


def in_layer(tensors, layer):
    return {key.replace("layers.0", f"layers.{layer}"): value for key, value in tensors.items()}


@pytest.mark.parametrize("second", [("gate_up_proj",), ("down_proj",), ()])
def test_a_layer_without_its_targeted_parameters_is_refused(tmp_path, second):
    """PEFT writes a targeted parameter in every layer that has it: such a file was cut."""
    whole = fused_tensors()
    assert len(whole) == 4
    rest = in_layer(fused_tensors(second), 1) if second else {}
    path = write(tmp_path, whole | rest, target_parameters=BOTH)
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.experts\.\w+.*every layer"):
        read(path, TwoSparseLayers())


def test_layers_named_one_by_one_are_those_that_must_be_there(tmp_path):
    only = [f"layers.0.{name}" for name in BOTH]
    modules = read(write(tmp_path, fused_tensors(), target_parameters=only), TwoSparseLayers())
    assert {module.layer for module in modules.modules} == {0}
