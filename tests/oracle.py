"""The reference: the Hugging Face model in float32 with adapters merged by hand, teacher-forced.

Never another run of the engine.
"""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.outputs import RequestOutput


def merge_adapter(model: torch.nn.Module, path: Path) -> torch.nn.Module:
    """A copy of `model` with W + scaling · B A for every module of a plain PEFT directory."""
    merged = copy.deepcopy(model)
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for key, a in tensors.items():
            if "lora_A" not in key:
                continue
            b = tensors[key.replace("lora_A", "lora_B")].double()
            module = key.removeprefix("base_model.model.").split(".lora_A")[0]
            alpha = config.get("lora_alpha", 8)
            for pattern, value in (config.get("alpha_pattern") or {}).items():
                alpha = value if module.endswith(pattern) else alpha
            rank = a.shape[0]
            scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            weight = weight_of(parameters, module)
            delta = (scaling * (b @ a.double())).to(weight.device)
            weight.copy_((weight.double() + delta).float())
    return merged


def weight_of(parameters: dict[str, torch.nn.Parameter], module: str) -> torch.Tensor:
    """The weight [out, in] of a module as a file names it: a parameter, or a view of what
    transformers holds in one tensor for all experts of a layer."""
    module = module.replace(".block_sparse_moe.", ".mlp.")
    if ".experts." not in module:
        return parameters[f"{module}.weight"]
    path, expert, name = module.rsplit(".", 2)
    name = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(name, name)
    if name == "down_proj":
        return parameters[f"{path}.down_proj"][int(expert)]
    gate, up = parameters[f"{path}.gate_up_proj"][int(expert)].chunk(2)
    return gate if name == "gate_proj" else up


class Oracle:
    """Logprobs of the base model and of each adapter, on the tokens that it is given."""

    def __init__(self, model: torch.nn.Module, adapters: dict[str, Path]) -> None:
        self.models = {None: model}
        self.models |= {name: merge_adapter(model, path) for name, path in adapters.items()}

    @torch.no_grad()
    def logprobs(self, adapter: str | None, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(token_ids), V]: row i is the distribution of the token after the i-th."""
        model = self.models[adapter]
        ids = torch.tensor([list(token_ids)], device=model.device)
        return model(ids).logits[0].float().log_softmax(-1).cpu()

    def errors(self, output: RequestOutput, adapter: str | None = ...) -> list[float]:
        """|Δlogprob| at every generated position of every completion, over all tokens that the
        engine reported there, against `adapter` (that of the request by default)."""
        adapter = output.adapter if adapter is ... else adapter
        errors = []
        for completion in output.outputs:
            ids = output.prompt_token_ids + completion.token_ids
            reference = self.logprobs(adapter, ids[:-1])[len(output.prompt_token_ids) - 1 :]
            assert completion.logprobs is not None, "ask for logprobs"
            for row, reported in zip(reference, completion.logprobs, strict=True):
                errors.append(max(abs(row[t].item() - value) for t, value in reported.items()))
        return errors

    def check(self, output: RequestOutput, tolerance: float = 1e-4) -> None:
        """REF and ID: within `tolerance` of the request's own reference at every position, and
        of no other, by a wide margin, at decode positions."""
        own = self.errors(output)
        assert max(own) <= tolerance, (output.adapter, own)
        for adapter in self.models:
            if adapter != output.adapter:
                others = self.errors(output, adapter)
                assert max(others) > 100 * tolerance, (output.adapter, adapter, others)
