"""Weights and architecture of a GGUF file, under the names and in the layout of transformers.

Tensors are dequantised to float32 a few rows at a time, straight from the mapped file. Knows no
tokenizer: transformers reads that from the same file.
"""

from pathlib import Path

import gguf
import numpy as np
import torch

from engine.errors import CheckpointError
from engine.gguf_metadata import GGUFMetadata
from engine.gguf_names import canonical_name
from engine.weight_source import Part, check_destination

ROPE_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32


class GGUFSource:
    """An open GGUF file. `metadata` gives the config; `architecture` is made from it elsewhere."""

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader has no error of its own: any may come of bad bytes
            raise CheckpointError(
                f"{path}: not a whole GGUF file ({error}); accepted: a complete file"
            ) from error
        self.metadata = GGUFMetadata(reader, path)
        self._tensors: dict[str, gguf.ReaderTensor] = {}
        self.rope_factors: np.ndarray | None = None
        for tensor in reader.tensors:
            if tensor.name == ROPE_FACTORS:
                self.rope_factors = _dequantise(tensor.data, tensor, path)
                continue
            self._tensors[canonical_name(tensor.name)] = tensor

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def origin(self, name: str) -> str:
        tensor = self._tensors.get(name)
        return f"{self.path}: {tensor.name if tensor is not None else name}"

    def dtype(self) -> torch.dtype:
        """What the embedding is stored in; bfloat16 if it is quantised."""
        stored = self._tensors.get("model.embed_tokens.weight")
        name = stored.tensor_type.name if stored is not None else ""
        return {"F32": torch.float32, "F16": torch.float16}.get(name, torch.bfloat16)

    def copy_into(self, name: str, dst: torch.Tensor, part: Part = ()) -> None:
        check_destination(self, name, dst, part)
        tensor = self._tensors[name]
        rows = self._row_order(name)[part[0] if part else slice(None)]
        columns = part[1:]
        step = max(1, _CHUNK_ELEMENTS * len(tensor.data) // int(tensor.n_elements))
        for start in range(0, len(rows), step):
            # Quantisation blocks lie within a row, so rows may be reordered before decoding them.
            raw = tensor.data[rows[start : start + step]]
            values = torch.from_numpy(_dequantise(raw, tensor, self.path))
            dst[start : start + step].copy_(values[:, *columns])

    def close(self) -> None:
        self._tensors.clear()

    def _row_order(self, name: str) -> np.ndarray:
        """Stored row of each row: llama files interleave the two halves of every q and k head."""
        count = self.shape(name)[0]
        heads = self.metadata.permuted_heads(name)
        if not heads:
            return np.arange(count)
        return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _dequantise(data: np.ndarray, tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
    """float32 values of raw rows, in memory of their own."""
    try:
        values = gguf.dequantize(data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package "
            f"cannot decode; accepted: F32, F16, BF16, Q4_0 to Q8_0, the K quants and the like"
        ) from error
    return np.array(values, dtype=np.float32)
