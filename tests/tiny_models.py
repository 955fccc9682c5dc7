"""Tiny random models of every architecture, as Hugging Face checkpoints on disk."""

from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 515,
    "hidden_size": 192,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3_rope": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "llama_bias": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "mistral": lambda: transformers.MistralConfig(
        **SIZES, tie_word_embeddings=False, sliding_window=24
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=False
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gemma": lambda: transformers.GemmaConfig(
        **SIZES, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES | {"intermediate_size": 72}, num_local_experts=6, num_experts_per_tok=2
    ),
    "mixtral_gelu": lambda: transformers.MixtralConfig(
        **SIZES | {"intermediate_size": 72, "head_dim": 24},
        num_local_experts=5,
        num_experts_per_tok=3,
        hidden_act="gelu",
        sliding_window=24,
        tie_word_embeddings=True,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=88,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        num_experts=96,
        num_experts_per_tok=8,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"} | {"intermediate_size": 56},
        num_experts=16,
        num_experts_per_tok=8,
        clip_qkv=1.5,
    ),
}
MIXTURES = ("mixtral", "mixtral_gelu", "qwen2_moe", "qwen3_moe", "olmoe")


def build_model(name: str) -> torch.nn.Module:
    """The float32 model of an architecture, every parameter random, biases and norms too."""
    config = CONFIGS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for key, parameter in model.named_parameters():
            if "norm" in key:
                centre = 0.0 if name == "gemma" else 1.0
                torch.nn.init.normal_(parameter, mean=centre, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() == 1 else 0.08)
    return model.eval()


def save_model(name: str, directory: Path) -> Path:
    """Write the model of an architecture as a checkpoint; returns its directory."""
    path = directory / name
    build_model(name).save_pretrained(path)
    return path
