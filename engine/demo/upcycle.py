"""Make a mixture of experts of a dense Llama model, by sparse upcycling, in Mixtral's layout.

    python -m engine.demo.upcycle .models/SmolLM2-135M-Instruct.Q4_1.gguf [FOLDER]

Every expert of a layer is the layer's MLP with noise of its own, the router is random, all else is
copied. Routing weights sum to one, so the mixture of equal experts would be the dense model itself;
with the noise its text stays sensible and every expert is distinct. Drawn from one seed: the same
machine, torch and arguments give the same bytes. After Komatsuzaki et al., "Sparse Upcycling:
Training Mixture-of-Experts from Dense Checkpoints", 2023.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.errors import CheckpointError

NAME = "SmolLM2-135M-Instruct-4x2"
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # Llama's and Mixtral's


@dataclass(frozen=True)
class Upcycling:
    """What the mixture is like. `noise` is relative to each matrix's own standard deviation,
    `router_spread` is the standard deviation that router logits have over tokens of unit size."""

    num_experts: int = 4
    top_k: int = 2
    noise: float = 0.1
    router_spread: float = 1.0
    seed: int = 0


def upcycle(model: Path, folder: Path, recipe: Upcycling | None = None) -> Path:
    """Write the mixture made of `model`, a Llama checkpoint or .gguf file, to `folder`.

    bfloat16 weights in one file, config.json and the tokenizer's files. The folder appears under
    its name only when it is complete. CheckpointError if the model is no Llama without biases.
    """
    recipe = recipe or Upcycling()
    checkpoint = open_checkpoint(model)
    architecture = checkpoint.architecture
    if architecture.name != "LlamaForCausalLM" or architecture.mlp_bias or architecture.qkv_bias:
        raise CheckpointError(
            f"{model}: {architecture.name}; accepted: LlamaForCausalLM without biases, whose "
            "layers Mixtral has too"
        )
    if architecture.rope.kind != "default":
        raise CheckpointError(f"{model}: rope of kind {architecture.rope.kind}; accepted: default")
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; accepted: a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        new = Path(work) / folder.name
        new.mkdir()
        save_file(_weights(checkpoint, recipe), new / "model.safetensors", {"format": "pt"})
        config = _config(architecture, checkpoint.eos_token_ids, recipe)
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        source = checkpoint.tokenizer_source
        if source is not None:
            tokenizer = AutoTokenizer.from_pretrained(source.location, gguf_file=source.gguf_file)
            tokenizer.save_pretrained(new)
        new.rename(folder)
    return folder


def _weights(checkpoint: Checkpoint, recipe: Upcycling) -> dict[str, torch.Tensor]:
    """Every parameter of the mixture, bfloat16, under the names of Mixtral's files."""
    shapes = checkpoint.architecture.parameter_shapes()
    generator = torch.Generator().manual_seed(recipe.seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        dense = torch.empty(shape)
        checkpoint.source.copy_into(name, dense)
        block, separator, projection = name.removesuffix(".weight").partition(".mlp.")
        if not separator:
            weights[name] = dense.bfloat16()
            continue
        scale = recipe.noise * dense.std()
        noise = torch.empty(shape)
        for expert in range(recipe.num_experts):
            key = f"{block}.block_sparse_moe.experts.{expert}.{EXPERT_NAMES[projection]}.weight"
            noise.normal_(generator=generator).mul_(scale).add_(dense)
            weights[key] = noise.bfloat16()
    for name in [name for name in shapes if name.endswith("post_attention_layernorm.weight")]:
        block = name.removesuffix(".post_attention_layernorm.weight")
        weights[f"{block}.block_sparse_moe.gate.weight"] = _router(
            weights[name].float(), recipe, generator
        )
    return weights


def _router(norm: torch.Tensor, recipe: Upcycling, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 [experts, H]: random rows whose logits spread as the recipe says, where a token is
    the norm's weight times numbers of unit variance."""
    rows = torch.randn((recipe.num_experts, norm.numel()), generator=generator)
    spread = (rows * norm).norm(dim=1, keepdim=True)
    return (rows * (recipe.router_spread / spread)).bfloat16()


def _config(
    architecture: Architecture, eos_token_ids: tuple[int, ...], recipe: Upcycling
) -> Mapping[str, Any]:
    """config.json of a Mixtral model."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_q_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": architecture.max_position,
        "rms_norm_eps": architecture.norm_eps,
        "rope_theta": architecture.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.top_k,
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "bos_token_id": next(iter(architecture.bos_token_ids), None),
        "eos_token_id": list(eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the dense model: a .gguf file or a directory")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".models") / NAME)
    parser.add_argument("--experts", type=int, default=Upcycling.num_experts)
    parser.add_argument("--top-k", type=int, default=Upcycling.top_k)
    parser.add_argument("--noise", type=float, default=Upcycling.noise)
    parser.add_argument("--seed", type=int, default=Upcycling.seed)
    options = parser.parse_args()
    recipe = Upcycling(options.experts, options.top_k, options.noise, seed=options.seed)
    try:
        print(upcycle(options.model, options.folder, recipe))
    except CheckpointError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
