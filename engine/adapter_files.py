"""PEFT adapter directories, read once and whole into host memory.

`adapter_config.json` and `adapter_model.safetensors`, or `adapter_model.safetensors.index.json`
and the shards it names. Pickles are never opened: alone they are refused, beside safetensors they
are ignored. Every tensor is bound to a module or the adapter is refused with the key's name, so an
adapter is served exactly or not at all. Knows nothing of the device.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.adapter_config import CONFIG_NAME, AdapterConfig
from engine.adapter_modules import ModuleReader, TargetShapes
from engine.adapter_tensor import AdapterTensor
from engine.errors import AdapterError
from engine.json_file import read_json
from engine.shown import shown
from memory.adapter_weights import AdapterWeights

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAME = "adapter_model.bin"


def read_adapter(
    path: str | os.PathLike[str],
    architecture: TargetShapes,
    max_lora_rank: int,
    dtype: torch.dtype | None = None,
) -> AdapterWeights:
    """Read an adapter for a base model that runs in `dtype`, in which factors must stay finite.

    Factors keep their stored dtype, A is `[rank, in]` and B `[out, rank]`, contiguous, on the CPU,
    and independent of the files; one that several experts share is one object. Modules come by
    layer, target and expert. Raises AdapterError, which names the file and the key, for whatever
    cannot be served exactly.
    """
    folder = Path(path)
    try:
        return _read_folder(folder, architecture, max_lora_rank, dtype)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise AdapterError(f"{folder} cannot be read: {error.strerror or error}") from error


def _read_folder(
    folder: Path, architecture: TargetShapes, max_lora_rank: int, dtype: torch.dtype | None
) -> AdapterWeights:
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a directory; accepted: a PEFT adapter directory")
    config = AdapterConfig.read(folder / CONFIG_NAME)
    tensors = list(_stored_tensors(folder))
    if not tensors:
        raise AdapterError(f"{folder}: the weight files hold no tensors; accepted: LoRA factors")
    reader = ModuleReader(config, architecture, max_lora_rank, dtype)
    return AdapterWeights(path=str(folder), modules=reader.read(tensors))


def _stored_tensors(folder: Path) -> Iterator[AdapterTensor]:
    """All tensors of the weight files."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file() and index.is_file():
        raise AdapterError(f"{folder} holds both {WEIGHTS_NAME} and {INDEX_NAME}; accepted: one")
    if single.is_file():
        for key, tensor in _load(single).items():
            yield AdapterTensor(single, key, tensor)
    elif index.is_file():
        yield from _sharded_tensors(index)
    else:
        found = (
            f"only {PICKLE_NAME}, a pickle, which is never opened"
            if (folder / PICKLE_NAME).exists()
            else "no weights"
        )
        raise AdapterError(f"{folder} holds {found}; accepted: {WEIGHTS_NAME} or {INDEX_NAME}")


def _sharded_tensors(index: Path) -> Iterator[AdapterTensor]:
    """The tensors of all shards; the index and the shards must agree on every key."""
    shards: dict[str, set[str]] = {}
    try:
        weight_map = dict(read_json(index)["weight_map"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AdapterError(f"{index} is not an index of shards: {error!r}") from error
    for key, name in weight_map.items():
        beside = isinstance(name, str) and Path(name).name == name
        if not beside or not name.endswith(".safetensors"):
            raise AdapterError(
                f"{index} names {shown(name)}; accepted: .safetensors files beside it"
            )
        shards.setdefault(name, set()).add(key)
    for name, listed in sorted(shards.items()):
        shard = index.parent / name
        tensors = _load(shard)
        for key in sorted(listed ^ tensors.keys()):
            place = "is in the index alone" if key in listed else "is not in the index"
            raise AdapterError(f"{shard}: key {key!r} {place}; accepted: an index of all keys")
        for key, tensor in tensors.items():
            yield AdapterTensor(shard, key, tensor)


def _load(file: Path) -> dict[str, torch.Tensor]:
    """Read a whole safetensors file into memory of its own."""
    try:
        return load(file.read_bytes())
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise AdapterError(f"{file} is not a complete safetensors file: {error!r}") from error
