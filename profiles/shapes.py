"""Models that benchmarks know by name: shapes alone, their weights are drawn on the device.

A step's time depends on shapes and not on what the weights hold.
"""

import torch

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint
from engine.random_source import RandomSource


def _shape(family: str, **config: int | float | bool) -> Architecture:
    shared = {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    return Architecture.from_config({**shared, **config})


D8 = _shape(
    "Llama",
    vocab_size=128256,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rope_theta=500_000.0,
    tie_word_embeddings=False,
)
M16 = _shape(
    "Qwen3Moe",
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rope_theta=1_000_000.0,
    tie_word_embeddings=False,
)
SMOLLM2 = _shape(
    "Llama",
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)
ORIGINS = {
    "D8": "Llama-3.1-8B",
    "M16": "Qwen3-30B-A3B, 16 of its 48 layers",
    "SmolLM2": "SmolLM2-135M",
}
SHAPES = {"D8": D8, "M16": M16, "SmolLM2": SMOLLM2}


def open_shape(name: str) -> Checkpoint:
    """A checkpoint of random bfloat16 weights with the shapes called `name`."""
    architecture = SHAPES[name]
    assert architecture.dtype == torch.bfloat16
    return Checkpoint(architecture, RandomSource(architecture, std=0.02, seed=0), path=name)
