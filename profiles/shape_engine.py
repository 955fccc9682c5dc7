"""Engines of the shapes that benchmarks know, with random adapters of rank 16.

Adapters sit on every linear layer, of a mixture on every expert too (not on the router). The
cases that a benchmark knows by name: `none` uses no adapter, with LoRA enabled; `one` the same
for all rows; `mix8` eight of them round robin; `off` is an engine without adapter slots.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine import Engine
from engine.checkpoint import Checkpoint
from profiles.random_adapters import save_random_adapter

RANK = 16
DISTINCT = {"off": 0, "none": 0, "one": 1, "mix8": 8}


@contextmanager
def random_adapters(
    checkpoint: Checkpoint, cases: Iterable[str], device: torch.device
) -> Iterator[dict[str, Path]]:
    """Directories of eight adapters, by name; none where no case uses any."""
    with tempfile.TemporaryDirectory() as directory:
        count = 8 if any(DISTINCT[case] for case in cases) else 0
        yield {
            f"adapter{index}": save_random_adapter(
                checkpoint.architecture, Path(directory, str(index)), RANK, index, device
            )
            for index in range(count)
        }


def adapter_names(case: str, batch: int) -> list[str | None]:
    """The adapter of each row."""
    distinct = DISTINCT[case]
    return [f"adapter{row % distinct}" if distinct else None for row in range(batch)]


def shape_engine(
    checkpoint: Checkpoint,
    adapters: Mapping[str, Path],
    batches: Sequence[int],
    tokens: int,
    lora: bool = True,
    **keywords: Any,
) -> Engine:
    """An engine with a graph for each of `batches`, and room for requests of `tokens` tokens in
    every row of the largest."""
    largest = max(batches)
    defaults: dict[str, Any] = {
        "adapters": adapters,
        "graph_batch_sizes": list(batches),
        "max_batch_size": largest,
        "max_seq_len": tokens,
        "max_loras": 8 if lora else 0,
        "max_lora_rank": RANK,
        "kv_cache_tokens": largest * (tokens + 16),
        "tokenizer": None,
    }
    return Engine(checkpoint, **defaults | keywords)
