"""What the keywords come to for one model on one machine: device, dtype, length, tokenizer, sizes.

Allocates nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint import Checkpoint
from engine.config import DTYPES, PAGE_SIZE, EngineConfig, check_path
from engine.errors import RequestError
from engine.lora_delta import LoRABackend
from engine.tokenizer import Tokenizer, load_tokenizer
from memory.manager import MemoryConfig


class _ModelsTokenizer:
    def __repr__(self) -> str:
        return "<the model's>"


MODELS_TOKENIZER = _ModelsTokenizer()  # the default of `tokenizer`: None means none at all
DEFAULT_MAX_SEQ_LEN = 4096


@dataclass(frozen=True)
class Settings:
    """Every keyword whose default depends on the model or the machine, decided."""

    dtype: torch.dtype
    max_seq_len: int
    tokenizer: Tokenizer | None
    lora_backend: LoRABackend
    memory: MemoryConfig

    @classmethod
    def of(
        cls, config: EngineConfig, checkpoint: Checkpoint, device: torch.device, tokenizer: Any
    ) -> "Settings":
        """Raises RequestError for a keyword that the model does not allow."""
        max_seq_len = _max_seq_len(config, checkpoint)
        return cls(
            dtype=_dtype(config, checkpoint, device),
            max_seq_len=max_seq_len,
            tokenizer=_tokenizer(tokenizer, checkpoint),
            lora_backend="torch" if config.lora_backend == "torch" else "sgemm",
            memory=MemoryConfig(
                max_batch_size=config.max_batch_size,
                max_seq_len=max_seq_len,
                max_loras=config.max_loras,
                max_lora_rank=config.max_lora_rank,
                prefill_chunk_tokens=config.prefill_chunk_tokens,
                page_size=PAGE_SIZE,
                num_graphs=len(config.ladder().sizes) * (2 if config.max_loras else 1),
                memory_fraction=config.memory_fraction,
                lora_memory_bytes=config.lora_memory_bytes,
                kv_cache_tokens=config.kv_cache_tokens,
            ),
        )


def _dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype is not None:
        return DTYPES[config.dtype]
    return checkpoint.architecture.dtype if device.type == "cuda" else torch.float32


def _max_seq_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    limit = checkpoint.architecture.max_position
    if config.max_seq_len is None:
        return min(limit, DEFAULT_MAX_SEQ_LEN)
    if config.max_seq_len > limit:
        raise RequestError(f"max_seq_len={config.max_seq_len}: the model goes to {limit} positions")
    return config.max_seq_len


def _tokenizer(tokenizer: Any, checkpoint: Checkpoint) -> Tokenizer | None:
    if tokenizer is MODELS_TOKENIZER:
        source = checkpoint.tokenizer_source
        return None if source is None else load_tokenizer(source)
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    return load_tokenizer(check_path("tokenizer", tokenizer))
