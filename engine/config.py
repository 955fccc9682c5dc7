"""The engine's keywords, checked. The only place that reads environment variables."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from engine.errors import RequestError
from engine.shown import shown
from graphs.graph_capturer import Backend
from graphs.ladder import Ladder
from kernels.lora_metadata import MAX_ROWS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GRAPHS = ("auto", "cuda", "tape", "off")
LORA_BACKENDS = ("auto", "torch", "sgemm")
PAGE_SIZE = 16
NVTX_VARIABLE = "ENCORE_NVTX"
DEBUG_VARIABLE = "ENCORE_DEBUG"
CACHE_VARIABLE = "ENCORE_CACHE_DIR"
MEASURE_VARIABLE = "ENCORE_MEASURE"


def _environment_flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def compiler() -> str | None:
    """The C compiler that Triton will be told to use, where `CC` says so."""
    return os.environ.get("CC")


def is_measured() -> bool:
    """Whether base products are chosen by what they take on the card, not by rule."""
    return os.environ.get(MEASURE_VARIABLE) != "0"


def cache_directory() -> Path | None:
    """Where what was measured is kept; it need not exist. None where there is no home."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:
            return None
    return caches / "encore"


@dataclass(frozen=True)
class EngineConfig:
    """One field per keyword of `Engine`; None where the default depends on model or device.

    Raises RequestError naming the keyword, what was found and what is accepted.
    """

    device: str | None = None
    dtype: str | None = None
    graphs: str = "auto"
    graph_batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int = 64
    max_seq_len: int | None = None
    max_loras: int = 8
    max_lora_rank: int = 64
    lora_memory_bytes: int | None = None
    max_cpu_loras: int = 64
    memory_fraction: float = 0.9
    kv_cache_tokens: int | None = None
    prefill_chunk_tokens: int = 2048
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    lora_backend: str = "auto"
    seed: int = 0
    nvtx: bool = False
    debug: bool = False

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> "EngineConfig":
        """Check names and values; `ENCORE_NVTX=1` and `ENCORE_DEBUG=1` turn those two on."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                accepted = ", ".join(["adapters", "tokenizer", *known])
                raise RequestError(f"Engine has no keyword {name!r}; it takes {accepted}")
        values = dict(keywords)
        if values.get("graph_batch_sizes") is not None:
            values["graph_batch_sizes"] = _whole_numbers(values["graph_batch_sizes"])
        for name, variable in (("nvtx", NVTX_VARIABLE), ("debug", DEBUG_VARIABLE)):
            if _environment_flag(variable):
                values[name] = True
        return cls(**values)

    def __post_init__(self) -> None:
        self._one_of("dtype", (None, *DTYPES))
        self._one_of("graphs", GRAPHS)
        self._one_of("lora_backend", LORA_BACKENDS)
        for name in ("enable_prefix_caching", "nvtx", "debug"):
            self._one_of(name, (True, False))
        self._whole("max_batch_size", 1, 1024)
        self._whole("max_seq_len", 2, 2**20, optional=True)
        self._whole("max_loras", 0, 256)
        self._whole("max_lora_rank", 1, 256)
        self._whole("lora_memory_bytes", 1, 2**50, optional=True)
        self._whole("max_cpu_loras", 1, 10**6)
        self._whole("kv_cache_tokens", 1, 2**40, optional=True)
        self._whole("prefill_chunk_tokens", 1, MAX_ROWS)
        self._whole("tensor_parallel_size", 1, 1024)
        self._whole("seed", -(2**63), 2**64 - 1)
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise RequestError(f"memory_fraction={shown(fraction)} is not a number")
        if not 0 < fraction <= 1:
            raise RequestError(f"memory_fraction={shown(fraction)} is not above 0 and at most 1")
        if self.tensor_parallel_size > 1:
            raise RequestError(
                f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported"
            )
        if self.graph_batch_sizes is not None:
            for size in self.graph_batch_sizes:
                if not 1 <= size <= self.max_batch_size:
                    raise RequestError(
                        f"graph_batch_sizes holds {shown(size)}; accepted: 1 to max_batch_size="
                        f"{self.max_batch_size}"
                    )

    def resolved_device(self) -> torch.device:
        """The device asked for, or a GPU if there is one. Raises RequestError where it is not."""
        name: object = self.device
        if name is None:
            name = "cuda" if torch.cuda.is_available() else "cpu"
        accepted = "accepted: 'cpu', 'cuda', 'cuda:N'"
        known = re.fullmatch(r"cpu|cuda(?::(\d+))?", name) if isinstance(name, str) else None
        if known is None:
            raise RequestError(f"device={shown(name)} is no device; {accepted}")
        if name == "cpu":
            return torch.device("cpu")
        count = torch.cuda.device_count()
        index = int(known[1] or 0)
        if index >= count:
            raise RequestError(f"device={name!r}: {count} CUDA devices are present; {accepted}")
        return torch.device("cuda", index)

    def resolved_graphs(self, device: torch.device) -> Backend:
        """The backend asked for, or the device's. Raises RequestError where it cannot do it."""
        natural: Backend = "cuda" if device.type == "cuda" else "tape"
        if self.graphs == "off":
            return "off"
        if self.graphs not in ("auto", natural):
            raise RequestError(
                f"graphs={self.graphs!r} does not run on {device}; accepted: 'auto', "
                f"{natural!r}, 'off'"
            )
        return natural

    def ladder(self) -> Ladder:
        """The batch sizes to capture."""
        if self.graph_batch_sizes is None:
            return Ladder.up_to(self.max_batch_size)
        return Ladder.of(self.graph_batch_sizes, self.max_batch_size)

    def _one_of(self, name: str, accepted: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if not any(
            value is item or (value == item and type(value) is type(item)) for item in accepted
        ):
            raise RequestError(f"{name}={shown(value)}; accepted: {', '.join(map(repr, accepted))}")

    def _whole(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name}={shown(value)} is not a whole number from {low} to {high}")


def check_path(name: str, value: object) -> Path:
    """`value` as a path, or RequestError naming the argument."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise RequestError(f"{name}={shown(value)} is not a path")
    return Path(path)


def check_adapters(adapters: Any) -> Mapping[str, Any]:
    """The `adapters` keyword as a mapping, or RequestError; names and paths are checked later."""
    if adapters is None:
        return {}
    if not isinstance(adapters, Mapping):
        raise RequestError(f"adapters={shown(adapters)} is not a mapping of names to directories")
    return adapters


def _whole_numbers(value: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(value)
    except TypeError:
        sizes = None
    if sizes is None or any(isinstance(s, bool) or not isinstance(s, int) for s in sizes):
        raise RequestError(f"graph_batch_sizes={shown(value)} is not a list of whole numbers")
    if not sizes:
        raise RequestError(f"graph_batch_sizes={shown(value)} is empty; accepted: None, or sizes")
    return sizes
