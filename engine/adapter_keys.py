"""Tensor names of an adapter file: which layer, targets, expert and factor a key stands for.

A name counts if it leads to a linear layer of a decoder layer (an expert's, the router's and the
shared expert's among them) through containers of a language model only; names into anything else
(vision towers, embeddings) are refused. Knows no shapes and no config.
"""

import re
from dataclasses import dataclass
from enum import Enum

from engine.errors import AdapterError
from memory.lora_targets import ATTENTION_TARGETS, MLP_TARGETS, Target

# Modules that compilers and parallel wrappers put around others without changing what they compute.
_WRAPPERS = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"),
)
_BLOCKS = {
    **{f"self_attn.{target.module_name}": target for target in ATTENTION_TARGETS},
    **{f"mlp.{target.module_name}": target for target in MLP_TARGETS},
    "mlp.gate": Target.ROUTER,
    "block_sparse_moe.gate": Target.ROUTER,
    "mlp.shared_expert.gate_proj": Target.SHARED_GATE_PROJ,
    "mlp.shared_expert.up_proj": Target.SHARED_UP_PROJ,
    "mlp.shared_expert.down_proj": Target.SHARED_DOWN_PROJ,
    "mlp.shared_expert_gate": Target.SHARED_EXPERT_GATE,
}
_GATE_UP = (Target.EXPERT_GATE_PROJ, Target.EXPERT_UP_PROJ)
# Mixtral's w1, w2 and w3 are the others' gate, down and up.
_PROJECTIONS = {
    "gate_proj": (Target.EXPERT_GATE_PROJ,),
    "up_proj": (Target.EXPERT_UP_PROJ,),
    "down_proj": (Target.EXPERT_DOWN_PROJ,),
    "w1": (Target.EXPERT_GATE_PROJ,),
    "w3": (Target.EXPERT_UP_PROJ,),
    "w2": (Target.EXPERT_DOWN_PROJ,),
    "gate_up_proj": _GATE_UP,
}
_KEY = re.compile(
    r"(?P<containers>(?:(?:base_model|model|language_model)\.)*)layers\.(?P<layer>0|[1-9][0-9]{0,8})\."
    rf"(?:(?P<block>{'|'.join(map(re.escape, _BLOCKS))})"
    r"|(?P<experts>(?:mlp|block_sparse_moe)\.experts)"
    rf"(?:(?:\.(?P<expert>0|[1-9][0-9]{{0,8}}))?\.(?P<projection>{'|'.join(_PROJECTIONS)})"
    r"|(?P<inner>\.base_layer)?))"
    r"\.lora_(?P<factor>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
)
_ACCEPTED = (
    "base_model.model.model.layers.N.self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj, mlp.gate, "
    "mlp.experts.N.{gate,up,down}_proj, mlp.experts, mlp.shared_expert.{gate,up,down}_proj or "
    "mlp.shared_expert_gate, with .lora_A.weight and .lora_B.weight"
)
_REASONS = (
    (r"lora_magnitude_vector", "DoRA is not served"),
    (r"lora_embedding_[AB]|embed_tokens", "LoRA on embeddings is not served"),
    (r"^(?!.*lora_).*lm_head", "a whole LM head (save_embedding_layers) is not served"),
    (r"lm_head", "LoRA on the LM head is not served"),
    (r"\.(qkv_proj|gate_up_proj)\.", "fused projections are not served; split them by slice"),
    (r"\.bias$", "biases are not served"),
    (r"layers\.[0-9]{10}", "no model has so many layers"),
    (r"^(?!.*lora_)", "whole weights (modules_to_save) are not served"),
)


class Form(Enum):
    """How many matrices a factor's tensor holds."""

    LINEAR = "one"  # A [r, in], B [out, r]
    STACKED = "one for each expert, or one for all"  # A [E or 1, r, in], B [E or 1, out, r]
    FUSED = "one for each expert, as PEFT's target_parameters"  # see engine/fused_experts.py


@dataclass(frozen=True)
class AdapterKey:
    """One factor of a module; `containers` and `adapter` are the same for a whole file."""

    layer: int
    block: str  # in the layer: "mlp.experts.3.w1"; "mlp.experts" for the fused form
    form: Form
    targets: tuple[Target, ...]  # whose slices B's rows are; empty where only shapes can tell
    expert: int | None  # None too where the tensors hold all experts
    inner: bool  # under "base_layer": the first of two parameters that PEFT wrapped
    factor: str  # "A" or "B"
    containers: str  # "base_model.model.model.", "model.", …
    adapter: str | None  # "default" where the file keeps the adapter's name

    @property
    def module(self) -> tuple[object, ...]:
        """The same for both factors of a module and for no other, whatever names it goes by."""
        return self.layer, self.form.name, self.targets, self.expert, self.inner

    @property
    def paths(self) -> tuple[str, str]:
        """The module's path in the model that was trained, and as transformers nests models.

        A file may nest its modules otherwise than the base does.
        """
        end = f"layers.{self.layer}.{self.block}"
        return self.containers.removeprefix("base_model.model.") + end, f"model.{end}"

    @property
    def aliases(self) -> tuple[str, ...]:
        """All paths by which a config may mean a stacked projection."""
        experts = self.block.rpartition(".")[0]
        names = [name for name, targets in _PROJECTIONS.items() if {*targets} & {*self.targets}]
        ends = [experts, *(f"{experts}.{name}" for name in names)]
        return tuple(path.removesuffix(self.block) + end for path in self.paths for end in ends)


def parse_key(key: str) -> AdapterKey:
    """Read a tensor name; AdapterError says why one cannot be served."""
    plain = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    match = _KEY.fullmatch(plain)
    if match is None or (match["expert"] and match["projection"] == "gate_up_proj"):
        found = (reason for expression, reason in _REASONS if re.search(expression, plain))
        reason = next(found, "it names no module served")
        raise AdapterError(f"key {key!r}: {reason}; accepted: {_ACCEPTED}")
    block, form = match["block"], Form.LINEAR
    if block:
        targets: tuple[Target, ...] = (_BLOCKS[block],)
    else:
        parts = (match["experts"], match["expert"], match["projection"])
        block = ".".join(part for part in parts if part)
        targets = _PROJECTIONS.get(match["projection"], ())
        if match["expert"] is None:
            form = Form.STACKED if match["projection"] else Form.FUSED
    return AdapterKey(
        layer=int(match["layer"]),
        block=block,
        form=form,
        targets=targets,
        expert=None if match["expert"] is None else int(match["expert"]),
        inner=match["inner"] is not None,
        factor=match["factor"],
        containers=match["containers"],
        adapter=match["adapter"],
    )
