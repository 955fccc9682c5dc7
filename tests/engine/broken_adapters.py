"""Adapter directories that cannot be served, each with what an engine must say of it.

All are copies of a good q/v adapter with one thing wrong.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def _set(**settings: object) -> Callable[[dict, Tensors], Tensors]:
    def change(config: dict, tensors: Tensors) -> Tensors:
        config.update(settings)
        return tensors

    return change


def _each(
    change: Callable[[str, torch.Tensor], torch.Tensor],
) -> Callable[[dict, Tensors], Tensors]:
    return lambda config, tensors: {key: change(key, t) for key, t in tensors.items()}


def _narrower(key: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-32] if "lora_A" in key else tensor


def _grown(key: str, tensor: torch.Tensor, rank: int = 17) -> torch.Tensor:
    axis = 0 if "lora_A" in key else 1
    return tensor.repeat_interleave(rank, dim=axis).narrow(axis, 0, rank)


def _grown_q(key: str, tensor: torch.Tensor) -> torch.Tensor:
    return _grown(key, tensor) if "q_proj" in key else tensor


def _wider_rank(config: dict, tensors: Tensors) -> Tensors:
    config["r"] = 17
    return _each(_grown)(config, tensors)


def _wider_rank_of_q(config: dict, tensors: Tensors) -> Tensors:
    config["rank_pattern"] = {"q_proj": 17}
    return _each(_grown_q)(config, tensors)


def _without_one_b(config: dict, tensors: Tensors) -> Tensors:
    del tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    return tensors


BROKEN: dict[str, tuple[Callable[[dict, Tensors], Tensors], str]] = {
    "rank 0": (_set(r=0), r"\br\b.*0"),
    "rank -4": (_set(r=-4), r"\br\b.*-4"),
    "rank 8 over 4": (_set(r=8), r"q_proj.*shape \[4"),
    "empty tensors": (_each(lambda key, tensor: torch.zeros(0)), r"shape \[0\]"),
    "no tensors": (lambda config, tensors: {}, "no tensors"),
    "no B": (_without_one_b, r"layers\.1\.self_attn\.v_proj.*lora_B"),
    "hidden size": (_each(_narrower), r"shape \[4, 160\]"),
    "rank 17": (_wider_rank, "rank 17.*16"),
    "rank 17 by pattern": (_wider_rank_of_q, "rank 17.*16"),
}


def save_broken(good: Path, directory: Path) -> dict[str, tuple[Path, str]]:
    """Every broken copy of `good`, of rank 4, as `{name: (path, what the error must match)}`, and
    a path where nothing is."""
    saved = {"absent": (directory / "absent", "absent is not a directory")}
    for name, (change, message) in BROKEN.items():
        path = directory / name.replace(" ", "-")
        write_copy(good, path, change)
        saved[name] = (path, message)
    return saved


def write_copy(good: Path, path: Path, change: Callable[[dict, Tensors], Tensors]) -> Path:
    """`good` with its config and tensors changed."""
    shutil.copytree(good, path)
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = change(config, load_file(path / "adapter_model.safetensors"))
    (path / "adapter_config.json").write_text(json.dumps(config))
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, path / "adapter_model.safetensors")
    return path
