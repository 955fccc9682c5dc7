"""Where a step's intermediates live: allocated once at the largest size, viewed by every batch.

Decode and prefill run on one stream, never at once, so they share this memory.
"""

from dataclasses import dataclass

import torch

from memory.model_dims import ModelDims, qkv_sizes


@dataclass(frozen=True)
class WorkspaceSizes:
    """The largest of everything: `rows` tokens in a step, `logit_rows` rows with logits,
    `shrink_numel` float32 of split LoRA shrinks, `attention_numel` float32 of split attention
    outputs, `sampling_shape` of the sampler's partials."""

    rows: int
    logit_rows: int
    shrink_numel: int
    attention_numel: int
    attention_lse_numel: int
    sampling_shape: tuple[int, ...]


@dataclass(frozen=True)
class Workspace:
    """T rows in the model's dtype unless said; nothing here survives a step.

    `residual`, `hidden`, `delta` [T, H]; `qkv` [T, (Hq + 2 Hkv) D]; `attended` [T, Hq D];
    `gate_up` [T, 2 I]; `activated` [T, I]. Flat float32: `shrunk` (LoRA x·A partials),
    `attention_out` and `attention_lse` (split-KV partials). For the rows
    that need logits: `logits` [B, V] and `scratch` float32 [B, V], and the sampler's
    `sampling_partials` float32 [B, …].
    """

    residual: torch.Tensor
    hidden: torch.Tensor
    delta: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    shrunk: torch.Tensor
    attention_out: torch.Tensor
    attention_lse: torch.Tensor
    sampling_partials: torch.Tensor
    logits: torch.Tensor
    scratch: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    @classmethod
    def allocate(
        cls, dims: ModelDims, sizes: WorkspaceSizes, dtype: torch.dtype, device: torch.device
    ) -> "Workspace":
        def rows(width: int) -> torch.Tensor:
            return torch.empty(sizes.rows, width, dtype=dtype, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        q_size = qkv_sizes(dims)[0]
        return cls(
            residual=rows(dims.hidden_size),
            hidden=rows(dims.hidden_size),
            delta=rows(dims.hidden_size),
            qkv=rows(sum(qkv_sizes(dims))),
            attended=rows(q_size),
            gate_up=rows(2 * dims.intermediate_size),
            activated=rows(dims.intermediate_size),
            shrunk=floats(sizes.shrink_numel),
            attention_out=floats(sizes.attention_numel),
            attention_lse=floats(sizes.attention_lse_numel),
            sampling_partials=floats(*sizes.sampling_shape),
            logits=torch.empty(sizes.logit_rows, dims.vocab_size, dtype=dtype, device=device),
            scratch=floats(sizes.logit_rows, dims.vocab_size),
        )

    def view(self, rows: int, logit_rows: int) -> "Workspace":
        """The same memory for `rows` tokens, of which `logit_rows` need logits."""
        by_row = ("residual", "hidden", "delta", "qkv", "attended", "gate_up", "activated")
        views = {name: getattr(self, name)[:rows] for name in by_row}
        views["logits"] = self.logits[:logit_rows]
        views["scratch"] = self.scratch[:logit_rows]
        views["sampling_partials"] = self.sampling_partials[:logit_rows]
        return Workspace(**{**vars(self), **views})


def workspace_bytes(dims: ModelDims, sizes: WorkspaceSizes, dtype: torch.dtype) -> int:
    """What `Workspace.allocate` takes."""
    meta = Workspace.allocate(dims, sizes, dtype, torch.device("meta"))
    return sum(t.numel() * t.element_size() for t in meta.tensors().values())
