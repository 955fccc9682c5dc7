"""The demonstration's adapters: small, varied in what an engine can get wrong, and readable."""

import json
from pathlib import Path

import pytest
import torch

import engine.demo
from engine.adapter_config import AdapterConfig
from engine.adapter_files import read_adapter
from engine.demo.training_data import EXAMPLES, HELD_OUT_PROMPTS, as_json, bullets, emoji, shout
from memory.lora_targets import DENSE_TARGETS, Target

ADAPTERS = Path(engine.demo.__file__).parent / "adapters"
NAMES = ("bullets", "emoji", "french", "json", "pirate", "shout")
MOE_NAME = "moe-telegram"  # for another model, see test_demo_moe.py
MOST_BYTES = 8_000_000


class SmolLM2Shapes:
    """The linear layers of SmolLM2-135M."""

    num_layers = 30
    num_experts = 0

    def has_target(self, target, layer):
        return target in DENSE_TARGETS

    def target_shape(self, target):
        hidden, intermediate, key_value = 576, 1536, 192
        return {
            Target.K_PROJ: (key_value, hidden),
            Target.V_PROJ: (key_value, hidden),
            Target.GATE_PROJ: (intermediate, hidden),
            Target.UP_PROJ: (intermediate, hidden),
            Target.DOWN_PROJ: (hidden, intermediate),
        }.get(target, (hidden, hidden))


@pytest.fixture(scope="module")
def adapters():
    return {name: read_adapter(ADAPTERS / name, SmolLM2Shapes(), 16) for name in NAMES}


@pytest.fixture(scope="module")
def configs():
    return {name: AdapterConfig.read(ADAPTERS / name / "adapter_config.json") for name in NAMES}


def test_each_adapter_is_two_files_and_all_are_small():
    assert {folder.name for folder in ADAPTERS.iterdir()} == {*NAMES, MOE_NAME}
    files = [file for name in NAMES for file in (ADAPTERS / name).iterdir()]
    assert {file.name for file in files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_weights_are_trained_and_bfloat16(adapters):
    for adapter in adapters.values():
        for module in adapter.modules:
            assert module.a.dtype == module.b.dtype == torch.bfloat16
            assert module.b.any(), "an untrained lora_B is zero"


def test_ranks_targets_and_scalings_vary(adapters, configs):
    ranks = {module.rank for adapter in adapters.values() for module in adapter.modules}
    assert {4, 8, 16} <= ranks
    assert any(rank & (rank - 1) for rank in ranks), "one rank is no power of two"
    assert all(module.scaling != 1 for adapter in adapters.values() for module in adapter.modules)
    assert any(config.use_rslora for config in configs.values())
    assert any(config.rank_pattern and config.alpha_pattern for config in configs.values())
    assert any(config.layers_to_transform for config in configs.values())
    targets = {adapter.target_modules for adapter in adapters.values()}
    assert ("k_proj", "o_proj", "q_proj", "v_proj") in targets
    assert max(map(len, targets)) == 7
    assert len(targets) == len(NAMES)


def test_patterns_reach_the_tensors(adapters):
    """One adapter holds modules of several ranks and scalings."""
    modules = adapters["bullets"].modules
    assert len({module.rank for module in modules}) == 3
    assert len({module.scaling for module in modules}) == 3


def test_adapters_are_those_of_the_committed_recipes():
    pytest.importorskip("peft")
    from engine.demo.train_adapters import BASE_MODEL, RECIPES

    assert set(RECIPES) == set(NAMES)
    for name, recipe in RECIPES.items():
        config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == BASE_MODEL
        expected = {**recipe.lora, "target_modules": sorted(recipe.lora["target_modules"])}
        assert {key: config[key] for key in expected} == expected


def test_training_texts():
    questions = [example.question for example in EXAMPLES]
    assert len(set(questions)) == len(questions) >= 60
    assert not set(questions) & set(HELD_OUT_PROMPTS)
    for example in EXAMPLES:
        assert all(example)
        assert shout(example).isupper()
        assert list(json.loads(as_json(example))) == ["answer"]
        assert all(line.startswith("* ") for line in bullets(example).splitlines())
        assert emoji(example).startswith(example.emoji)
        assert emoji(example).endswith(example.emoji)
