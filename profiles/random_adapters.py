"""PEFT directories with random factors for a model of any size, drawn on the device."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.architecture import Architecture
from memory.lora_targets import DENSE_TARGETS, Target


def save_random_adapter(
    architecture: Architecture, path: Path, rank: int, seed: int, device: torch.device
) -> Path:
    """An adapter of `rank` on every linear layer, bfloat16, alpha twice the rank."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(architecture.num_layers):
        for target in DENSE_TARGETS:
            block = "self_attn" if target <= Target.O_PROJ else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{target.name.lower()}"
            out, width = architecture.target_shape(target)
            for factor, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
                values = torch.randn(shape, generator=generator, device=device) * 0.02
                tensors[f"{key}.{factor}.weight"] = values.to(torch.bfloat16).cpu()
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [target.name.lower() for target in DENSE_TARGETS],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
