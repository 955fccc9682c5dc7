"""Expert adapters that PEFT itself writes or reads: the same change of every weight as PEFT's."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.adapter_files import read_adapter
from engine.architecture import Architecture
from memory.lora_targets import EXPERT_TARGETS, Target
from tests.engine.adapter_writer import write
from tests.engine.expert_adapter_writer import NAMINGS, pair

peft = pytest.importorskip("peft")

EXPERTS, HIDDEN, INTERMEDIATE = 5, 48, 24  # the experts' gate_up is square
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
}
QWEN = SIZES | {"num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE}
FAMILIES = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **QWEN, intermediate_size=40, shared_expert_intermediate_size=20, mlp_only_layers=[1]
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN, intermediate_size=40),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{k: v for k, v in SIZES.items() if k not in ("head_dim", "num_attention_heads")},
        num_attention_heads=3,
        num_experts=EXPERTS,
        intermediate_size=INTERMEDIATE,
    ),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OLD_NAMES = ["q_proj", "gate", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "both": {"target_modules": [], "target_parameters": BOTH},
    "gate_up": {"target_modules": ["q_proj", "v_proj"], "target_parameters": BOTH[:1]},
    "down": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "patterns": {
        "target_modules": ["k_proj", "o_proj"],
        "target_parameters": [*BOTH, "gate.weight"],
        "rank_pattern": {"gate.weight": 2, r"0\.mlp\.experts\.gate_up_proj": 3, "down_proj": 5},
        "alpha_pattern": {"gate.weight": 7, "experts": 1, "model.layers.0.*down_proj": 11},
        "use_rslora": True,
    },
    "old names": {"target_modules": OLD_NAMES},
    "old names, rsLoRA": {"target_modules": OLD_NAMES, "use_rslora": True},
    "all": {"target_modules": "all-linear"},
    "shared": {"target_modules": ["shared_expert.gate_proj", "down_proj", "shared_expert_gate"]},
}
CASES = [
    *(("qwen3_moe", name) for name in CONFIGS if name != "shared"),
    *(("mixtral", name) for name in ("both", "patterns", "old names")),
    *(("qwen2_moe", name) for name in ("both", "patterns", "all", "shared")),
    *(("olmoe", name) for name in ("down", "patterns", "all")),
]
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def build(family):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            FAMILIES[family](), dtype=torch.float32
        ).eval()


def weight_of(weights, module):
    """The part of a model's state that a module changes."""
    prefix = f"model.layers.{module.layer}."
    name = module.target.module_name
    if module.target in EXPERT_TARGETS:
        if module.target == Target.EXPERT_DOWN_PROJ:
            return weights[f"{prefix}mlp.{name}"][module.expert]
        gate_up = weights[f"{prefix}mlp.experts.gate_up_proj"][module.expert]
        return gate_up.chunk(2)[module.target - Target.EXPERT_GATE_PROJ]
    block = "self_attn" if module.target <= Target.O_PROJ else "mlp"
    return weights[f"{prefix}{block}.{name}.weight"]


def merged(weights, adapter):
    weights = {name: weight.clone() for name, weight in weights.items()}
    for module in adapter.modules:
        weight_of(weights, module).add_(module.scaling * module.b @ module.a)
    return weights


def assert_same_weights(weights, expected):
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5, msg=name)


def read(folder, model):
    architecture = Architecture.from_config(model.config.to_dict())
    return read_adapter(folder, architecture, 64)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_peft_writes(tmp_path, family, name):
    model = build(family)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    config = dict(CONFIGS[name])
    if family == "mixtral" and isinstance(config["target_modules"], list):
        names = config["target_modules"]
        config["target_modules"] = [MIXTRAL_NAMES.get(name, name) for name in names]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **config))
    torch.manual_seed(1)
    for key, factor in wrapped.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(factor, std=0.2)
    wrapped.save_pretrained(str(tmp_path))
    adapter = read(tmp_path, model)
    expected = wrapped.merge_and_unload().state_dict()
    changed = [key for key, weight in weights.items() if not torch.equal(weight, expected[key])]
    assert changed
    assert_same_weights(merged(weights, adapter), expected)


@pytest.mark.parametrize(
    ("family", "naming"), [("qwen3_moe", "qwen"), ("olmoe", "qwen"), ("mixtral", "mixtral")]
)
def test_keys_of_all_experts_as_peft_reads_them(tmp_path, family, naming):
    """Files of transformers 4, which PEFT converts. (With rsLoRA its conversion is off by √2.)"""
    model = build(family)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    block, names = NAMINGS[naming]
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.{block}"
        tensors |= pair(f"{prefix}.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            gate, up, down = (f"{prefix}.experts.{expert}.{name}" for name in names)
            tensors |= pair(gate, INTERMEDIATE, HIDDEN) | pair(up, INTERMEDIATE, HIDDEN)
            tensors |= pair(down, HIDDEN, INTERMEDIATE)
    folder = write(tmp_path / "file", tensors, target_modules=["gate", *names])
    adapter = read(folder, model)
    assert len(adapter.modules) == 2 * (1 + 3 * EXPERTS)

    converted = peft.PeftModel.from_pretrained(model, str(folder))
    converted.save_pretrained(str(tmp_path / "converted"))
    again = read(tmp_path / "converted", model)
    expected = converted.merge_and_unload().state_dict()
    assert_same_weights(merged(weights, adapter), expected)
    assert_same_weights(merged(weights, again), expected)


@pytest.mark.parametrize("which", [BOTH, BOTH[:1], BOTH[1:]])
def test_what_older_versions_wrote(tmp_path, which):
    """PEFT up to 0.19.0 with its factors' roles swapped; only the version tells where gate_up is
    square and alone."""
    model = build("qwen3_moe")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=[], target_parameters=which)
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for key, factor in wrapped.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(factor, std=0.2)
    wrapped.save_pretrained(str(tmp_path))
    new = read(tmp_path, model)

    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for key in [key for key in tensors if "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        a = tensors[key].reshape(EXPERTS, 4, -1)
        b = tensors[other].reshape(-1, 4, EXPERTS)
        tensors[key] = b.permute(2, 1, 0).reshape(EXPERTS * 4, -1).contiguous()
        tensors[other] = a.permute(2, 1, 0).reshape(-1, 4 * EXPERTS).contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    file = tmp_path / "adapter_config.json"
    content = json.loads(file.read_text()) | {"peft_version": "0.18.1"}
    file.write_text(json.dumps(content))
    old = read(tmp_path, model)
    assert len(old.modules) == len(new.modules)
    for one, other in zip(old.modules, new.modules, strict=True):
        for field in dataclasses.fields(one):
            value, expected = getattr(one, field.name), getattr(other, field.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, expected)
            else:
                assert value == expected
