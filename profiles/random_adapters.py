"""PEFT directories with random factors for a model of any size, drawn on the device."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.architecture import Architecture
from memory.lora_targets import ATTENTION_TARGETS, EXPERT_TARGETS
from profiles.step_bytes import adapted_targets


def save_random_adapter(
    architecture: Architecture, path: Path, rank: int, seed: int, device: torch.device
) -> Path:
    """An adapter of `rank` on `adapted_targets` of every layer, bfloat16, alpha twice the rank.

    A layer's experts lie in stacked tensors, A [E, rank, in] and B [E, out, rank].
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors, names = {}, set()
    for layer in range(architecture.num_layers):
        for target in adapted_targets(architecture, layer):
            block = "self_attn" if target in ATTENTION_TARGETS else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{target.module_name}"
            stack = [architecture.num_experts] if target in EXPERT_TARGETS else []
            out, width = architecture.target_shape(target)
            for factor, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
                values = torch.randn(*stack, *shape, generator=generator, device=device) * 0.02
                tensors[f"{key}.{factor}.weight"] = values.to(torch.bfloat16).cpu()
            names.add(target.module_name)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(names),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
