"""config.json → Architecture, against transformers' own config classes and models."""

import json

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.activations import ACT2FN

from engine.architecture import Architecture
from engine.errors import CheckpointError
from engine.model_family import ACTIVATIONS, FAMILIES
from memory.lora_targets import DENSE_TARGETS, Target

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def reference(name: str, **changes) -> tuple[transformers.PreTrainedConfig, dict]:
    """transformers' config of a family, and the config.json it writes."""
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    config = config_class(**SIZES | changes, architectures=[name])
    return config, json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": None}),
        ("MistralForCausalLM", {"sliding_window": 7}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
        (
            "Qwen3ForCausalLM",
            {
                "head_dim": 32,
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("GemmaForCausalLM", {}),
        ("GemmaForCausalLM", {"hidden_act": "gelu", "attention_bias": True, "head_dim": 18}),
    ],
)
def test_agrees_with_transformers(name, changes):
    config, written = reference(name, **changes)
    architecture = Architecture.from_config(written)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    assert architecture.parameter_shapes() == {
        key: tuple(parameter.shape) for key, parameter in model.named_parameters()
    }
    attention = model.model.layers[0].self_attn
    assert architecture.head_dim == attention.head_dim
    assert architecture.rope.theta == config.rope_parameters["rope_theta"]
    assert architecture.norm_eps == config.rms_norm_eps
    assert architecture.tie_word_embeddings == config.tie_word_embeddings
    assert architecture.eos_token_ids == (
        () if config.eos_token_id is None else (config.eos_token_id,)
    )
    windows = tuple(
        getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None)) or 0
        for layer in model.model.layers
    )
    assert architecture.layer_windows == windows
    if "layer_types" not in changes:  # as in files older than layer_types
        written.pop("layer_types", None)
        if changes.get("use_sliding_window"):
            written["sliding_window"] = config.sliding_window
        assert Architecture.from_config(written).layer_windows == windows
    said = config.hidden_act
    if name == "GemmaForCausalLM" and said == "gelu":  # older transformers take it at its word
        said = "gelu_pytorch_tanh"
    assert architecture.activation == ACTIVATIONS[said]
    norm = model.model.norm.to_empty(device="cpu")
    with torch.no_grad():
        norm.weight.fill_(0.5)
        scale = float(norm(torch.ones(64)).mean())
    assert scale == pytest.approx(0.5 + architecture.norm_weight_offset, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys_take_transformers_defaults(name):
    config, _ = reference(name)
    architecture = Architecture.from_config(SIZES | {"architectures": [name]})
    written = Architecture.from_config(json.loads(config.to_json_string(use_diff=False)))
    assert architecture == written
    assert Architecture.from_config(SIZES | {"model_type": config.model_type}).name == name


@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_activations_are_the_functions_transformers_applies(hidden_act):
    x = torch.linspace(-6, 6, 201, dtype=torch.float64)
    ours = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
    }[Architecture.from_config(LLAMA | {"hidden_act": hidden_act}).activation]
    # gelu_fast and gelu_accurate spell sqrt(2/pi) to ten digits
    torch.testing.assert_close(ACT2FN[hidden_act](x), ours(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rope_frequencies_are_those_of_transformers(scaling, legacy):
    config, written = reference(
        "LlamaForCausalLM", rope_parameters=(scaling or {}) | {"rope_theta": 5e4}
    )
    if legacy:
        parameters = written.pop("rope_parameters")
        written["rope_theta"] = parameters.pop("rope_theta")
        written["rope_scaling"] = scaling and {"type": parameters.pop("rope_type"), **parameters}
    rope = Architecture.from_config(written).rope
    wanted = transformers.LlamaModel(config).rotary_emb.inv_freq
    assert torch.equal(rope.inverse_frequencies(16), wanted)


def test_config_files_as_found_on_the_hub():
    llama = Architecture.from_config(
        LLAMA
        | {
            "torch_dtype": "bfloat16",
            "eos_token_id": [5, 9],
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_interleaved": False,
            "is_llama_config": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "some_future_key": None,
            "use_cache": True,
        }
    )
    assert llama.dtype == torch.bfloat16
    assert llama.eos_token_ids == (5, 9)
    gemma = SIZES | {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}
    for named in (None, "gelu_pytorch_tanh"):
        architecture = Architecture.from_config(gemma | {"hidden_activation": named})
        assert architecture.activation == "gelu_tanh"
    assert architecture.embedding_scale_in(torch.float32) == pytest.approx(64**0.5, rel=1e-7)
    assert architecture.embedding_scale_in(torch.bfloat16) == 8.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["PhiForCausalLM"]}, r"PhiForCausalLM.*LlamaForCausalLM, Mistral"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "model_type is 'llama'; .*'qwen3_moe'"),
        ({"architectures": [["x"]]}, r"architectures is \[\['x'\]\]; accepted: LlamaForCausalLM"),
        ({"architectures": [{}]}, r"architectures is \[\{\}\]; accepted: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "phi"}, "model_type is 'phi'.*LlamaForCausalLM"),
        ({"model_type": "mistral"}, "model_type is 'mistral'; accepted: 'llama'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map.*never run"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; accepted: silu, swish, gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "type is 'yarn'.*default or llama3"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor is None.*number above 0"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters: factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1"),
        ({"sliding_window": 4096}, "sliding_window is 4096, which this engine does not under"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ({"layer_types": ["full_attention"]}, "layer_types.*3 entries"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types.*full_attention and slid"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; accepted: a divisor of 4"),
        ({"hidden_size": 66}, "num_attention_heads is 4; accepted: a divisor of hidden_size"),
        ({"vocab_size": "96"}, "vocab_size is '96'; accepted: an integer"),
        ({"vocab_size": 10**400}, "vocab_size is <integer.*accepted: an integer from 1 to 2147483"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; accepted: .* to 4096"),
        ({"head_dim": 17}, r"head_dim is 17; accepted: an even number from 16"),
        ({"head_dim": 14}, r"head_dim is 14; accepted: an even number from 16"),
        ({"num_attention_heads": 8}, r"head_dim is None; .* even number from 16 \(.*derived: 8"),
        (
            {"rope_theta": 10**400},
            "rope_theta is <integer of about 401 digits>; accepted: a num",
        ),
        ({"a_new_key": 10**5000}, "a_new_key is <integer of about 5001 digits>, which this engine"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; accepted: float32"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; accepted: true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refusals_name_the_key_and_what_is_accepted(changes, message):
    with pytest.raises(CheckpointError, match=f"^some/config.json.*{message}"):
        Architecture.from_config(LLAMA | changes, "some/config.json")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("GemmaForCausalLM", {"hidden_act": "silu", "hidden_activation": "gelu"}, "hidden_activ"),
        ("GemmaForCausalLM", {"hidden_activation": []}, r"hidden_activation is \[\]"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "no sliding window"),
        ("Qwen2ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 3}, "all layers alike"),
    ],
)
def test_refusals_of_one_family(name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Architecture.from_config(SIZES | {"architectures": [name]} | changes)


def test_missing_sizes_are_named():
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        values = {k: v for k, v in LLAMA.items() if k != key}
        with pytest.raises(CheckpointError, match=f"config.json: {key} is missing"):
            Architecture.from_config(values)


def test_target_shapes():
    architecture = Architecture.from_config(LLAMA)
    assert [architecture.target_shape(target) for target in DENSE_TARGETS] == [
        (64, 64),
        (32, 64),
        (32, 64),
        (64, 64),
        (48, 64),
        (48, 64),
        (64, 48),
    ]
    assert architecture.target_shape(Target.LM_HEAD) == (96, 64)
    with pytest.raises(KeyError):
        architecture.target_shape(Target.ROUTER)
