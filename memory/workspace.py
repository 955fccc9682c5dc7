"""Where a step's intermediates live: allocated once at the largest size, viewed by every batch.

Decode and prefill run on one stream, never at once, so they share this memory.
"""

from dataclasses import dataclass, replace

import torch

from memory.model_dims import ModelDims, qkv_sizes
from memory.moe_workspace import MoEMemory, MoEWorkspace


@dataclass(frozen=True)
class WorkspaceSizes:
    """The largest of everything: `rows` tokens in a step, `logit_rows` rows with logits,
    `shrink_numel` float32 of split LoRA shrinks and `shrink_arrivals` counters of theirs,
    `product_numel` of split products, `attention_numel` of split attention outputs,
    `attention_lse_numel` and `attention_arrivals` of their sums and counters,
    `sampling_shape` of the sampler's partials; `max_loras` slots."""

    rows: int
    max_loras: int
    logit_rows: int
    shrink_numel: int
    shrink_arrivals: int
    product_numel: int
    attention_numel: int
    attention_lse_numel: int
    attention_arrivals: int
    sampling_shape: tuple[int, ...]


@dataclass(frozen=True)
class Workspace:
    """T rows in the model's dtype unless said; nothing here survives a step, but that
    `shrink_arrivals` and `attention_arrivals`, int32, are zeros between launches.

    `residual`, `hidden`, `delta` [T, H]; `qkv` [T, (Hq + 2 Hkv) D]; `attended` [T, Hq D];
    `gate_up` [T, 2 I]; `activated` [T, I]. Flat float32: `shrunk` (LoRA x·A partials), `product`
    (partials of what is added to the residual), `attention_out` and `attention_lse` (split-KV
    partials). For the rows that need logits: `logits` [B, V] and `scratch` float32 [B, V], and
    the sampler's `sampling_partials` float32 [B, …]. `moe` of a mixture of experts comes out of
    `moe_memory`.
    """

    residual: torch.Tensor
    hidden: torch.Tensor
    delta: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    shrunk: torch.Tensor
    shrink_arrivals: torch.Tensor
    product: torch.Tensor
    attention_out: torch.Tensor
    attention_lse: torch.Tensor
    attention_arrivals: torch.Tensor
    sampling_partials: torch.Tensor
    logits: torch.Tensor
    scratch: torch.Tensor
    moe: MoEWorkspace | None
    moe_memory: MoEMemory | None

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        if self.moe is not None:
            named |= {f"moe.{name}": tensor for name, tensor in self.moe.tensors().items()}
        return named

    @classmethod
    def allocate(
        cls, dims: ModelDims, sizes: WorkspaceSizes, dtype: torch.dtype, device: torch.device
    ) -> "Workspace":
        def rows(width: int) -> torch.Tensor:
            return torch.empty(sizes.rows, width, dtype=dtype, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        q_size = qkv_sizes(dims)[0]
        has_dense = dims.moe is None or not all(dims.moe.sparse_layers)
        dense_width = dims.intermediate_size if has_dense else 0
        moe_memory = None
        if dims.moe is not None:
            moe_memory = MoEMemory(dims, sizes.rows, sizes.max_loras, dtype, device)
        return cls(
            residual=rows(dims.hidden_size),
            hidden=rows(dims.hidden_size),
            delta=rows(dims.hidden_size),
            qkv=rows(sum(qkv_sizes(dims))),
            attended=rows(q_size),
            gate_up=rows(2 * dense_width),
            activated=rows(dense_width),
            shrunk=floats(sizes.shrink_numel),
            shrink_arrivals=zeros(sizes.shrink_arrivals),
            product=floats(sizes.product_numel),
            attention_out=floats(sizes.attention_numel),
            attention_lse=floats(sizes.attention_lse_numel),
            attention_arrivals=zeros(sizes.attention_arrivals),
            sampling_partials=floats(*sizes.sampling_shape),
            logits=torch.empty(sizes.logit_rows, dims.vocab_size, dtype=dtype, device=device),
            scratch=floats(sizes.logit_rows, dims.vocab_size),
            moe=moe_memory.view(sizes.rows) if moe_memory else None,
            moe_memory=moe_memory,
        )

    @property
    def bytes(self) -> int:
        """Of the whole memory, whatever part of it this is a view of."""
        own = (t for t in vars(self).values() if isinstance(t, torch.Tensor))
        return sum(t.untyped_storage().nbytes() for t in own) + (
            self.moe_memory.bytes if self.moe_memory else 0
        )

    def view(self, rows: int, logit_rows: int) -> "Workspace":
        """The same memory for `rows` tokens, of which `logit_rows` need logits."""
        by_row = ("residual", "hidden", "delta", "qkv", "attended", "gate_up", "activated")
        views = {name: getattr(self, name)[:rows] for name in by_row}
        views["logits"] = self.logits[:logit_rows]
        views["scratch"] = self.scratch[:logit_rows]
        views["sampling_partials"] = self.sampling_partials[:logit_rows]
        moe = self.moe_memory.view(rows) if self.moe_memory else None
        return replace(self, moe=moe, **views)


def workspace_bytes(dims: ModelDims, sizes: WorkspaceSizes, dtype: torch.dtype) -> int:
    """What `Workspace.allocate` takes."""
    return Workspace.allocate(dims, sizes, dtype, torch.device("meta")).bytes
