"""Random LoRA adapters in PEFT's layout, strong enough to move next-token logprobs plainly."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROUTED = ("gate", "shared_expert_gate")
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


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
    experts: Sequence[int] | None = None,
    expert_rank: Callable[[int, str], int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for `model`: random A and B, a scale that is not 1.

    Where layers have experts, those of `experts` (all by default) get factors of their own for
    the targets among gate, up and down; `expert_rank(expert, target)` may differ by each.

    The delta of each module has about `strength` times the norm of a tenth of its weight. The
    expected scaling of each module is what `tests.oracle` computes from the config again.
    """
    generator = torch.Generator().manual_seed(seed * 7919 + rank)
    config = {"lora_alpha": 0.37 * rank, **config}
    tensors = {}
    patterns: dict[str, int] = dict(rank_pattern or {})
    for module, target, expert, weight in _linear_layers(model):
        if target not in targets or (layers is not None and _layer(module) not in layers):
            continue
        r = (rank_pattern or {}).get(target, rank)
        if expert is not None:
            if experts is not None and expert not in experts:
                continue
            if expert_rank is not None:
                r = expert_rank(expert, target)
                patterns[module.removeprefix("model.")] = r
        out, width = weight.shape
        scale = config["lora_alpha"] / (math.sqrt(r) if config.get("use_rslora") else r)
        a = torch.randn(r, width, generator=generator) / math.sqrt(width)
        b = torch.randn(out, r, generator=generator)
        b *= strength * 0.1 * weight.detach().norm().item() / (scale * (b @ a).norm().item())
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype).contiguous()
    names = list(targets)
    if any("block_sparse_moe" in key for key in tensors):
        names += [MIXTRAL_NAMES[name] for name in targets if name in MIXTRAL_NAMES]
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "target_modules": names,
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": patterns,
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def _layer(module: str) -> int:
    return int(module.split(".")[2])


def _linear_layers(
    model: torch.nn.Module,
) -> Iterator[tuple[str, str, int | None, torch.Tensor]]:
    """Every linear layer below a decoder layer: its path in a file, its name, its expert, its
    weight [out, in]. Experts come one by one, as files keep them."""
    mixtral = model.config.model_type == "mixtral"
    for name, weight in model.named_parameters():
        parts = name.split(".")
        if len(parts) < 5 or parts[1] != "layers":
            continue
        if parts[4] == "experts":
            block = f"model.layers.{parts[2]}." + ("block_sparse_moe" if mixtral else "mlp")
            slices = ("gate_proj", "up_proj") if parts[5] == "gate_up_proj" else ("down_proj",)
            for expert, both in enumerate(weight):
                for target, part in zip(slices, both.chunk(len(slices)), strict=True):
                    leaf = MIXTRAL_NAMES[target] if mixtral else target
                    yield f"{block}.experts.{expert}.{leaf}", target, expert, part
        elif parts[-1] == "weight" and weight.dim() == 2:
            module = name.removesuffix(".weight")
            if mixtral:
                module = module.replace(".mlp.gate", ".block_sparse_moe.gate")
            yield module, parts[-2], None, weight
