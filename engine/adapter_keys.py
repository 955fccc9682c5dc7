"""Tensor names of a PEFT adapter file: which layer, target and factor a key stands for.

A name counts if it leads to one of the seven linear layers of a decoder layer through containers
of a language model only; names into anything else (vision towers, experts, embeddings) are refused.
"""

import re
from dataclasses import dataclass

from engine.errors import AdapterError
from memory.lora_targets import SERVED, Target

# Modules that compilers and parallel wrappers put around others without changing what they compute.
_WRAPPERS = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"),
)
_ATTENTION = (Target.Q_PROJ, Target.K_PROJ, Target.V_PROJ, Target.O_PROJ)
BLOCKS = {
    target: f"{'self_attn' if target in _ATTENTION else 'mlp'}.{target.name.lower()}"
    for target in SERVED
}
_TARGETS = {block: target for target, block in BLOCKS.items()}
_KEY = re.compile(
    r"(?P<containers>(?:(?:base_model|model|language_model)\.)*)"
    rf"layers\.(?P<layer>[0-9]{{1,9}})\.(?P<block>{'|'.join(map(re.escape, _TARGETS))})"
    r"\.lora_(?P<factor>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
)
_ACCEPTED = (
    "base_model.model.model.layers.N.self_attn.{q,k,v,o}_proj or ….mlp.{gate,up,down}_proj, "
    "with .lora_A.weight and .lora_B.weight"
)
_REASONS = (
    (r"lora_magnitude_vector", "DoRA is not served"),
    (r"lora_embedding_[AB]|embed_tokens", "LoRA on embeddings is not served"),
    (r"lm_head", "LoRA on the LM head is not served"),
    (r"experts?\.", "LoRA on experts is not served"),
    (r"\.(qkv_proj|gate_up_proj)\.", "fused projections are not served; split them by slice"),
    (r"\.bias$", "biases are not served"),
    (r"layers\.[0-9]{10}", "no model has so many layers"),
    (r"^(?!.*lora_)", "whole weights are not served"),
)


@dataclass(frozen=True)
class AdapterKey:
    """One factor of one module; `containers` and `adapter` are the same for a whole file."""

    layer: int
    target: Target
    factor: str  # "A" or "B"
    containers: str  # "base_model.model.model.", "model.", …
    adapter: str | None  # "default" where the file keeps the adapter's name

    @property
    def path(self) -> str:
        """The module's path in the file, as the model that was trained had it."""
        containers = self.containers.removeprefix("base_model.model.")
        return f"{containers}layers.{self.layer}.{BLOCKS[self.target]}"


def module_path(layer: int, target: Target) -> str:
    """A module's path in a model as transformers lays it out."""
    return f"model.layers.{layer}.{BLOCKS[target]}"


def parse_key(key: str) -> AdapterKey:
    """Read a tensor name; AdapterError says why one cannot be served."""
    plain = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    match = _KEY.fullmatch(plain)
    if match is None:
        found = (reason for expression, reason in _REASONS if re.search(expression, plain))
        reason = next(found, "it names no module served")
        raise AdapterError(f"key {key!r}: {reason}; accepted: {_ACCEPTED}")
    return AdapterKey(
        layer=int(match["layer"]),
        target=_TARGETS[match["block"]],
        factor=match["factor"],
        containers=match["containers"],
        adapter=match["adapter"],
    )
