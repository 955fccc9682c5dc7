"""config.json of mixtures of experts, against transformers' own config classes and models."""

import json

import pytest
import torch
import transformers

from engine.architecture import Architecture
from engine.errors import CheckpointError
from engine.model_family import ACTIVATIONS
from memory.lora_targets import MLP_TARGETS, SHARED_EXPERT_TARGETS, Target
from tests.engine.split_experts import split_experts

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FEW = {"num_experts": 6, "num_experts_per_tok": 3}
MIXTRAL, QWEN2 = "MixtralForCausalLM", "Qwen2MoeForCausalLM"
QWEN3, OLMOE = "Qwen3MoeForCausalLM", "OlmoeForCausalLM"


def values(name: str, **changes) -> dict:
    return SIZES | {"architectures": [name]} | changes


def reference(name: str, **changes) -> tuple[transformers.PreTrainedConfig, dict]:
    """transformers' config of a family, and the config.json it writes."""
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    config = config_class(**SIZES | changes, architectures=[name])
    return config, json.loads(config.to_json_string(use_diff=False))


def assert_agrees(architecture: Architecture, config: transformers.PreTrainedConfig) -> None:
    """The model that transformers builds of `config` has the shapes and the mathematics read."""
    with torch.device("meta"):
        model = getattr(transformers, architecture.name)(config)
    layers = model.model.layers
    parameters = split_experts(dict(model.named_parameters()))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    assert architecture.parameter_shapes() == shapes
    for index, layer in enumerate(layers):
        sparse = hasattr(layer.mlp, "experts")
        assert architecture.is_sparse(index) == sparse
        assert architecture.has_target(Target.ROUTER, index) == sparse
        assert architecture.has_target(Target.GATE_PROJ, index) == (not sparse)
        shared = hasattr(layer.mlp, "shared_expert")
        assert architecture.has_target(Target.SHARED_EXPERT_GATE, index) == shared
        if sparse:
            gate = layer.mlp.gate
            assert (architecture.num_experts, architecture.moe.top_k) == (
                gate.num_experts,
                gate.top_k,
            )
            # Mixtral's router has no choice
            assert architecture.renormalize_routing == getattr(gate, "norm_topk_prob", True)
    width, kinds = (
        getattr(config, "sliding_window", None) or 0,
        getattr(config, "layer_types", None),
    )
    kinds = kinds or ["sliding_attention"] * len(layers)
    windows = tuple(width if kind == "sliding_attention" else 0 for kind in kinds)
    assert architecture.layer_windows == windows
    attention = layers[0].self_attn
    assert architecture.head_dim == attention.head_dim
    assert architecture.clip_qkv == getattr(config, "clip_qkv", None)
    assert architecture.norm_eps == config.rms_norm_eps
    assert architecture.rope.theta == config.rope_parameters["rope_theta"]
    assert architecture.activation == ACTIVATIONS[config.hidden_act]
    assert architecture.tie_word_embeddings == config.tie_word_embeddings
    eos = config.eos_token_id
    assert architecture.eos_token_ids == (() if eos is None else (eos,))


SLIDING = {"use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (MIXTRAL, {}),
        (MIXTRAL, {"num_local_experts": 5, "sliding_window": 9, "hidden_act": "gelu"}),
        (MIXTRAL, {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 24}),
        (QWEN2, FEW),
        (QWEN2, FEW | {"qkv_bias": False, "norm_topk_prob": True, "hidden_act": "gelu"}),
        (QWEN2, FEW | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
        (QWEN2, FEW | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "hidden_act": "silu"}),
        (QWEN2, FEW | {"mlp_only_layers": [0, 1, 2, 3]}),
        (QWEN2, FEW | SLIDING),
        (QWEN2, FEW | SLIDING | {"max_window_layers": 1}),
        (QWEN2, FEW | {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 2}),
        (QWEN2, FEW | SLIDING | {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (QWEN3, FEW),
        (QWEN3, FEW | {"attention_bias": True, "norm_topk_prob": True, "head_dim": 32}),
        (QWEN3, FEW | {"decoder_sparse_step": 3, "tie_word_embeddings": True}),
        (QWEN3, FEW | {"decoder_sparse_step": 5, "hidden_act": "gelu_new"}),
        (QWEN3, FEW | {"mlp_only_layers": [0, 2, 9, -1]}),
        (QWEN3, FEW | SLIDING),
        (QWEN3, FEW | {"use_sliding_window": True, "sliding_window": None}),
        (QWEN3, FEW | {"use_sliding_window": False, "sliding_window": 9}),
        (OLMOE, FEW),
        (OLMOE, FEW | {"clip_qkv": 2.5, "norm_topk_prob": True, "attention_bias": True}),
        (OLMOE, FEW | {"clip_qkv": 8.0, "num_key_value_heads": None, "hidden_act": "gelu"}),
    ],
)
def test_agrees_with_transformers(name, changes):
    config, written = reference(name, **changes)
    assert_agrees(Architecture.from_config(written), config)
    # as a file older than the config classes has it: the keys themselves, no layer_types
    assert_agrees(Architecture.from_config(values(name, **changes)), config)


@pytest.mark.parametrize("name", [MIXTRAL, QWEN2, QWEN3, OLMOE])
def test_absent_keys_take_transformers_defaults(name):
    config, _ = reference(name)
    architecture = Architecture.from_config(values(name))
    assert_agrees(architecture, config)
    assert architecture.moe.intermediate_size == getattr(
        config, "moe_intermediate_size", config.intermediate_size
    )
    assert architecture.bos_token_ids == (() if config.bos_token_id is None else (1,))


def test_sizes_and_layers():
    changes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    layers = {"mlp_only_layers": [1], "decoder_sparse_step": 1}
    architecture = Architecture.from_config(values(QWEN2, **FEW, **changes, **layers))
    moe = architecture.moe
    assert (moe.num_experts, moe.top_k) == (6, 3)
    assert (moe.intermediate_size, moe.shared_intermediate_size) == (24, 40)
    assert moe.sparse_layers == (True, False, True, True)
    assert set(MLP_TARGETS) <= set(architecture.layer_targets(1))
    assert set(SHARED_EXPERT_TARGETS) <= set(architecture.layer_targets(0))
    shapes = {
        Target.ROUTER: (6, 64),
        Target.EXPERT_UP_PROJ: (24, 64),
        Target.EXPERT_DOWN_PROJ: (64, 24),
        Target.SHARED_GATE_PROJ: (40, 64),
        Target.SHARED_DOWN_PROJ: (64, 40),
        Target.SHARED_EXPERT_GATE: (1, 64),
        Target.GATE_PROJ: (48, 64),
    }
    assert {target: architecture.target_shape(target) for target in shapes} == shapes
    dense = Architecture.from_config(values(QWEN3, **FEW, mlp_only_layers=[0, 1, 2, 3]))
    assert dense.moe is None
    assert dense.num_experts == 0


@pytest.mark.parametrize("name", [MIXTRAL, QWEN2, QWEN3, OLMOE])
def test_both_names_of_the_number_of_experts(name):
    by_name = [
        Architecture.from_config(values(name, num_experts_per_tok=2, **{key: 6}))
        for key in ("num_experts", "num_local_experts")
    ]
    assert by_name[0] == by_name[1]
    assert by_name[0].num_experts == 6
    both = values(name, num_experts_per_tok=2, num_experts=6, num_local_experts=6)
    assert Architecture.from_config(both) == by_name[0]
    with pytest.raises(
        CheckpointError, match=r"num_(local_)?experts is [67]; accepted: [67], as num_"
    ):
        Architecture.from_config(both | {"num_local_experts": 7})


# What the four models' repositories hold, but for `_name_or_path`.
HUB = {
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
}


@pytest.mark.parametrize("model", HUB)
def test_config_files_as_found_on_the_hub(model):
    whole = Architecture.from_config(HUB[model])
    assert whole.moe.sparse_layers == (True,) * HUB[model]["num_hidden_layers"]
    assert whole.dtype == torch.bfloat16
    short = HUB[model] | {"num_hidden_layers": 2}
    config_class = getattr(transformers, whole.name.replace("ForCausalLM", "Config"))
    assert_agrees(Architecture.from_config(short), config_class.from_dict(dict(short)))


def test_parameters_of_the_hub_models():
    """In billions, as the models' names and papers give them."""
    counts = {
        model: sum(
            torch.Size(shape).numel()
            for shape in Architecture.from_config(config).parameter_shapes().values()
        )
        for model, config in HUB.items()
    }
    billions = {model: round(count / 1e9, 1) for model, count in counts.items()}
    assert billions == {
        "Mixtral-8x7B-v0.1": 46.7,
        "Qwen1.5-MoE-A2.7B": 14.3,
        "Qwen3-30B-A3B": 30.5,
        "OLMoE-1B-7B-0924": 6.9,
    }


def test_keys_of_later_qwen3_files():
    """They say what other programs ask about, and what is always so in this family."""
    later = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    base = HUB["Qwen3-30B-A3B"]
    assert Architecture.from_config(base | later) == Architecture.from_config(base)
    for key, found in {"use_qk_norm": False, "shared_expert_intermediate_size": 64}.items():
        with pytest.raises(CheckpointError, match=f"{key} is {found}"):
            Architecture.from_config(base | {key: found})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0; accepted: .* from 1 to 256"),
        (QWEN3, {"num_experts": 257}, "num_experts is 257; accepted: an integer from 1 to 256"),
        (OLMOE, {"num_experts": None}, "num_experts is None; accepted: an integer"),
        (OLMOE, {"num_experts": True}, "num_experts is True; accepted: an integer"),
        (QWEN2, {"num_experts": 8.0}, "num_experts is 8.0; accepted: an integer"),
        (
            QWEN2,
            {"num_experts": 60, "num_local_experts": None},
            "num_local_experts is None; .*: 60",
        ),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; accepted: .* from 1 to 8"),
        (QWEN3, {"num_experts_per_tok": 11}, "num_experts_per_tok is 11; accepted: .* 1 to 10"),
        (QWEN3, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; accepted: .* from 1"),
        (QWEN2, {"num_experts": 3}, "num_experts_per_tok is None; accepted: .* from 1 to 3"),
        (QWEN3, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0; accepted: an integer"),
        (QWEN3, {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (MIXTRAL, {"intermediate_size": "48"}, "intermediate_size is '48'; accepted: an integer"),
        (MIXTRAL, {"moe_intermediate_size": 24}, "moe_intermediate_size is 24, .* not understand"),
        (QWEN2, {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size is -1"),
        (QWEN2, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; accepted: .* from 1"),
        (QWEN3, {"decoder_sparse_step": None}, "decoder_sparse_step is None"),
        (MIXTRAL, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, .* not understand"),
        (OLMOE, {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], .* not understand"),
        (QWEN3, {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]; accepted: a list of"),
        (QWEN3, {"mlp_only_layers": 1}, "mlp_only_layers is 1; accepted: a list of layers"),
        (QWEN3, {"mlp_only_layers": ["1"]}, r"mlp_only_layers is \['1'\]; accepted: a list of"),
        (QWEN3, {"norm_topk_prob": 1}, "norm_topk_prob is 1; accepted: true or false"),
        (MIXTRAL, {"norm_topk_prob": True}, "norm_topk_prob is True, .* not understand"),
        (QWEN2, {"qkv_bias": "yes"}, "qkv_bias is 'yes'; accepted: true or false"),
        (QWEN3, {"qkv_bias": True}, "qkv_bias is True, .* not understand"),
        (QWEN2, {"attention_bias": True}, "attention_bias is True, .* not understand"),
        (OLMOE, {"clip_qkv": 0}, "clip_qkv is 0; accepted: a number above 0"),
        (OLMOE, {"clip_qkv": -1.0}, "clip_qkv is -1.0; accepted: a number above 0"),
        (QWEN3, {"clip_qkv": 1.0}, "clip_qkv is 1.0, .* not understand"),
        (QWEN3, {"hidden_act": "relu"}, "hidden_act is 'relu'; accepted: silu"),
        (QWEN3, SLIDING | {"sliding_window": 0}, "sliding_window is 0; accepted: an integer"),
        (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window is 'no'; accepted: true or"),
        (QWEN2, SLIDING | {"max_window_layers": -1}, "max_window_layers is -1"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 4}, "layer_types.*no sliding window"),
        (QWEN2, SLIDING | {"layer_types": ["full_attention"]}, "layer_types.*4 entries"),
        (QWEN3, SLIDING | {"layer_types": ["full_attention"] * 4}, "layer_types.*all layers alike"),
        (MIXTRAL, SLIDING, "use_sliding_window is True, .* not understand"),
        (OLMOE, {"sliding_window": 9}, "sliding_window is 9, .* not understand"),
        (QWEN3, {"n_shared_experts": 1}, "n_shared_experts is 1, .* not understand"),
        (QWEN3, {"model_type": "mixtral"}, "model_type is 'mixtral'; accepted: 'qwen3_moe'"),
    ],
)
def test_refusals_name_the_key_and_what_is_accepted(name, changes, message):
    with pytest.raises(CheckpointError, match=f"^some/config.json: {message}"):
        Architecture.from_config(values(name, **changes), "some/config.json")
