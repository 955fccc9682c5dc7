"""Models that benchmarks know by name. Weights of the large ones are drawn on the device."""

from pathlib import Path

import torch

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.random_source import RandomSource
from engine.rope_config import RopeConfig

SMOLLM2_FILE = Path(".models/SmolLM2-135M-Instruct.Q4_1.gguf")

D8 = Architecture(
    name="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    activation="silu",
    norm_eps=1e-5,
    norm_weight_offset=0.0,
    embedding_scale=1.0,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    max_position=8192,
    rope=RopeConfig(theta=500_000.0),
    layer_windows=(0,) * 32,
    dtype=torch.bfloat16,
    bos_token_ids=(),
    eos_token_ids=(),
)
SHAPES = {"D8": D8}
NAMES = (*SHAPES, "SmolLM2")


def open_model(name: str) -> Checkpoint:
    """The shapes of Llama-3.1-8B ("D8") with random weights, or the real SmolLM2."""
    if name in SHAPES:
        architecture = SHAPES[name]
        return Checkpoint(architecture, RandomSource(architecture, std=0.02, seed=0), path=name)
    if name == "SmolLM2":
        return open_checkpoint(SMOLLM2_FILE, dtype=torch.bfloat16)
    raise SystemExit(f"no model {name!r}; known: {', '.join(NAMES)}")
