"""adapter_config.json: scaling by PEFT's patterns, and every key classed or refused by name."""

import dataclasses
import math

import pytest
import torch

from engine.adapter_config import IGNORED, MUST_BE_OFF, READ, AdapterConfig
from engine.errors import AdapterError
from memory.lora_targets import Target
from tests.engine.adapter_writer import (
    HIDDEN,
    INTERMEDIATE,
    KV,
    LAYERS,
    PREFIX,
    assert_same_modules,
    lora_tensors,
    module_name,
    read,
    renamed,
    write,
)


def test_scaling_follows_patterns_as_peft_matches_them(tmp_path):
    tensors = lora_tensors(rank=4)
    for layer, rank in ((1, 2), (2, 9)):
        name = module_name(layer, Target.V_PROJ)
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN)
        tensors[f"{name}.lora_B.weight"] = torch.randn(KV, rank)
    rank_pattern = {r"layers\.1\.self_attn\.v_proj": 2, "^model.layers.2.self_attn.v_proj": 9}
    config = {"rank_pattern": rank_pattern, "alpha_pattern": {"v_proj": 5, "2.self_attn.v_proj": 1}}
    for rslora in (False, True):
        adapter = read(write(tmp_path, tensors, use_rslora=rslora, **config))
        expected_rank = {(1, Target.V_PROJ): 2, (2, Target.V_PROJ): 9}
        for module in adapter.modules:
            rank = expected_rank.get((module.layer, module.target), 4)
            alpha = 5 if module.target == Target.V_PROJ else 6  # the first match wins
            assert module.rank == rank
            assert module.scaling == alpha / (math.sqrt(rank) if rslora else rank)
        assert adapter.rank == 9


def test_a_pattern_needs_a_whole_last_part(tmp_path):
    """`proj` and `v_pro` name no module: a key matches from a dot on to the end."""
    folder = write(tmp_path, rank_pattern={"proj": 2, "v_pro": 3, "layers.0": 5})
    assert {module.rank for module in read(folder).modules} == {4}


@pytest.mark.parametrize("rslora", [False, True])
def test_agrees_with_peft(tmp_path, rslora):
    """Rank, scaling and the merged output of a model that PEFT built and saved."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=515,
        )
    )
    weights = {name: weight.clone() for name, weight in base.state_dict().items()}
    config = peft.LoraConfig(
        r=6,
        lora_alpha=9,
        use_rslora=rslora,
        target_modules=r".*\.(q|k|o|gate|down)_proj",
        exclude_modules=["layers.1.self_attn.o_proj"],
        rank_pattern={r"(1|2)\.self_attn\.k_proj": 3, "down_proj": 10, "k_proj": 5},
        alpha_pattern={"^model.layers.0.mlp.down_proj": 2, "q_proj": 30},
    )
    wrapped = peft.get_peft_model(base, config).eval()
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    wrapped.save_pretrained(str(tmp_path))
    token_ids = torch.randint(0, 515, (1, 12))
    with torch.inference_mode():
        expected = wrapped(token_ids).logits

    adapter = read(tmp_path)
    assert len(adapter.modules) == 5 * LAYERS - 1
    assert {module.rank for module in adapter.modules} == {3, 5, 6, 10}
    for module in adapter.modules:
        name = module_name(module.layer, module.target).removeprefix("base_model.model.")
        layer = wrapped.base_model.model.get_submodule(name)
        assert module.rank == layer.r["default"]
        assert module.scaling == layer.scaling["default"]
        weights[f"{name}.weight"] += module.scaling * module.b @ module.a
    plain = LlamaForCausalLM(base.config).eval()
    plain.load_state_dict(weights)
    with torch.inference_mode():
        torch.testing.assert_close(plain(token_ids).logits, expected, atol=2e-4, rtol=1e-4)


# ---- keys


def test_every_key_of_peft_is_classed():
    """A new PEFT may add keys; this says so. Until classed they are refused unless off."""
    peft = pytest.importorskip("peft")
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert names <= READ | IGNORED | set(MUST_BE_OFF)
    assert not READ & IGNORED
    assert not (READ | IGNORED) & set(MUST_BE_OFF)


def test_peft_default_config_is_accepted(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    config["peft_type"] = "LORA"
    assert len(read(write(tmp_path, **config)).modules) == 2 * LAYERS


@pytest.mark.parametrize(
    "config",
    [
        {"base_model_name_or_path": "some/model", "task_type": "CAUSAL_LM", "lora_dropout": 0.1},
        {"fan_in_fan_out": True, "inference_mode": True, "revision": "main"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False, "loftq_config": {}, "megatron_core": "megatron.core"},
        {"use_dora": False, "modules_to_save": None, "target_parameters": [], "bias": "none"},
        {"a_key_of_tomorrow": None, "another": False, "a_third": {}, "a_fourth": ""},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
        {"lora_alpha": 6.0, "rank_pattern": None, "alpha_pattern": {}},
    ],
)
def test_harmless_configs_are_accepted(tmp_path, config):
    assert_same_modules(read(write(tmp_path, **config)), lora_tensors())


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "LOHA"},
        {"peft_type": None},
        {"r": 0},
        {"r": -4},
        {"r": "4"},
        {"r": True},
        {"r": None},
        {"lora_alpha": None},
        {"lora_alpha": "16"},
        {"lora_alpha": math.nan},
        {"lora_alpha": math.inf},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e40},
        {"r": 10**400},
        {"use_rslora": "yes"},
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3, 9]},
        {"trainable_token_indices": {"embed_tokens": [3]}},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"alora_invocation_tokens": [1, 2]},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"megatron_config": {"tensor_model_parallel_size": 2}},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"arrow_config": {"top_k": 2}},
        {"kasa_config": {"beta": 1e-4}},
        {"velora_config": {"num_groups": 64}},
        {"monteclora_config": {"num_samples": 8}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "of_tomorrow"},
        {"init_lora_weights": 1},
        {"a_key_of_tomorrow": True},
        {"a_key_of_tomorrow": 0},
        {"a_key_of_tomorrow": "x"},
        {"rank_pattern": {"v_proj": 0}},
        {"rank_pattern": {"v_proj": 2.5}},
        {"rank_pattern": ["v_proj"]},
        {"rank_pattern": {"(v_proj": 4}},
        {"alpha_pattern": {"v_proj": None}},
        {"target_modules": 3},
        {"alpha_pattern": {"v_proj": -1e39}},
        {"rank_pattern": {"v_proj{9999999999}": 4}},
        {"target_modules": "(q_proj"},
        {"target_modules": "q_proj)|(k_proj"},
        {"target_modules": "(" * 20_000 + ")" * 20_000},
        {"exclude_modules": "q_proj)|(k_proj"},
        {"exclude_modules": "v_proj{9999999999}"},
        {"layers_to_transform": "all"},
    ],
    ids=lambda config: "-".join(f"{key}={value}"[:40] for key, value in config.items()),
)
def test_other_configs_are_refused_by_key(tmp_path, config):
    (key,) = config
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: {key}.*accepted"):
        read(write(tmp_path, **config))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "k_proj"]},
        {"target_modules": []},
        {"target_modules": r"model\.layers\.0\..*"},
        {"exclude_modules": ["v_proj"]},
        {"exclude_modules": r".*v_proj"},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": 0},
    ],
)
def test_tensors_that_the_config_does_not_target_are_refused(tmp_path, config):
    with pytest.raises(AdapterError, match=r"_proj\.lora_[AB]\.weight.*target"):
        read(write(tmp_path, **config))


def test_a_pattern_that_reads_two_ways_is_refused(tmp_path):
    """Nested deeper than the base, `^model.layers` names no module; alpha would be lost."""
    folder = write(
        tmp_path,
        renamed(lambda key: key.replace(PREFIX, PREFIX + "model.")),
        alpha_pattern={"^model.layers.1.self_attn.v_proj": 60},
    )
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.v_proj.*alpha_pattern"):
        read(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff", "[" * 200_000], ids=lambda s: s[:3])
def test_broken_config_files_are_refused(tmp_path, content):
    folder = write(tmp_path)
    (folder / "adapter_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        AdapterConfig.read(folder / "adapter_config.json")
