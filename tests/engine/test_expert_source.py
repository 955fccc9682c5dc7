"""Checkpoints of mixtures of experts, in every form: what is read, bit for bit, and refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint import open_checkpoint
from engine.decoder_weights import DecoderWeights, SparseMLP
from engine.errors import CheckpointError
from engine.random_source import RandomSource
from tests.engine.split_experts import split_experts

Weights = dict[str, torch.Tensor]

EXPERTS, WIDTH, HIDDEN = 4, 12, 32
SIZES = {
    "vocab_size": 40,
    "hidden_size": HIDDEN,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TOP = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES | {"intermediate_size": WIDTH}, head_dim=16, num_local_experts=EXPERTS
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES | TOP, shared_expert_intermediate_size=28, decoder_sparse_step=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES | TOP, head_dim=16, mlp_only_layers=[1], tie_word_embeddings=True
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES | {"intermediate_size": WIDTH},
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
}
BLOCK = "model.layers.0.mlp"
GATE_UP, DOWN = f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"
UP_2 = f"{BLOCK}.experts.2.up_proj.weight"


def renamed(weights: Weights, *changes: tuple[str, str]) -> Weights:
    result = {}
    for name, value in weights.items():
        for pattern, new in changes:
            name = re.sub(pattern, new, name)
        result[name] = value
    return result


def as_mixtral(fused: Weights) -> Weights:
    names = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    changes = [(rf"(experts\.\d+)\.{old}", rf"\1.{new}") for old, new in names]
    return renamed(split_experts(fused), *changes)


def mixed(fused: Weights) -> Weights:
    """Gate and up of each expert by themselves, down in one tensor."""
    each = {k: v for k, v in split_experts(fused).items() if not re.search(r"\d\.down_proj", k)}
    return each | {k: v for k, v in fused.items() if "down_proj" in k}


# From transformers' own parameters, which are fused, to the tensors of a file.
FORMS: dict[str, Callable[[Weights], Weights]] = {
    "each": split_experts,
    "w1": as_mixtral,
    "block_sparse_moe": lambda fused: renamed(
        as_mixtral(fused), (r"\.mlp\.", ".block_sparse_moe.")
    ),
    "fused": dict,
    "fused_weight": lambda fused: renamed(fused, (r"(experts\.\w+)$", r"\1.weight")),
    "mixed": mixed,
    "layer_by_layer": lambda fused: {
        key: value
        for key, value in (split_experts(fused) | fused).items()
        if ("layers.0" in key) == bool(re.search(r"experts\.\d", key)) or ".experts." not in key
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[torch.nn.Module, Path]]:
    """Random models of every family, and where transformers saved them."""
    result = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        result[name] = model, tmp_path_factory.mktemp(name)
        model.save_pretrained(result[name][1])
    return result


def parameters_of(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write(models: dict, family: str, form: str, path: Path, shards: int = 1) -> Path:
    """The family's checkpoint with its experts in another form."""
    model, source = models[family]
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = FORMS[form](parameters_of(model))
    weights = {name: value.clone() for name, value in weights.items()}
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        save_file({name: weights[name] for name in names[shard::shards]}, path / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index)
    return path


def edit_weights(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path) | changes
    save_file({key: value for key, value in weights.items() if value is not None}, path)


def assert_holds(path: Path, model: torch.nn.Module) -> None:
    """Loaded into a decoder, the checkpoint is the model, bit for bit."""
    checkpoint, wanted = open_checkpoint(path), parameters_of(model)
    architecture = checkpoint.architecture
    names = architecture.parameter_shapes().keys()
    assert names == split_experts(wanted).keys()
    weights = DecoderWeights(architecture, torch.float32, torch.device("cpu"))
    for destination in weights._destinations.values():
        destination.fill_(float("nan"))
    weights.load(checkpoint.source)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}.mlp"
        if isinstance(layer.mlp, SparseMLP):
            assert torch.equal(layer.mlp.gate_up, wanted.pop(f"{prefix}.experts.gate_up_proj"))
            assert torch.equal(layer.mlp.down, wanted.pop(f"{prefix}.experts.down_proj"))
    read = {name: weights._destinations[name] for name in wanted}
    assert [name for name in read if not torch.equal(read[name], wanted[name])] == []


@pytest.mark.parametrize(
    ("family", "shard"), [*((name, "1GB") for name in CONFIGS), ("qwen2_moe", "9KB")]
)
def test_weights_are_those_that_transformers_saved(models, tmp_path, family, shard):
    model, path = models[family]
    if shard != "1GB":
        path = tmp_path
        model.save_pretrained(path, max_shard_size=shard)
        assert len(list(path.glob("*.safetensors"))) > 3
    assert_holds(path, model)


@pytest.mark.parametrize(
    ("family", "form", "shards"),
    [
        ("mixtral", "block_sparse_moe", 2),
        ("mixtral", "w1", 1),
        ("mixtral", "fused", 1),
        ("mixtral", "mixed", 3),
        ("qwen2_moe", "each", 4),
        ("qwen2_moe", "fused", 3),
        ("qwen3_moe", "fused_weight", 1),
        ("qwen3_moe", "layer_by_layer", 2),
        ("olmoe", "mixed", 1),
        ("olmoe", "fused", 1),
    ],
)
def test_every_form_gives_the_same_weights(models, tmp_path, family, form, shards):
    path = write(models, family, form, tmp_path / "model", shards)
    assert_holds(path, models[family][0])


@pytest.mark.parametrize("form", ["each", "fused"])
def test_copies_into_views_dtypes_and_parts(models, tmp_path, form):
    source = open_checkpoint(write(models, "qwen3_moe", form, tmp_path / "model")).source
    whole = split_experts(parameters_of(models["qwen3_moe"][0]))[UP_2]
    stacked = torch.full((20, HIDDEN), float("nan"), dtype=torch.bfloat16)
    source.copy_into(UP_2, stacked[3:15])
    assert torch.equal(stacked[3:15], whole.bfloat16())
    assert stacked[:3].isnan().all()
    assert stacked[15:].isnan().all()
    for part in ((slice(4, 9),), (slice(None), slice(8, 16)), (slice(6, None), slice(-5, None))):
        cut = torch.empty_like(whole[part])
        source.copy_into(UP_2, cut, part)
        assert torch.equal(cut, whole[part])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: .*shape \(12, 32\) where .*\(12, 8"
    ):
        source.copy_into(UP_2, torch.empty(WIDTH, 8))
    with pytest.raises(CheckpointError, match=r"experts.9.up_proj.weight: no such tensor"):
        source.copy_into(UP_2.replace("2", "9"), torch.empty(WIDTH, HIDDEN))


class SlicesOnly:
    """A safetensors file whose fused tensors are read by slices, which are noted."""

    def __init__(self, file: Any):
        self._file = file
        self.rows_read: dict[str, int] = {}

    def get_tensor(self, name: str) -> torch.Tensor:
        assert ".experts." not in name
        return self._file.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        view, rows_read = self._file.get_slice(name), self.rows_read

        class Noted:
            get_shape, get_dtype = view.get_shape, view.get_dtype

            def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
                result = view[part]
                assert result.shape[0] == 1
                rows_read[name] = rows_read.get(name, 0) + result.shape[1]
                return result

        return Noted()


def test_a_fused_tensor_is_read_one_expert_at_a_time_and_once(models, tmp_path):
    checkpoint = open_checkpoint(write(models, "mixtral", "fused", tmp_path / "model"))
    files = checkpoint.source._source._files
    path, file = next(iter(files.items()))
    files[path] = noted = SlicesOnly(file)
    weights = DecoderWeights(checkpoint.architecture, torch.float32, torch.device("cpu"))
    weights.load(checkpoint.source)
    assert noted.rows_read == {
        f"model.layers.{layer}.mlp.experts.{name}": EXPERTS * rows
        for layer in range(3)
        for name, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", HIDDEN))
    }


def test_names_are_gathered_once(models, tmp_path):
    """Each copy looks its name up: gathered anew each time, 20,000 names cost minutes."""
    checkpoint = open_checkpoint(write(models, "olmoe", "fused", tmp_path / "model"))
    experts = checkpoint.source
    for source in (experts, experts._source, RandomSource(checkpoint.architecture)):
        assert source.names() is source.names()


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("each", UP_2, r"experts.2.up_proj.weight is missing \(1 of 55 tensors are\)"),
        ("fused", DOWN, r"experts.0.down_proj.weight is missing \(4 of 55 tensors are\)"),
        ("fused", f"{BLOCK}.gate.weight", "gate.weight is missing"),
    ],
)
def test_missing_experts_are_named(models, tmp_path, form, name, message):
    path = write(models, "qwen3_moe", form, tmp_path / "model")
    edit_weights(path, {name: None})
    with pytest.raises(CheckpointError, match=f"^{path}: {BLOCK}.{message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("form", "name", "shape", "message"),
    [
        ("each", UP_2, (12, 31), r"shape \(12, 31\) where the config says \(12, 32\)"),
        ("each", f"{BLOCK}.gate.weight", (5, 32), r"shape \(5, 32\) where the config says \(4, "),
        ("fused", DOWN, (4, 32, 11), r"expert 0: shape \(32, 11\) where the config says \(32, 12"),
        ("fused", GATE_UP, (4, 26, 32), r"expert 0: shape \(13, 32\) where the config says \(12,"),
        ("fused", GATE_UP, (4, 32, 24), r"expert 0: shape \(16, 24\) where the config says \(12,"),
        ("fused", GATE_UP, (4, 25, 32), r"shape \(4, 25, 32\); accepted, for all experts in one"),
        ("fused", GATE_UP, (3, 24, 32), r"shape \(3, 24, 32\); accepted, .*: 4 matrices"),
        ("fused", DOWN, (5, 32, 12), r"shape \(5, 32, 12\); accepted, .*: 4 matrices"),
        ("fused", DOWN, (128, 12), r"shape \(128, 12\); accepted, .*: 4 matrices"),
        ("fused", DOWN, (), r"shape \(\); accepted, .*: 4 matrices"),
    ],
)
def test_wrong_shapes_are_refused(models, tmp_path, form, name, shape, message):
    path = write(models, "qwen3_moe", form, tmp_path / "model")
    edit_weights(path, {name: torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=f"^{path}/model.safetensors: {name}(:|,) {message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("form", "name", "shape"),
    [
        ("each", UP_2.replace("2", "4"), (12, 32)),
        ("each", UP_2.replace("2", "02"), (12, 32)),
        ("fused", f"{GATE_UP}_bias", (4, 24)),
        ("each", f"{BLOCK}.up_proj.weight", (20, 32)),  # of a dense layer
        ("each", UP_2.replace("layers.0", "layers.1"), (12, 32)),  # in a dense layer
        ("fused", DOWN.replace("layers.0", "layers.1"), (4, 32, 12)),
        ("each", f"{BLOCK}.shared_expert.up_proj.weight", (28, 32)),
        ("each", f"{BLOCK}.gate.bias", (4,)),
    ],
)
def test_tensors_without_a_place_are_refused(models, tmp_path, form, name, shape):
    path = write(models, "qwen3_moe", form, tmp_path / "model")
    edit_weights(path, {name: torch.zeros(shape)})
    message = f"^{path}/model.safetensors: {name}(, expert 0)?: a tensor that Qwen3Moe.* no place"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("form", "name", "shape"),
    [
        ("each", GATE_UP, (4, 24, 32)),
        ("fused", UP_2, (12, 32)),
        ("mixed", UP_2.replace("up_proj", "down_proj"), (32, 12)),
        ("fused", f"{DOWN}.weight", (4, 32, 12)),
        ("each", UP_2.replace("up_proj", "w3"), (12, 32)),
        ("each", UP_2.replace("mlp", "block_sparse_moe"), (12, 32)),
        ("each", f"{BLOCK}.gate.weight".replace("mlp", "block_sparse_moe"), (4, 32)),
    ],
)
def test_two_forms_of_one_weight_are_refused(models, tmp_path, form, name, shape):
    """Neither is chosen in silence, and both are named."""
    path = write(models, "qwen3_moe", form, tmp_path / "model")
    edit_weights(path, {name: torch.zeros(shape)})
    file = f"{path}/model.safetensors"
    with pytest.raises(
        CheckpointError, match=f"^{file}: .* is also in {file}: .*accepted: one"
    ) as e:
        open_checkpoint(path)
    assert f"{file}: {name}:" in str(e.value) or f"{file}: {name};" in str(e.value)


def test_shared_experts_must_be_there(models, tmp_path):
    path = write(models, "qwen2_moe", "each", tmp_path / "model")
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    edit_weights(path, {name: None})
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        open_checkpoint(path)


def test_unreadable_dtypes_are_refused(models, tmp_path):
    path = write(models, "olmoe", "fused", tmp_path / "model")
    edit_weights(path, {DOWN: torch.ones(EXPERTS, HIDDEN, WIDTH, dtype=torch.int8)})
    source = open_checkpoint(path).source
    with pytest.raises(CheckpointError, match=r"model.safetensors: \S+experts.down_proj: dtype I8"):
        source.copy_into(f"{BLOCK}.experts.1.down_proj.weight", torch.empty(HIDDEN, WIDTH))


def test_a_shard_that_lacks_an_expert(models, tmp_path):
    path = write(models, "qwen3_moe", "each", tmp_path / "model", shards=2)
    index = path / "model.safetensors.index.json"
    shard = json.loads(index.read_text())["weight_map"][UP_2]
    weights = load_file(path / shard)
    del weights[UP_2]
    save_file(weights, path / shard)
    with pytest.raises(CheckpointError, match=f"{shard}: {UP_2} is not in it, though"):
        open_checkpoint(path)
