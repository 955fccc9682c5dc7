"""Weights of a Hugging Face directory: model.safetensors, or the shards an index names.

Files are memory-mapped and tensors copied one by one, so the host never holds the model. Pickles
are never opened.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.json_file import read_json
from engine.shown import shown
from engine.weight_source import Part, check_destination

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ACCEPTED_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """`directory` must hold model.safetensors or an index with all of its shards."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for path, promised in _shards(directory).items():
            keys = self._open(path)
            if missing := promised - keys:
                raise CheckpointError(
                    f"{path}: {min(missing)} is not in it, though {INDEX} says so "
                    f"({len(missing)} such tensors)"
                )
            for key in keys:
                if key in self._file_of:
                    raise CheckpointError(f"{path}: {key} is also in {self._file_of[key]}")
                self._file_of[key] = path
        self._names = frozenset(self._file_of)

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def origin(self, name: str) -> str:
        return f"{self._file_of.get(name, self._directory)}: {name}"

    def copy_into(self, name: str, dst: torch.Tensor, part: Part = ()) -> None:
        check_destination(self, name, dst, part)
        view = self._slice(name)
        if (found := view.get_dtype()) not in ACCEPTED_DTYPES:
            raise CheckpointError(
                f"{self.origin(name)}: dtype {found}; accepted: {', '.join(ACCEPTED_DTYPES)}"
            )
        try:
            file = self._files[self._file_of[name]]
            dst.copy_(view[part] if part else file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.origin(name)}: cannot be read: {error}") from error

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same values; reads both, from the mapped files."""
        first, second = (self._files[self._file_of[key]].get_tensor(key) for key in (name, other))
        return first.dtype == second.dtype and torch.equal(first, second)

    def close(self) -> None:
        self._files.clear()

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _open(self, path: Path) -> set[str]:
        try:
            file = safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing, though {INDEX} names it") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not a whole safetensors file ({error}); accepted: a complete download"
            ) from error
        self._files[path] = file
        return set(file.keys())  # type: ignore[no-untyped-call]


def _shards(directory: Path) -> dict[Path, set[str]]:
    """The files to open, each with the tensors that an index promises in it."""
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: set()}
    index = directory / INDEX
    if not index.is_file():
        pickles = sorted(path.name for path in directory.glob("*.bin"))
        reason = f" ({pickles[0]} is a pickle, which is never opened)" if pickles else ""
        raise CheckpointError(f"{directory}: no weights{reason}; accepted: {SINGLE} or {INDEX}")
    try:
        weight_map = dict(read_json(index)["weight_map"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: not an index ({error!r}); accepted: an object weight_map of tensor to file"
        ) from error
    shards: dict[Path, set[str]] = {}
    for key, name in weight_map.items():
        beside = isinstance(name, str) and Path(name).name == name
        if not beside or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {key} is in {shown(name)}; accepted: .safetensors files beside the index"
            )
        shards.setdefault(directory / name, set()).add(key)
    if not shards:
        raise CheckpointError(f"{index}: weight_map is empty")
    return shards
