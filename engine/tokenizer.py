"""Text to token ids and back, by the tokenizer that transformers loads.

Knows nothing about models or requests. transformers is imported only when a tokenizer is loaded.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.detokenizer import IncrementalDetokenizer
from engine.errors import CheckpointError

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerSource", "load_tokenizer"]


@dataclass(frozen=True)
class TokenizerSource:
    """A directory or hub id, or the directory of a GGUF file and the file's name."""

    location: str
    gguf_file: str | None = None

    @classmethod
    def at(cls, path: str | Path) -> "TokenizerSource":
        """The source that a user means by a directory, a .gguf file or a hub id."""
        path = Path(path) if os.path.exists(path) else path  # no error where a name is too long
        if isinstance(path, Path) and path.suffix == ".gguf":
            return cls(str(path.parent), gguf_file=path.name)
        return cls(str(path))


class Tokenizer:
    """A loaded tokenizer. `hf` is transformers' own object, for what is not offered here."""

    def __init__(self, hf: Any):
        self.hf = hf

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens the tokenizer adds (such as BOS)."""
        return list(self.hf(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole output, without special tokens."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=True))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for a chat, ending where the assistant's turn begins."""
        prompt = self.hf.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return str(prompt)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one output."""
        return IncrementalDetokenizer(self.decode, self.has_text)

    def has_text(self, token_id: int) -> bool:
        """False for special tokens and for ids beyond the vocabulary: both decode to nothing."""
        return token_id in self._text_ids

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.hf.eos_token_id is None else (self.hf.eos_token_id,)

    @cached_property
    def _text_ids(self) -> frozenset[int]:
        special = {i for i, token in self.hf.added_tokens_decoder.items() if token.special}
        return frozenset(self.hf.get_vocab().values()) - special


def load_tokenizer(source: TokenizerSource | str | Path) -> Tokenizer:
    """CheckpointError if there is none that transformers can load without running its code."""
    if not isinstance(source, TokenizerSource):
        source = TokenizerSource.at(source)
    from transformers import AutoTokenizer

    extra = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        hf = AutoTokenizer.from_pretrained(
            source.location,
            trust_remote_code=False,
            local_files_only=Path(source.location).is_dir(),
            **extra,
        )
    except Exception as error:  # transformers raises whatever its parsers do
        where = str(Path(source.location, source.gguf_file or ""))
        raise CheckpointError(
            f"{where}: no tokenizer that transformers can load ({error}); accepted: a directory "
            f"with tokenizer.json, a GGUF file with its vocabulary, or a hub id"
        ) from error
    return Tokenizer(hf)
