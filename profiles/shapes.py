"""Models that benchmarks know by name: shapes alone, their weights are drawn on the device.

A step's time depends on shapes and not on what the weights hold.
"""

import torch

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint
from engine.random_source import RandomSource


def _llama(**config: int | float | bool) -> Architecture:
    shared = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    return Architecture.from_config({**shared, **config})


D8 = _llama(  # Llama-3.1-8B
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
SMOLLM2 = _llama(  # SmolLM2-135M
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
SHAPES = {"D8": D8, "SmolLM2": SMOLLM2}


def open_shape(name: str) -> Checkpoint:
    """A checkpoint of random bfloat16 weights with the shapes called `name`."""
    architecture = SHAPES[name]
    assert architecture.dtype == torch.bfloat16
    return Checkpoint(architecture, RandomSource(architecture, std=0.02, seed=0), path=name)
