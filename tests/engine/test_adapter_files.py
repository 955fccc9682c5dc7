"""Adapter directories: which tensors bind to which module, and all that is refused.

Refusals that PEFT itself lets pass with a warning are the point of many cases here: an adapter
that cannot be served exactly must not be served as the base model.
"""

import json
import math
import pickle

import pytest
import torch

from engine.errors import AdapterError
from memory.lora_targets import DENSE_TARGETS, Target
from tests.engine.adapter_writer import (
    HIDDEN,
    KV,
    LAYERS,
    PREFIX,
    Q0,
    assert_same_modules,
    lora_tensors,
    module_name,
    read,
    renamed,
    write,
    write_shards,
)

# ---- what is read


def test_all_seven_targets_come_in_order(tmp_path):
    tensors = lora_tensors(DENSE_TARGETS)
    adapter = read(write(tmp_path, tensors))
    assert_same_modules(adapter, tensors)
    order = [(module.layer, module.target) for module in adapter.modules]
    assert order == [(layer, target) for layer in range(LAYERS) for target in DENSE_TARGETS]
    assert adapter.path == str(tmp_path)
    assert adapter.rank == 4


def test_absent_alpha_and_rank_mean_eight(tmp_path):
    folder = write(tmp_path, lora_tensors(rank=4))
    config = {"peft_type": "LORA", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert {module.scaling for module in read(folder).modules} == {8 / 4}
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(AdapterError, match=r"expected|accepted: \[8, 192\]"):
        read(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_kept(tmp_path, dtype):
    tensors = {key: tensor.to(dtype) for key, tensor in lora_tensors().items()}
    assert_same_modules(read(write(tmp_path, tensors)), tensors)


def test_tensors_do_not_depend_on_the_file(tmp_path):
    tensors = lora_tensors()
    folder = write(tmp_path, tensors)
    adapter = read(folder)
    weights = folder / "adapter_model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.write(b"\0" * size)
        file.truncate(8)
    assert_same_modules(adapter, tensors)


def test_keys_may_carry_an_adapter_name(tmp_path):
    named = renamed(lambda key: key.replace(".weight", ".default.weight"))
    assert_same_modules(read(write(tmp_path, named)), lora_tensors())


@pytest.mark.parametrize(
    "change",
    [
        lambda key: "_orig_mod." + key,
        lambda key: key.replace(".self_attn", "._orig_mod.self_attn"),
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.removeprefix(PREFIX),
        lambda key: key.replace(PREFIX, PREFIX + "model."),
        lambda key: key.replace(PREFIX, "base_model.model.model.language_model."),
    ],
    ids=["compiled", "layer compiled", "no peft prefix", "no prefix", "deeper", "language model"],
)
def test_unusual_prefixes_bind_every_tensor(tmp_path, change):
    adapter = read(write(tmp_path, renamed(change)))
    assert_same_modules(adapter, lora_tensors())


def test_shards_are_all_read(tmp_path):
    tensors = lora_tensors()
    folder = write(tmp_path, tensors)
    (folder / "adapter_model.safetensors").unlink()
    write_shards(folder, tensors)
    assert_same_modules(read(folder), tensors)


# ---- tensors


def with_tensor(key, tensor):
    return {**lora_tensors(), key: tensor}


def without(key):
    tensors = lora_tensors()
    del tensors[key]
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no tensors"),
        (without(f"{Q0}.lora_B.weight"), r"q_proj\.lora_A\.weight.*no lora_B"),
        (without(f"{Q0}.lora_A.weight"), r"q_proj\.lora_B\.weight.*no lora_A"),
        (lora_tensors(rank=8), r"shape \[8, 192\].*\[4, 192\]"),
        ({key: torch.empty(0) for key in lora_tensors()}, r"shape \[0\].*\[4, 192\]"),
        (with_tensor(f"{Q0}.lora_A.weight", torch.zeros(4, 190)), r"\[4, 190\].*\[4, 192\]"),
        (with_tensor(f"{Q0}.lora_B.weight", torch.zeros(64, 4)), r"\[64, 4\].*\[256, 4\]"),
        (with_tensor(f"{Q0}.lora_B.weight", torch.zeros(256, 3)), r"\[256, 3\].*\[256, 4\]"),
        (with_tensor(f"{Q0}.lora_A.weight", torch.zeros(4, 192).int()), "int32.*float32"),
        (with_tensor(f"{Q0}.lora_A.weight", torch.full((4, 192), math.nan)), "NaN"),
        (with_tensor(f"{Q0}.lora_B.weight", torch.full((256, 4), math.inf)), "infinity"),
        (lora_tensors(layers=[0]) | lora_tensors(layers=[3]), r"layer 3.*0 to 2"),
    ],
    ids=[
        "no tensors",
        "no B",
        "no A",
        "other rank",
        "empty",
        "hidden size",
        "output size",
        "rank of B",
        "integers",
        "NaN",
        "infinity",
        "layer",
    ],
)
def test_bad_tensors_are_refused(tmp_path, tensors, message):
    with pytest.raises(AdapterError, match=message):
        read(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("stored", "value", "served"),
    [
        (torch.float64, 1e300, torch.float32),
        (torch.float64, -1e300, torch.bfloat16),
        (torch.float32, 7e4, torch.float16),
        (torch.float32, 3.4e38, torch.bfloat16),
        (torch.bfloat16, 1e6, torch.float16),
    ],
)
@pytest.mark.parametrize("factor", ["A", "B"])
def test_factors_that_overflow_in_the_engine_s_dtype_are_refused(
    tmp_path, stored, value, served, factor
):
    tensors = {key: tensor.to(stored) for key, tensor in lora_tensors().items()}
    tensors[f"{Q0}.lora_{factor}.weight"][2, 1] = value
    folder = write(tmp_path, tensors)
    assert len(read(folder, dtype=stored).modules) == 2 * LAYERS
    name = str(served).removeprefix("torch.")
    message = rf"adapter_model\.safetensors: .*q_proj\.lora_{factor}.*overflows in {name}"
    with pytest.raises(AdapterError, match=message):
        read(folder, dtype=served)


def test_factors_that_round_to_finite_values_are_served(tmp_path):
    tensors = lora_tensors()
    tensors[f"{Q0}.lora_A.weight"][0, 0] = 65510.0  # rounds to 65504, the largest float16
    read(write(tmp_path, tensors), dtype=torch.float16)


def test_float8_is_refused(tmp_path):
    key = f"{Q0}.lora_A.weight"
    tensors = with_tensor(key, lora_tensors()[key].to(torch.float8_e4m3fn))
    with pytest.raises(AdapterError, match="float8_e4m3fn"):
        read(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f"{Q0}.lora_magnitude_vector", "DoRA"),
        (f"{Q0}.base_layer.bias", "bias"),
        (f"{Q0}.lora_B.bias", "bias"),
        (f"{PREFIX}layers.{'9' * 5000}.self_attn.q_proj.lora_A.weight", "no model has so many"),
        (f"{PREFIX}embed_tokens.lora_embedding_A", "embeddings"),
        (f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta", "embeddings"),
        ("base_model.model.lm_head.lora_A.weight", "LM head"),
        ("base_model.model.lm_head.weight", "LM head"),
        (f"{PREFIX}norm.weight", "whole weights"),
        (f"{PREFIX}layers.0.mlp.experts.1.gate_proj.lora_A.weight", "experts.gate_proj, which"),
        (
            f"{PREFIX}layers.0.mlp.shared_expert.up_proj.lora_A.weight",
            "shared_expert.up_proj, which",
        ),
        (f"{PREFIX}layers.0.mlp.experts.lora_A.weight", "experts.gate_proj, which"),
        (f"{PREFIX}layers.0.mlp.experts.w2.lora_A.weight", "experts.down_proj, which"),
        (f"{PREFIX}layers.0.mlp.experts.1.lora_A.weight", "names no module"),
        (f"{PREFIX}layers.0.mlp.experts.1.gate_up_proj.lora_A.weight", "fused"),
        (f"{PREFIX}layers.0.mlp.gate.lora_A.weight", "names gate, which layer 0 lacks"),
        (f"{PREFIX}layers.0.mlp.q_proj.lora_A.weight", "names no module"),
        (f"{PREFIX}layers.0.self_attn.qkv_proj.lora_A.weight", "fused"),
        (f"{PREFIX}layers.0.mlp.gate_up_proj.lora_B.weight", "fused"),
        (f"{PREFIX}vision_tower.layers.0.self_attn.q_proj.lora_A.weight", "names no module"),
        (f"{Q0}.lora_C.weight", "names no module"),
        (f"{Q0}.lora_velora_embed", "names no module"),
    ],
)
def test_every_unused_key_is_named(tmp_path, key, message):
    with pytest.raises(AdapterError, match=message) as refusal:
        read(write(tmp_path, with_tensor(key, torch.zeros(4, 192))))
    assert key in str(refusal.value)
    assert "adapter_model.safetensors" in str(refusal.value)


def test_one_module_bound_twice_is_refused(tmp_path):
    twin = f"{Q0}.lora_A.weight".removeprefix("base_model.model.")
    with pytest.raises(AdapterError, match="same factor"):
        read(write(tmp_path, with_tensor(twin, torch.zeros(4, 192))))


def test_two_adapters_in_one_file_are_refused(tmp_path):
    tensors = renamed(
        lambda key: key.replace(".weight", ".a.weight" if "layers.0" in key else ".b.weight")
    )
    with pytest.raises(AdapterError, match="adapter name"):
        read(write(tmp_path, tensors))


def test_rank_above_the_engines_maximum(tmp_path):
    folder = write(tmp_path / "plain")
    assert read(folder, max_lora_rank=4).rank == 4
    with pytest.raises(AdapterError, match=r"rank 4.*max_lora_rank = 3"):
        read(folder, max_lora_rank=3)


def test_rank_above_the_maximum_through_a_pattern_only(tmp_path):
    tensors = lora_tensors()
    name = module_name(1, Target.V_PROJ)
    tensors[f"{name}.lora_A.weight"] = torch.ones(9, HIDDEN)
    tensors[f"{name}.lora_B.weight"] = torch.ones(KV, 9)
    folder = write(tmp_path, tensors, rank_pattern={"1.self_attn.v_proj": 9})
    assert read(folder, max_lora_rank=9).rank == 9
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.v_proj.*rank 9.*8"):
        read(folder, max_lora_rank=8)


# ---- files


class _Marker:
    """A pickle that creates a file when it is opened."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_a_pickle_is_never_opened(tmp_path):
    marker = tmp_path / "marker"
    folder = write(tmp_path / "adapter")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Marker(marker)))
    assert_same_modules(read(folder), lora_tensors())  # beside safetensors it is ignored
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.bin.*accepted.*safetensors"):
        read(folder)
    assert not marker.exists()


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.6, 0.999])
def test_truncated_files_are_refused(tmp_path, fraction):
    folder = write(tmp_path)
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is not a complete"):
        read(folder)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(AdapterError, match="nowhere is not a directory"):
        read(tmp_path / "nowhere")
    folder = write(tmp_path / "adapter")
    with pytest.raises(AdapterError, match="not a directory"):
        read(folder / "adapter_config.json")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="no weights"):
        read(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist"):
        read(folder)


def test_paths_that_the_system_refuses(tmp_path):
    with pytest.raises(AdapterError, match=r"xxx cannot be read: File name too long"):
        read(tmp_path / ("x" * 300))


def test_broken_shards_are_refused(tmp_path):
    folder = write(tmp_path)
    index = write_shards(folder, lora_tensors())
    with pytest.raises(AdapterError, match="holds both"):
        read(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert len(read(folder).modules) == 2 * LAYERS

    write_shards(
        folder, lora_tensors(), **{"a.lost.key": "adapter_model-00001-of-00002.safetensors"}
    )
    with pytest.raises(AdapterError, match=r"a\.lost\.key.*index alone"):
        read(folder)

    content = json.loads(index.read_text())
    del content["weight_map"]["a.lost.key"], content["weight_map"][f"{Q0}.lora_A.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(AdapterError, match=r"q_proj\.lora_A\.weight.*not in the index"):
        read(folder)

    write_shards(folder, lora_tensors(), **{"a.key": "../adapter_model.safetensors"})
    with pytest.raises(AdapterError, match=r"\.\./adapter_model"):
        read(folder)

    write_shards(folder, lora_tensors())
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(AdapterError, match="00002-of-00002"):
        read(folder)

    for broken in (
        "{",
        "[]",
        "[" * 200_000,
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": null, "b": "s.safetensors"}}',
        '{"weight_map": {"a": [], "b": "s.safetensors"}}',
    ):
        index.write_text(broken)
        with pytest.raises(AdapterError, match=r"index\.json"):
            read(folder)
