"""A model's shape and mathematics as frozen data, read from config.json.

Knows no files and no weights, only their canonical names (those of transformers' Llama). A config
that would change the mathematics in a way not modelled here is refused, never approximated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.config_reader import ConfigReader
from engine.model_family import read_activation, read_family, read_layer_windows
from engine.moe_config import read_moe
from engine.neutral_config_keys import NEUTRAL_CONFIG_KEYS
from engine.rope_config import RopeConfig, read_rope
from memory.lora_targets import (
    ATTENTION_TARGETS,
    EXPERT_TARGETS,
    MLP_TARGETS,
    SHARED_EXPERT_TARGETS,
    Target,
)
from memory.model_dims import MoEDims

__all__ = ["Architecture", "RopeConfig"]

MIN_HEAD_DIM = 16  # what the attention kernels' matrix products take at least
MAX_LAYERS = 4096  # more would be a broken config, and long lists before any weight is looked at
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama shape, dense or with experts; what differs between families is a
    field."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str  # "silu" | "gelu" | "gelu_tanh"
    norm_eps: float
    norm_weight_offset: float  # added to every norm's weight: 1 for Gemma
    embedding_scale: float  # before rounding to the dtype the model runs in, see below
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # of each head by itself
    row_qk_norm: bool  # of all query heads together, and of all key heads
    clip_qkv: float | None  # queries, keys and values are clamped to this size
    moe: MoEDims | None
    renormalize_routing: bool  # the chosen experts' weights sum to 1
    tie_word_embeddings: bool
    max_position: int
    rope: RopeConfig
    layer_windows: tuple[int, ...]  # per layer: positions attended to, 0 for all
    dtype: torch.dtype  # the checkpoint's; float32 if it states none
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, values: Mapping[str, Any], where: str = "config.json") -> "Architecture":
        """Read a parsed config.json; CheckpointError names the key and what is accepted."""
        config = ConfigReader(values, where)
        name, family = read_family(config)
        for key in ("quantization_config", "compression_config"):
            if config.value(key):
                config.refuse(key, "null: weights of 32 or 16 bits, or a GGUF file")
        auto_map = config.value("auto_map")
        if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
            config.refuse("auto_map", "no AutoModelForCausalLM: code from checkpoints is never run")

        hidden_size = config.integer("hidden_size")
        num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
        num_q_heads = config.integer("num_attention_heads")
        num_kv_heads = config.optional_integer("num_key_value_heads", family.default_kv_heads)
        num_kv_heads = num_kv_heads or num_q_heads
        if num_q_heads % num_kv_heads:
            config.refuse("num_key_value_heads", f"a divisor of {num_q_heads}, the query heads")
        head_dim = config.optional_integer("head_dim", family.default_head_dim)
        if head_dim is None:
            if hidden_size % num_q_heads:
                config.refuse(
                    "num_attention_heads",
                    f"a divisor of hidden_size ({hidden_size}), as there is no head_dim",
                )
            head_dim = hidden_size // num_q_heads
        if head_dim % 2 or head_dim < MIN_HEAD_DIM:
            accepted = f"an even number from {MIN_HEAD_DIM} (found or derived: {head_dim})"
            config.refuse("head_dim", accepted)
        max_position = config.integer("max_position_embeddings")
        attention_bias = family.has_attention_bias and config.flag("attention_bias")
        qkv_bias = family.qkv_bias or attention_bias
        if family.has_qkv_bias_flag:
            qkv_bias = config.flag("qkv_bias", True)
        if family.qk_norm and config.value("use_qk_norm") not in (None, True):
            config.refuse("use_qk_norm", f"true: {name} always norms queries and keys")
        renormalizes = family.moe is not None and family.moe.always_renormalizes
        if family.moe is not None and not renormalizes:
            renormalizes = config.flag("norm_topk_prob")
        clip_qkv = None
        if family.has_clip_qkv and config.value("clip_qkv") is not None:
            clip_qkv = config.number("clip_qkv")
        result = cls(
            name=name,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, family),
            norm_eps=config.number("rms_norm_eps", family.default_norm_eps),
            norm_weight_offset=family.norm_weight_offset,
            embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
            qkv_bias=qkv_bias,
            o_bias=attention_bias,
            mlp_bias=family.has_mlp_bias and config.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            row_qk_norm=family.row_qk_norm,
            clip_qkv=clip_qkv,
            moe=read_moe(config, family.moe, num_layers) if family.moe else None,
            renormalize_routing=renormalizes,
            tie_word_embeddings=config.flag("tie_word_embeddings", family.default_tied),
            max_position=max_position,
            rope=read_rope(config, max_position, family.default_theta),
            layer_windows=read_layer_windows(config, family, num_layers),
            dtype=_read_dtype(config),
            bos_token_ids=read_token_ids(config, "bos_token_id", family.default_bos),
            eos_token_ids=read_token_ids(config, "eos_token_id", family.default_eos),
        )
        config.finish(NEUTRAL_CONFIG_KEYS)
        return result

    def embedding_scale_in(self, dtype: torch.dtype) -> float:
        """The embedding's factor as transformers applies it: rounded to the running dtype."""
        return float(torch.tensor(self.embedding_scale, dtype=torch.float64).to(dtype))

    @property
    def num_experts(self) -> int:
        """Of each layer that has experts; 0 for a dense model."""
        return self.moe.num_experts if self.moe else 0

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.moe is not None and self.moe.sparse_layers[layer]

    def layer_targets(self, layer: int) -> tuple[Target, ...]:
        """The linear layers of `layer`."""
        if not self.is_sparse(layer):
            return ATTENTION_TARGETS + MLP_TARGETS
        assert self.moe is not None
        shared = SHARED_EXPERT_TARGETS if self.moe.shared_intermediate_size else ()
        return ATTENTION_TARGETS + (Target.ROUTER, *shared) + EXPERT_TARGETS

    def has_target(self, target: Target, layer: int) -> bool:
        """Whether `layer` has the linear layer that `target` names."""
        return target in self.layer_targets(layer)

    def target_shape(self, target: Target) -> tuple[int, int]:
        """(out, in) of the linear layer an adapter touches; KeyError if the model has none."""
        hidden, q_size = self.hidden_size, self.num_q_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        shapes = {
            Target.Q_PROJ: (q_size, hidden),
            Target.K_PROJ: (kv_size, hidden),
            Target.V_PROJ: (kv_size, hidden),
            Target.O_PROJ: (hidden, q_size),
            Target.GATE_PROJ: (self.intermediate_size, hidden),
            Target.UP_PROJ: (self.intermediate_size, hidden),
            Target.DOWN_PROJ: (hidden, self.intermediate_size),
            Target.EMBED_TOKENS: (self.vocab_size, hidden),
            Target.LM_HEAD: (self.vocab_size, hidden),
        }
        if self.moe is not None:
            width, shared = self.moe.intermediate_size, self.moe.shared_intermediate_size
            shapes[Target.ROUTER] = (self.moe.num_experts, hidden)
            shapes[Target.EXPERT_GATE_PROJ] = shapes[Target.EXPERT_UP_PROJ] = (width, hidden)
            shapes[Target.EXPERT_DOWN_PROJ] = (hidden, width)
            if shared:
                shapes[Target.SHARED_GATE_PROJ] = shapes[Target.SHARED_UP_PROJ] = (shared, hidden)
                shapes[Target.SHARED_DOWN_PROJ] = (hidden, shared)
                shapes[Target.SHARED_EXPERT_GATE] = (1, hidden)
        return shapes[target]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's canonical name and shape; a tied head is not a parameter. Each
        expert's weights have names of their own."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            for key, shape in self._layer_shapes(layer).items():
                shapes[f"model.layers.{layer}.{key}"] = shape
        return shapes

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden_size,),
            "post_attention_layernorm.weight": (self.hidden_size,),
        }
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        elif self.row_qk_norm:
            shapes["self_attn.q_norm.weight"] = self.target_shape(Target.Q_PROJ)[:1]
            shapes["self_attn.k_norm.weight"] = self.target_shape(Target.K_PROJ)[:1]
        has_bias = dict.fromkeys(ATTENTION_TARGETS, self.qkv_bias)
        has_bias |= dict.fromkeys(MLP_TARGETS, self.mlp_bias)
        has_bias[Target.O_PROJ] = self.o_bias
        for target in self.layer_targets(layer):
            for path in weight_paths(target, self.num_experts):
                shapes[f"{path}.weight"] = self.target_shape(target)
                if has_bias.get(target):
                    shapes[f"{path}.bias"] = self.target_shape(target)[:1]
        return shapes


def weight_paths(target: Target, num_experts: int) -> list[str]:
    """The canonical modules of a target within a layer: one, or one per expert."""
    if target in ATTENTION_TARGETS:
        return [f"self_attn.{target.module_name}"]
    if target in EXPERT_TARGETS:
        name = target.module_name.removeprefix("experts.")
        return [f"mlp.experts.{expert}.{name}" for expert in range(num_experts)]
    return [f"mlp.{target.module_name}"]


def read_token_ids(config: ConfigReader, key: str, default: int | None) -> tuple[int, ...]:
    """One id, a list of ids or null, as a tuple. Negative ids mean none, as on the hub."""
    value = config.value(key, default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        config.refuse(key, "an integer, a list of integers, or null")
    return tuple(item for item in ids if item >= 0)


def _read_dtype(config: ConfigReader) -> torch.dtype:
    old = config.value("torch_dtype")
    new = config.value("dtype")
    key = "dtype" if new is not None else "torch_dtype"
    name = new if new is not None else old
    if name is None:
        return torch.float32
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        config.refuse(key, ", ".join(DTYPES))
    return DTYPES[name.removeprefix("torch.")]
