"""`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ`: the delta of the rows of a step that have an adapter."""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.decoder_weights import Projection
from engine.side_branch import SideBranch
from kernels.linear import linear
from kernels.lora_gather import lora_gather
from kernels.lora_metadata import lora_metadata
from kernels.lora_segments import shrink_split_k
from kernels.sgemm import sgemm_a, sgemm_b
from memory.adapter_tables import AdapterTables
from memory.lora_batch_info import LoRABatchInfo
from memory.lora_targets import Target

LoRABackend = Literal["torch", "sgemm"]


@dataclass(frozen=True)
class LoRADelta:
    """One step's LoRA: which rows use which slot, and where the slots' weights lie.

    `shrunk` is flat float32 workspace for one x Aᵀ at a time, written on the branch `side` and
    read after the join. Backend "torch" is plain torch on a GPU; on the CPU every backend is the
    ops' torch twins.
    """

    backend: LoRABackend
    side: SideBranch
    info: LoRABatchInfo
    tables: AdapterTables
    adapter_enabled: torch.Tensor
    arena: torch.Tensor
    arena_address: int
    shrunk: torch.Tensor
    max_rank: int

    def derive_metadata(self) -> None:
        """Sort the step's rows by slot; once a step, before the first layer."""
        info = self.info
        lora_metadata(
            info.row_adapter,
            self.adapter_enabled,
            info.seg_indptr,
            info.weight_indices,
            info.permutation,
            info.num_segments,
            info.pair_row,
            info.pair_slot,
        )

    def project(
        self, layer: int, first: Target, x: torch.Tensor, projection: Projection, y: torch.Tensor
    ) -> None:
        """`y` [T, N] = x Wᵀ + bias of the layers stacked from `first`, and on top the deltas of
        each, in place. x Aᵀ needs nothing but `x` [T, in] and runs beside the base product."""
        stacked, sizes = slice(first, first + len(projection.slice_sizes)), projection.slice_sizes
        tables, info = self.tables.linear, self.info
        a_ptrs, b_ptrs = tables.a_ptrs[layer, stacked], tables.b_ptrs[layer, stacked]
        ranks, scalings = tables.lora_ranks[layer, stacked], tables.scalings[layer, stacked]
        if self.backend == "torch" and x.is_cuda:
            linear(x, projection.weight, projection.bias, y)
            lora_gather(
                x,
                self.arena,
                self.arena_address,
                a_ptrs,
                b_ptrs,
                ranks,
                scalings,
                info.row_adapter,
                self.adapter_enabled,
                self.max_rank,
                sizes,
                y,
            )
            return
        tokens, width = x.shape[0], len(sizes) * self.max_rank
        splits = shrink_split_k(tokens, x.shape[1]) if x.is_cuda else 1
        shrunk = self.shrunk[: splits * tokens * width].view(splits, tokens, width)
        segments = (info.seg_indptr, info.weight_indices, info.pair_row, info.num_segments)
        with self.side.forked():
            sgemm_a(x, self.arena, a_ptrs, ranks, *segments, self.max_rank, shrunk)
        linear(x, projection.weight, projection.bias, y)
        self.side.join()
        sgemm_b(shrunk, self.arena, b_ptrs, ranks, scalings, *segments, self.max_rank, sizes, y)


def project(
    x: torch.Tensor,
    projection: Projection,
    layer: int,
    first: Target,
    lora: LoRADelta | None,
    out: torch.Tensor,
) -> None:
    """`out` [T, N] = x Wᵀ + bias, with each row's own adapter where there are adapters."""
    if lora is None:
        linear(x, projection.weight, projection.bias, out)
    else:
        lora.project(layer, first, x, projection, out)
