"""A GGUF file's metadata, turned into the config.json it was converted from.

Knows no tensors. Keys under the architecture's prefix are all accounted for: one that may change
the mathematics and is not understood is refused.
"""

import re
from pathlib import Path
from typing import Any

import gguf

from engine.config_reader import ConfigReader
from engine.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DENSE = "without experts: a mixture of experts is served from safetensors files"
_NEUTRAL = ("rope.scaling.finetuned", "attention.causal", "tensor_data_layout")
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")


class GGUFMetadata:
    """Reads `reader`'s fields; CheckpointError names the file and the GGUF key at fault."""

    def __init__(self, reader: gguf.GGUFReader, path: Path):
        if reader.byte_order != "I":
            raise CheckpointError(f"{path}: of the other byte order; accepted: this machine's")
        self._fields = reader.fields
        self._general = ConfigReader(
            {key: self._field(key) for key in self._fields if not _is_long(key)}, str(path)
        )
        if (self._general.value("split.count") or 1) > 1:
            self._general.refuse("split.count", "1: a GGUF file in one piece")
        self.architecture = self._general.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            self._general.refuse("general.architecture", f"{', '.join(ARCHITECTURES)}, {_DENSE}")
        prefix = f"{self.architecture}."
        self._model = ConfigReader(
            {
                key.removeprefix(prefix): self._field(key)
                for key in self._fields
                if key.startswith(prefix)
            },
            f"{path}: {self.architecture}",
        )
        if self._model.value("expert_count"):
            self._model.refuse("expert_count", f"0, {_DENSE}")
        self._heads = self._model.integer("attention.head_count")
        self._kv_heads = self._model.integer("attention.head_count_kv", self._heads)

    def permuted_heads(self, name: str) -> int:
        """How many heads' rows of the parameter `name` are interleaved; 0 if none are."""
        match = _PERMUTED.fullmatch(name) if self.architecture == "llama" else None
        return 0 if match is None else self._heads if match[1] == "q" else self._kv_heads

    def eos_token_ids(self) -> tuple[int, ...]:
        """End of sequence, of turn and of message: all end a generation."""
        keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
        ids = (self._general.optional_integer(key, minimum=0) for key in keys)
        return tuple(sorted({item for item in ids if item is not None}))

    def config(self, names: frozenset[str], vocab_size: int) -> dict[str, Any]:
        """The equivalent config.json. `names`: canonical names of the tensors the file has."""
        model = self._model
        head_dim = model.optional_integer("attention.key_length")
        hidden_size = model.integer("embedding_length")
        if head_dim is None:
            head_dim = model.optional_integer("rope.dimension_count") or hidden_size // self._heads
        for key in ("rope.dimension_count", "attention.value_length"):
            if model.integer(key, head_dim) != head_dim:
                model.refuse(key, f"{head_dim}, the size of a head")
        if model.value("rope.scaling.type", "none") != "none":
            model.refuse("rope.scaling.type", "none (or rope_freqs.weight as in Llama 3.1)")
        if model.value("rope.scale_linear", 1.0) != 1.0:
            model.refuse("rope.scale_linear", "1")
        result = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": model.integer("vocab_size", vocab_size),
            "hidden_size": hidden_size,
            "num_hidden_layers": model.integer("block_count"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": head_dim,
            "intermediate_size": model.integer("feed_forward_length"),
            "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": model.integer("context_length"),
            "rope_theta": model.number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "lm_head.weight" not in names,
            "bos_token_id": self._general.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(self.eos_token_ids()),
        }
        if self.architecture != "qwen2":
            result["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
        if self.architecture == "llama":
            result["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in names
        model.finish(_NEUTRAL)
        return result

    def _field(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"metadata {key}: unreadable ({error})") from error


def _is_long(key: str) -> bool:
    """The vocabulary's tables: large, and the tokenizer's alone."""
    return key in {
        f"tokenizer.ggml.{table}" for table in ("tokens", "scores", "token_type", "merges")
    }
