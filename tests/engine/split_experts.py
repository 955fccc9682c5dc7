"""transformers' parameters under the canonical names: each expert's weights by themselves."""

from collections.abc import Mapping

import torch


def split_experts(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I] as 3 E views; the others as they are."""
    split = {}
    for name, tensor in parameters.items():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".mlp.experts"):
            split[name] = tensor
            continue
        for expert, weights in enumerate(tensor):
            parts = {"down_proj": weights}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weights.chunk(2), strict=True))
            for part, weight in parts.items():
                split[f"{experts}.{expert}.{part}.weight"] = weight
    return split
