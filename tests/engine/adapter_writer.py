"""Small adapter directories for tests, written by hand: their tensors, config and shards."""

import json

import torch
from safetensors.torch import save_file

from engine.adapter_files import read_adapter
from memory.lora_targets import DENSE_TARGETS, Target

HIDDEN, INTERMEDIATE, LAYERS, Q, KV = 192, 344, 3, 256, 64
SHAPES = {
    Target.Q_PROJ: (Q, HIDDEN),
    Target.K_PROJ: (KV, HIDDEN),
    Target.V_PROJ: (KV, HIDDEN),
    Target.O_PROJ: (HIDDEN, Q),
    Target.GATE_PROJ: (INTERMEDIATE, HIDDEN),
    Target.UP_PROJ: (INTERMEDIATE, HIDDEN),
    Target.DOWN_PROJ: (HIDDEN, INTERMEDIATE),
}
PREFIX = "base_model.model.model."
Q0 = PREFIX + "layers.0.self_attn.q_proj"


class TinyShapes:
    """The shapes of a grouped-query model whose heads are wider than hidden / heads."""

    num_layers = LAYERS
    num_experts = 0

    def has_target(self, target, layer):
        return target in SHAPES

    def target_shape(self, target):
        return SHAPES[target]


def module_name(layer, target):
    block = "self_attn" if target <= Target.O_PROJ else "mlp"
    return f"{PREFIX}layers.{layer}.{block}.{target.name.lower()}"


def lora_tensors(targets=(Target.Q_PROJ, Target.V_PROJ), rank=4, layers=range(LAYERS)):
    """Random factors under PEFT's keys."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in layers:
        for target in targets:
            out_features, in_features = SHAPES[target]
            name = module_name(layer, target)
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator)
    return tensors


def write(folder, tensors=None, **config):
    """An adapter directory; by default rank 4 on q and v with alpha 6."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 6,
        "target_modules": [target.name.lower() for target in DENSE_TARGETS],
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(merged))
    if tensors is None:
        tensors = lora_tensors()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder, max_lora_rank=64, dtype=None):
    """The adapter as the tiny model's engine would read it."""
    return read_adapter(folder, TinyShapes(), max_lora_rank, dtype)


def renamed(change):
    """The default tensors under other keys."""
    return {change(key): tensor for key, tensor in lora_tensors().items()}


def assert_same_modules(adapter, tensors, scaling=1.5):
    """Every tensor is bound, to the module its original key names."""
    assert 2 * len(adapter.modules) == len(tensors)
    for module in adapter.modules:
        name = module_name(module.layer, module.target)
        assert torch.equal(module.a, tensors[f"{name}.lora_A.weight"])
        assert torch.equal(module.b, tensors[f"{name}.lora_B.weight"])
        assert module.scaling == scaling


def write_shards(folder, tensors, **extra_keys):
    """Every second tensor in another file, so that pairs are split."""
    weight_map = dict(extra_keys)
    for number in (0, 1):
        name = f"adapter_model-0000{number + 1}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index
