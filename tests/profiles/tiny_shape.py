"""A tiny model with random weights and adapters, as the benchmarks build larger ones."""

from contextlib import contextmanager

import torch

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint
from engine.random_source import RandomSource
from profiles.running_batch import RunningBatch
from profiles.shape_engine import adapter_names, random_adapters, shape_engine

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def tiny_checkpoint(config):
    architecture = Architecture.from_config(config)
    return Checkpoint(architecture, RandomSource(architecture, std=0.02, seed=0), path="tiny")


@contextmanager
def tiny_batch(config=DENSE, case="mix8", batch=4, tokens=64, **keywords):
    """A running batch on the CPU."""
    checkpoint = tiny_checkpoint(config)
    device = torch.device("cpu")
    with random_adapters(checkpoint, [case], device) as paths:
        engine = shape_engine(
            checkpoint,
            paths,
            [batch],
            128 + tokens,
            lora=case != "off",
            device="cpu",
            prefill_chunk_tokens=256,
            **keywords,
        )
    with engine, RunningBatch(engine, adapter_names(case, batch), tokens) as running:
        yield running
