"""Random LoRA adapters in PEFT's layout, strong enough to move next-token logprobs plainly."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
ALL = tuple(MODULES)


def save_adapter(
    model: torch.nn.Module,
    path: Path,
    rank: int,
    targets: Sequence[str] = ALL,
    *,
    seed: int = 0,
    strength: float = 2.0,
    dtype: torch.dtype = torch.float32,
    rank_pattern: Mapping[str, int] | None = None,
    layers: Sequence[int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for `model`: random A and B, a scale that is not 1.

    The delta of each module has about `strength` times the norm of a tenth of its weight. The
    expected scaling of each module is what `tests.oracle` computes from the config again.
    """
    generator = torch.Generator().manual_seed(seed * 7919 + rank)
    config = {"lora_alpha": 0.37 * rank, **config}
    tensors = {}
    for name, weight in model.named_parameters():
        parts = name.split(".")
        if len(parts) < 5 or parts[-1] != "weight" or parts[-2] not in targets:
            continue
        if layers is not None and int(parts[2]) not in layers:
            continue
        module = name.removesuffix(".weight")
        r = (rank_pattern or {}).get(parts[-2], rank)
        out, width = weight.shape
        scale = config["lora_alpha"] / (math.sqrt(r) if config.get("use_rslora") else r)
        a = torch.randn(r, width, generator=generator) / math.sqrt(width)
        b = torch.randn(out, r, generator=generator)
        b *= strength * 0.1 * weight.detach().norm().item() / (scale * (b @ a).norm().item())
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype).contiguous()
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": dict(rank_pattern or {}),
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors")
    return path
