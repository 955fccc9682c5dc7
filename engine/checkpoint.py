"""Open a base model, wherever it lies: its architecture, its weights, its tokenizer's place.

Reads no weights itself; it checks, before anything is allocated, that all of them are there and
have the right shapes.
"""

import re
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from engine.architecture import Architecture, read_token_ids
from engine.config import DTYPES, check_path
from engine.config_reader import ConfigReader
from engine.errors import CheckpointError, RequestError
from engine.expert_source import ExpertSource
from engine.gguf_rope import recognise_rope
from engine.gguf_source import GGUFSource
from engine.json_file import read_json
from engine.safetensors_source import SafetensorsSource
from engine.shown import shown
from engine.tokenizer import TokenizerSource
from engine.weight_source import WeightSource

__all__ = ["Checkpoint", "WeightSource", "check_weights", "open_checkpoint"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Checkpoint:
    """A model that has been opened. `path` is for messages; no tokenizer means ids only.

    `eos_token_ids`: of generation_config.json and config.json, or of a GGUF file's metadata; the
    tokenizer's own come on top (`Tokenizer.eos_token_ids`).
    """

    architecture: Architecture
    source: WeightSource
    path: str = ""
    tokenizer_source: TokenizerSource | None = None
    eos_token_ids: tuple[int, ...] = ()


def open_checkpoint(
    model: str | PathLike[str], dtype: torch.dtype | str | None = None
) -> Checkpoint:
    """Open a directory in Hugging Face layout, a .gguf file, or a hub id.

    `dtype`, torch's or its name, replaces the checkpoint's in `architecture.dtype`. RequestError
    for arguments that are neither; CheckpointError for whatever cannot be served exactly: it names
    the file, the key, what was found and what is accepted.
    """
    path = check_path("model", model)
    wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    known = isinstance(wanted, torch.dtype) and wanted in DTYPES.values()
    if dtype is not None and not known:
        raise RequestError(f"dtype={shown(dtype)}; accepted: {', '.join(map(repr, DTYPES))}")
    try:
        checkpoint = _open(path)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise CheckpointError(f"{model}: cannot be read: {error.strerror or error}") from error
    if wanted is not None:
        architecture = replace(checkpoint.architecture, dtype=wanted)
        checkpoint = replace(checkpoint, architecture=architecture)
    return checkpoint


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.exists():
        raise CheckpointError(
            f"{path}: a file that does not end in .gguf; accepted: a directory, a .gguf file, or a "
            "hub id"
        )
    return _open_directory(_download(str(path)))


def check_weights(architecture: Architecture, source: WeightSource, where: str) -> None:
    """CheckpointError unless `source` holds exactly the architecture's parameters."""
    expected = architecture.parameter_shapes()
    found = source.names()
    if missing := sorted(expected.keys() - found):
        raise CheckpointError(
            f"{where}: {missing[0]} is missing ({len(missing)} of {len(expected)} tensors are)"
        )
    ignored = {HEAD} if architecture.tie_word_embeddings else set()
    unexpected = sorted(
        name
        for name in found - expected.keys() - ignored
        if not name.endswith("rotary_emb.inv_freq")
    )
    if unexpected:
        raise CheckpointError(
            f"{source.origin(unexpected[0])}: a tensor that {architecture.name} has no place for "
            f"({len(unexpected)} such tensors)"
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise CheckpointError(
                f"{source.origin(name)}: shape {source.shape(name)} where the config says {shape}"
            )


def _open_directory(path: Path) -> Checkpoint:
    config_file, generation_file = path / "config.json", path / "generation_config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{path}: no config.json; accepted: a directory with one")
    config = _read_json(config_file)
    architecture = Architecture.from_config(config, str(config_file))
    source = SafetensorsSource(path)
    if architecture.tie_word_embeddings and not _head_is_embedding(source):
        architecture = replace(architecture, tie_word_embeddings=False)
    weights: WeightSource = source
    if architecture.moe:
        weights = ExpertSource(source, architecture.num_experts)
    check_weights(architecture, weights, str(path))
    eos = set(architecture.eos_token_ids)
    if generation_file.is_file():
        generation = ConfigReader(_read_json(generation_file), str(generation_file))
        eos.update(read_token_ids(generation, "eos_token_id", None))
    has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
    return Checkpoint(
        architecture=architecture,
        source=weights,
        path=str(path),
        tokenizer_source=TokenizerSource(str(path)) if has_tokenizer else None,
        eos_token_ids=tuple(sorted(eos)),
    )


def _open_gguf(path: Path) -> Checkpoint:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    source = GGUFSource(path)
    if EMBEDDING not in source.names():
        raise CheckpointError(f"{path}: token_embd.weight is missing")
    config = source.metadata.config(source.names(), source.shape(EMBEDDING)[0])
    architecture = Architecture.from_config(config, str(path))
    architecture = replace(architecture, dtype=source.dtype())
    if source.rope_factors is not None:
        rope = recognise_rope(architecture.rope, source.rope_factors, architecture.head_dim, path)
        architecture = replace(architecture, rope=rope)
    check_weights(architecture, source, str(path))
    return Checkpoint(
        architecture=architecture,
        source=source,
        path=str(path),
        tokenizer_source=TokenizerSource(str(path.parent), gguf_file=path.name),
        eos_token_ids=architecture.eos_token_ids,
    )


def _head_is_embedding(source: SafetensorsSource) -> bool:
    """False where a config says tied but the file holds another head: that head is then used.

    So does transformers, which ties only heads that are absent or equal.
    """
    if not {EMBEDDING, HEAD} <= source.names():
        return True
    return source.shape(EMBEDDING) != source.shape(HEAD) or source.are_equal(EMBEDDING, HEAD)


def _download(hub_id: str) -> Path:
    """The local snapshot of a hub id, fetched or cached."""
    accepted = "a directory, a .gguf file, or a hub id"
    if not _HUB_ID.fullmatch(hub_id) or hub_id.startswith("."):
        raise CheckpointError(f"{hub_id}: no such directory or file; accepted: {accepted}")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED)
        )
    except Exception as error:  # network, access, unknown id: the hub's errors share no base
        raise CheckpointError(
            f"{hub_id}: no such directory, and not to be had from the hub ({error}); "
            f"accepted: {accepted}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: accepted: one JSON object")
    return values
