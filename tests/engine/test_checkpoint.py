"""Opening directories and hub ids: what is read, what is refused, and in which words."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint, check_weights, open_checkpoint
from engine.errors import CheckpointError, RequestError
from engine.random_source import RandomSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def save_tiny(directory: Path, tied: bool = False, shard: str = "1GB") -> dict[str, torch.Tensor]:
    """A Llama of 2 layers saved by transformers; returns its weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size=shard)
    return model.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, save_tiny(directory)


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy that the test may break."""
    return Path(shutil.copytree(saved[0], tmp_path / "model"))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path) | changes
    save_file({key: value for key, value in weights.items() if value is not None}, path)


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = {}
    for name, shape in checkpoint.architecture.parameter_shapes().items():
        weights[name] = torch.full(shape, float("nan"))
        checkpoint.source.copy_into(name, weights[name])
    return weights


@pytest.mark.parametrize(("tied", "shard"), [(False, "1GB"), (True, "4KB"), (False, "4KB")])
def test_weights_are_those_that_transformers_saved(tmp_path, tied, shard):
    wanted = save_tiny(tmp_path, tied, shard)
    checkpoint = open_checkpoint(str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "4KB"
    assert checkpoint.architecture.tie_word_embeddings == tied
    weights = read_all(checkpoint)
    assert len(weights) == len(wanted) - tied
    assert all(torch.equal(weights[name], wanted[name]) for name in weights)


def test_copies_into_views_dtypes_and_parts(saved):
    directory, wanted = saved
    source = open_checkpoint(directory).source
    stacked = torch.full((20, 16), float("nan"), dtype=torch.bfloat16)
    source.copy_into(Q_PROJ, stacked[2:18])
    assert torch.equal(stacked[2:18], wanted[Q_PROJ].bfloat16())
    assert stacked[:2].isnan().all()
    assert stacked[18:].isnan().all()
    for part in ((slice(4, 12),), (slice(None), slice(8, 16))):
        cut = torch.empty_like(wanted[Q_PROJ][part])
        source.copy_into(Q_PROJ, cut, part)
        assert torch.equal(cut, wanted[Q_PROJ][part])
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*q_proj.*shape \(16, 16\)"):
        source.copy_into(Q_PROJ, torch.empty(16, 8))
    with pytest.raises(CheckpointError, match=r"nothing.weight: no such tensor"):
        source.copy_into("nothing.weight", torch.empty(1))


def test_dtype_eos_and_tokenizer(model):
    edit_json(model / "config.json", eos_token_id=3)
    edit_json(model / "generation_config.json", eos_token_id=[7, 5])
    checkpoint = open_checkpoint(model, torch.bfloat16)
    assert checkpoint.architecture.dtype == torch.bfloat16
    assert open_checkpoint(model).architecture.dtype == torch.float32
    assert checkpoint.eos_token_ids == (3, 5, 7)
    assert checkpoint.tokenizer_source is None
    (model / "tokenizer.json").write_text("{}")
    assert open_checkpoint(model).tokenizer_source.location == str(model)
    (model / "generation_config.json").unlink()
    assert open_checkpoint(model).eos_token_ids == (3,)


@pytest.mark.parametrize("different", [False, True])
def test_a_stored_head_counts_only_where_it_differs_from_a_tied_embedding(model, different):
    edit_json(model / "config.json", tie_word_embeddings=True)
    head = load_file(model / "model.safetensors")[EMBEDDING] + different
    edit_weights(model, {HEAD: head})
    tied = transformers.AutoModelForCausalLM.from_pretrained(model)
    checkpoint = open_checkpoint(model)
    assert checkpoint.architecture.tie_word_embeddings != different
    key = HEAD if different else EMBEDDING
    assert torch.equal(read_all(checkpoint)[key], tied.lm_head.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q_PROJ: None}, "model: model.layers.1.self_attn.q_proj.weight is missing"),
        ({"extra.weight": torch.ones(1)}, "extra.weight: a tensor that Llama.* no place for"),
        ({Q_PROJ: torch.ones(16, 8)}, r"q_proj.weight: shape \(16, 8\) where .* \(16, 16\)"),
    ],
)
def test_incomplete_or_foreign_weights_are_refused(model, changes, message):
    edit_weights(model, changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(model)


def test_rotary_buffers_of_old_files_are_ignored(model):
    edit_weights(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    open_checkpoint(model)


def test_unreadable_dtypes_are_refused(model):
    edit_weights(model, {Q_PROJ: torch.ones(16, 16, dtype=torch.int8)})
    source = open_checkpoint(model).source
    with pytest.raises(CheckpointError, match=r"q_proj.weight: dtype I8; accepted: F64, F32"):
        source.copy_into(Q_PROJ, torch.empty(16, 16))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 0.999])
def test_truncated_safetensors(model, share):
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a whole safetensors file"):
        open_checkpoint(model)


def test_broken_indexes(tmp_path):
    save_tiny(tmp_path, shard="4KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    weight_map = json.loads(whole)["weight_map"]
    shard = weight_map[Q_PROJ]
    for text, message in (
        (whole[:100], "index.json: not an index"),
        ("[" * 200_000, "index.json: not an index.*nested"),
        ('{"weight_map": [["a", "b.safetensors"]]}', "index.json: not an index"),
        ('{"weight_map": {"a": null}}', "a is in None; accepted: .safetensors files"),
        ('{"weight_map": {"a": "\\ud800.safetensors"}}', "safetensors: not a whole"),
        ('{"weight_map": {}}', "weight_map is empty"),
        (whole.replace(shard, f"../{shard}"), "accepted: .safetensors files beside the index"),
        (whole.replace(Q_PROJ, "model.absent"), f"{shard}: model.absent is not in it"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)
    index.write_text(whole)
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard}: missing"):
        open_checkpoint(tmp_path)


class _Marker:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("path", [3, None, b"x", ""])
def test_a_model_is_a_path(path):
    with pytest.raises(RequestError, match=f"model={path!r} is not a path"):
        open_checkpoint(path)


def test_dtypes_have_names(model):
    assert open_checkpoint(model, "bfloat16").architecture.dtype == torch.bfloat16
    for dtype in ("bf16", torch.int8, 16):
        with pytest.raises(RequestError, match=r"dtype=.*accepted: 'bfloat16', 'float16'"):
            open_checkpoint(model, dtype)


def test_pickles_are_never_opened(model, tmp_path):
    (model / "model.safetensors").unlink()
    marker = tmp_path / "opened"
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Marker(marker)))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, which is never"):
        open_checkpoint(model)
    assert not marker.exists()


def test_what_is_no_model(model, tmp_path):
    for config in ("{", "[]"):
        (model / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match=r"config.json: .*JSON"):
            open_checkpoint(model)
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(model)
    with pytest.raises(CheckpointError, match="absent/dir: no such directory or file"):
        open_checkpoint(tmp_path / "absent/dir")
    with pytest.raises(CheckpointError, match=r"absent.gguf: no such file"):
        open_checkpoint(tmp_path / "absent.gguf")


def test_paths_that_the_system_refuses(tmp_path):
    for path in ("x" * 300, tmp_path / ("x" * 300), tmp_path / ("x" * 300 + ".gguf")):
        with pytest.raises(CheckpointError, match=r"xxx.*cannot be read: File name too long"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_nested_too_deeply(model, name):
    (model / name).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=f"{name}: not a JSON file .*nested"):
        open_checkpoint(model)


def test_a_config_of_many_layers_is_refused_at_once(model):
    edit_json(model / "config.json", num_hidden_layers=10**7)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 10000000; accepted: .* 4096"):
        open_checkpoint(model)
    edit_json(model / "config.json", num_hidden_layers=4096)
    with pytest.raises(CheckpointError, match=r"model\.layers\.10\..* is missing"):
        open_checkpoint(model)


def test_hub_ids_are_downloaded_without_pickles(saved, monkeypatch):
    calls = []

    def download(hub_id, **options):
        calls.append((hub_id, options))
        if hub_id == "org/absent":
            raise OSError("offline")
        return str(saved[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/tiny").path == str(saved[0])
    with pytest.raises(CheckpointError, match=r"org/absent: .*hub \(offline\)"):
        open_checkpoint("org/absent")
    patterns = dict(calls)["org/tiny"]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern for pattern in patterns)


def test_random_weights(saved):
    architecture = open_checkpoint(saved[0]).architecture
    checkpoint = Checkpoint(architecture, RandomSource(architecture, std=0.02, seed=0))
    check_weights(architecture, checkpoint.source, "random")
    first, second = read_all(checkpoint), read_all(checkpoint)
    other = read_all(Checkpoint(architecture, RandomSource(architecture, seed=1)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first[EMBEDDING], other[EMBEDDING])
    assert not torch.equal(first[EMBEDDING], first[HEAD])
    assert first[EMBEDDING].std() == pytest.approx(0.02, rel=0.1)
    assert (first["model.norm.weight"] == 1).all()
    rows = torch.empty(8, 16)
    checkpoint.source.copy_into(Q_PROJ, rows, (slice(8, 16),))
    assert torch.equal(rows, first[Q_PROJ][8:])
    gemma = RandomSource(replace(architecture, norm_weight_offset=1.0))
    norm = torch.full((16,), float("nan"))
    gemma.copy_into("model.norm.weight", norm)
    assert (norm == 0).all()
