"""What tells one supported family from another, as data; a new family is a new row.

Defaults are those of transformers' config classes, which apply to keys that a config.json leaves
out. Nothing here knows about files or weights.
"""

from dataclasses import dataclass

from engine.config_reader import ConfigReader
from engine.errors import CheckpointError
from engine.rope_config import DEFAULT_THETA
from engine.shown import shown


@dataclass(frozen=True)
class ModelFamily:
    """One `architectures` name. `has_` fields say which config keys the family's code reads."""

    model_type: str
    default_activation: str = "silu"
    default_head_dim: int | None = None  # None: hidden_size / heads
    default_kv_heads: int | None = None  # None: as many as query heads
    default_tied: bool = False
    default_bos: int | None = None
    default_eos: int | None = None
    default_norm_eps: float = 1e-6
    default_theta: float = DEFAULT_THETA
    norm_weight_offset: float = 0.0
    scales_embedding: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False  # always there, without a config key
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    has_sliding_window: bool = False  # sliding_window alone: every layer
    default_window: int | None = 4096
    has_window_layers: bool = False  # use_sliding_window, max_window_layers, layer_types
    has_window_flag: bool = False  # use_sliding_window and sliding_window: every layer
    windows_even_layers: bool = False  # of those below max_window_layers, not those from it on
    has_qkv_bias_flag: bool = False  # qkv_bias, true by default
    row_qk_norm: bool = False  # norms over all heads of a row together
    has_clip_qkv: bool = False
    moe: "MoEFamily | None" = None


@dataclass(frozen=True)
class MoEFamily:
    """How a family with experts names their sizes in config.json, with the defaults."""

    experts_keys: tuple[str, ...]  # synonyms
    default_experts: int
    default_top_k: int
    intermediate_key: str = "intermediate_size"
    default_intermediate: int | None = None
    always_renormalizes: bool = False  # else norm_topk_prob says so
    has_dense_layers: bool = False  # decoder_sparse_step, mlp_only_layers
    default_shared: int = 0  # shared_expert_intermediate_size; 0: no shared expert


FAMILIES = {
    "LlamaForCausalLM": ModelFamily(
        model_type="llama",
        default_bos=1,
        default_eos=2,
        has_attention_bias=True,
        has_mlp_bias=True,
    ),
    "MistralForCausalLM": ModelFamily(
        model_type="mistral",
        default_kv_heads=8,
        default_bos=1,
        default_eos=2,
        has_sliding_window=True,
    ),
    "Qwen2ForCausalLM": ModelFamily(
        model_type="qwen2", default_kv_heads=32, qkv_bias=True, has_window_layers=True
    ),
    "Qwen3ForCausalLM": ModelFamily(
        model_type="qwen3",
        default_kv_heads=32,
        default_head_dim=128,
        qk_norm=True,
        has_attention_bias=True,
        has_window_layers=True,
    ),
    "GemmaForCausalLM": ModelFamily(
        model_type="gemma",
        default_activation="gelu_pytorch_tanh",
        default_head_dim=256,
        default_kv_heads=16,
        default_tied=True,
        default_bos=2,
        default_eos=1,
        norm_weight_offset=1.0,
        scales_embedding=True,
        has_attention_bias=True,
    ),
    "MixtralForCausalLM": ModelFamily(
        model_type="mixtral",
        default_norm_eps=1e-5,
        default_theta=1e6,
        default_kv_heads=8,
        default_bos=1,
        default_eos=2,
        has_sliding_window=True,
        default_window=None,
        moe=MoEFamily(("num_local_experts", "num_experts"), 8, 2, always_renormalizes=True),
    ),
    "Qwen2MoeForCausalLM": ModelFamily(
        model_type="qwen2_moe",
        default_kv_heads=16,
        has_qkv_bias_flag=True,
        has_window_layers=True,
        windows_even_layers=True,
        moe=MoEFamily(
            ("num_experts", "num_local_experts"),
            60,
            4,
            intermediate_key="moe_intermediate_size",
            default_intermediate=1408,
            has_dense_layers=True,
            default_shared=5632,
        ),
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        model_type="qwen3_moe",
        default_kv_heads=4,
        qk_norm=True,
        has_attention_bias=True,
        has_window_flag=True,
        moe=MoEFamily(
            ("num_experts", "num_local_experts"),
            128,
            8,
            intermediate_key="moe_intermediate_size",
            default_intermediate=768,
            has_dense_layers=True,
        ),
    ),
    "OlmoeForCausalLM": ModelFamily(
        model_type="olmoe",
        default_norm_eps=1e-5,
        default_eos=50279,
        row_qk_norm=True,
        has_attention_bias=True,
        has_clip_qkv=True,
        moe=MoEFamily(("num_experts", "num_local_experts"), 64, 8),
    ),
}

# transformers' names of one function, by the name the kernels give it
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

DEFAULT_MAX_WINDOW_LAYERS = 28
_FULL = ("full_attention", "attention")


def read_family(config: ConfigReader) -> tuple[str, ModelFamily]:
    """The architecture's name and family; CheckpointError with the accepted list otherwise."""
    names = config.value("architectures")
    model_type = config.value("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    name = names[0] if isinstance(names, list) and names else None
    accepted = ", ".join(FAMILIES)
    if name is not None and not isinstance(name, str):
        config.refuse("architectures", accepted)
    if name not in FAMILIES:
        if names:
            config.refuse("architectures", accepted)
        raise CheckpointError(
            f"{config.where}: architectures is missing and model_type is {shown(model_type)}; "
            f"accepted architectures: {accepted}"
        )
    family = FAMILIES[name]
    if model_type not in (None, family.model_type):
        config.refuse("model_type", f"{family.model_type!r}, which goes with {name}")
    return name, family


def read_activation(config: ConfigReader, family: ModelFamily) -> str:
    """The gated activation, as transformers resolves `hidden_act`."""
    key = "hidden_act"
    name = config.text(key, family.default_activation)
    if family.model_type == "gemma":
        # The official files say "gelu" and mean the tanh form. `hidden_activation` overrode it in
        # older transformers and is ignored by newer ones, so the two have to agree.
        name = "gelu_pytorch_tanh" if name == "gelu" else name
        override = config.value("hidden_activation")
        other = ACTIVATIONS.get(override) if isinstance(override, str) else None
        if override is not None and other != ACTIVATIONS.get(name, name):
            config.refuse("hidden_activation", f"null or {name!r}, as hidden_act has it")
    if name not in ACTIVATIONS:
        config.refuse(key, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def read_layer_windows(
    config: ConfigReader, family: ModelFamily, num_layers: int
) -> tuple[int, ...]:
    """Per layer: how many positions, the current one included, it attends to; 0 for all."""
    width: int | None = 0
    windows = [0] * num_layers
    if family.has_window_layers or family.has_window_flag:
        used = config.flag("use_sliding_window")
        default = family.default_window
        width = config.optional_integer("sliding_window", default) if used else 0
        config.value("sliding_window")
    elif family.has_sliding_window:
        width = config.optional_integer("sliding_window", family.default_window)
    if family.has_window_layers:
        first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        for layer in range(num_layers):
            even = layer % 2 == 0 and layer < first
            chosen = even if family.windows_even_layers else layer >= first
            windows[layer] = (width or 0) if chosen else 0
    else:
        if family.has_window_flag:
            config.value("max_window_layers")  # written beside the flag, and without effect
        windows = [width or 0] * num_layers

    kinds = config.value("layer_types")
    if kinds is None:
        return tuple(windows)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.refuse("layer_types", f"a list of {num_layers} entries, one per layer")
    if any(kind not in (*_FULL, "sliding_attention") for kind in kinds):
        config.refuse("layer_types", "full_attention and sliding_attention")
    stated = [0 if kind in _FULL else (width or 0) for kind in kinds]
    if not width and any(kind not in _FULL for kind in kinds):
        config.refuse("layer_types", "full_attention, as no sliding window is configured")
    if not family.has_window_layers and stated != windows:
        config.refuse("layer_types", "what sliding_window says: all layers alike")
    return tuple(stated)
