"""PEFT adapter directories, read once and whole into host memory.

`adapter_config.json` and `adapter_model.safetensors`, or `adapter_model.safetensors.index.json`
and the shards it names. Pickles are never opened: alone they are refused, beside safetensors they
are ignored. Every tensor is bound to a module or the adapter is refused with the key's name, so an
adapter is served exactly or not at all. Knows nothing of the device.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.adapter_config import AdapterConfig
from engine.adapter_keys import AdapterKey, module_path, parse_key
from engine.errors import AdapterError
from engine.json_file import read_json
from engine.shown import shown
from memory.adapter_weights import AdapterWeights, LoRAModule
from memory.lora_targets import Target

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAME = "adapter_model.bin"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class TargetShapes(Protocol):
    """What of a base model decides whether an adapter fits it."""

    @property
    def num_layers(self) -> int: ...

    def target_shape(self, target: Target) -> tuple[int, int]:
        """`(out, in)` of the linear layer's weight."""
        ...


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor with the file and the key that messages name."""

    file: Path
    key: str
    tensor: torch.Tensor

    def refusal(self, found: str, accepted: str) -> AdapterError:
        return AdapterError(f"{self.file}: key {self.key!r} {found}; accepted: {accepted}")

    def check(self, shape: tuple[int, int], why: str, served: torch.dtype | None) -> torch.Tensor:
        """The tensor itself, once its dtype, shape and values are in order, as `served` too."""
        if self.tensor.dtype not in DTYPES:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise self.refusal(f"is {self.tensor.dtype}", accepted)
        if tuple(self.tensor.shape) != shape:
            raise self.refusal(f"has shape {list(self.tensor.shape)}", f"{list(shape)} ({why})")
        if not bool(torch.isfinite(self.tensor).all()):
            raise self.refusal("holds NaN or infinity", "finite values")
        if served is not None and not _stays_finite(self.tensor, served):
            name, largest = str(served).removeprefix("torch."), torch.finfo(served).max
            raise self.refusal(f"overflows in {name}, as the engine runs", f"up to {largest:g}")
        return self.tensor


def _stays_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether finite values are finite in `dtype` too; those that round to its largest are."""
    narrows = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    return not narrows or bool(torch.isfinite(tensor.to(dtype)).all())


_Factors = dict[str, _StoredTensor]  # by "A" and "B"


def read_adapter(
    path: str | os.PathLike[str],
    architecture: TargetShapes,
    max_lora_rank: int,
    dtype: torch.dtype | None = None,
) -> AdapterWeights:
    """Read an adapter for a base model that runs in `dtype`, in which factors must stay finite.

    Factors keep their stored dtype, A is `[rank, in]` and B `[out, rank]`, contiguous, on the CPU,
    and independent of the files. Modules come by layer, then target. Raises AdapterError, which
    names the file and the key, for whatever cannot be served exactly.
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
    modules = tuple(
        _module(key, factors, config, architecture, max_lora_rank, dtype)
        for key, factors in _pair_factors(folder, list(_stored_tensors(folder)))
    )
    return AdapterWeights(path=str(folder), modules=modules)


def _module(
    key: AdapterKey,
    factors: _Factors,
    config: AdapterConfig,
    architecture: TargetShapes,
    max_lora_rank: int,
    dtype: torch.dtype | None,
) -> LoRAModule:
    """Check one module against the config and the base model."""
    some = next(iter(factors.values()))
    if key.layer >= architecture.num_layers:
        last = architecture.num_layers - 1
        raise some.refusal(f"names layer {key.layer}", f"layers 0 to {last} of the base model")
    for factor, other in ("AB", "BA"):
        if factor not in factors:
            raise factors[other].refusal(
                f"has no lora_{factor} beside it", "both factors of each module"
            )
    # A file may nest its modules otherwise than the base does; patterns must not care.
    paths = (key.path, module_path(key.layer, key.target))
    if not any(config.targets(path, key.layer) for path in paths):
        raise some.refusal(
            f"is not among the modules that {CONFIG_NAME} targets",
            "what target_modules, exclude_modules and layers_to_transform select",
        )
    readings = {(config.rank_of(path), config.scaling_of(path)) for path in paths}
    if len(readings) > 1:
        raise some.refusal(
            f"has another rank or alpha as {paths[0]} than as {paths[1]}",
            "rank_pattern and alpha_pattern that match both alike",
        )
    ((rank, scaling),) = readings
    if rank > max_lora_rank:
        raise some.refusal(f"has rank {rank}", f"at most max_lora_rank = {max_lora_rank}")
    out_features, in_features = architecture.target_shape(key.target)
    name = key.target.name.lower()
    a_why, b_why = f"rank in {CONFIG_NAME}, input of {name}", f"output of {name}, rank there"
    a = factors["A"].check((rank, in_features), a_why, dtype)
    b = factors["B"].check((out_features, rank), b_why, dtype)
    return LoRAModule(key.layer, key.target, a, b, scaling)


def _pair_factors(
    folder: Path, tensors: list[_StoredTensor]
) -> Iterator[tuple[AdapterKey, _Factors]]:
    """Group tensors by module, in order of layer and target."""
    if not tensors:
        raise AdapterError(f"{folder}: the weight files hold no tensors; accepted: LoRA factors")
    keys: dict[tuple[int, Target], AdapterKey] = {}
    modules: dict[tuple[int, Target], _Factors] = {}
    origins: dict[tuple[str, str | None], _StoredTensor] = {}  # one of each prefix and name
    for stored in tensors:
        try:
            key = parse_key(stored.key)
        except AdapterError as error:
            raise AdapterError(f"{stored.file}: {error}") from None
        module = (key.layer, key.target)
        keys[module] = key
        factors = modules.setdefault(module, {})
        if key.factor in factors:
            twin = factors[key.factor].key
            raise stored.refusal(f"and {twin!r} are the same factor", "one of each")
        factors[key.factor] = stored
        origins.setdefault((key.containers, key.adapter), stored)
    if len(origins) > 1:
        first, other, *_ = origins.values()
        found = f"has another prefix or adapter name than {first.key!r}"
        raise other.refusal(found, "one adapter in the files")
    for module in sorted(modules):
        yield keys[module], modules[module]


def _stored_tensors(folder: Path) -> Iterator[_StoredTensor]:
    """All tensors of the weight files."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file() and index.is_file():
        raise AdapterError(f"{folder} holds both {WEIGHTS_NAME} and {INDEX_NAME}; accepted: one")
    if single.is_file():
        for key, tensor in _load(single).items():
            yield _StoredTensor(single, key, tensor)
    elif index.is_file():
        yield from _sharded_tensors(index)
    else:
        found = (
            f"only {PICKLE_NAME}, a pickle," if (folder / PICKLE_NAME).exists() else "no weights"
        )
        raise AdapterError(f"{folder} holds {found}; accepted: {WEIGHTS_NAME} or {INDEX_NAME}")


def _sharded_tensors(index: Path) -> Iterator[_StoredTensor]:
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
            yield _StoredTensor(shard, key, tensor)


def _load(file: Path) -> dict[str, torch.Tensor]:
    """Read a whole safetensors file into memory of its own."""
    try:
        return load(file.read_bytes())
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise AdapterError(f"{file} is not a complete safetensors file: {error!r}") from error
