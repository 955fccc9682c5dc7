"""`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ`: the delta of the rows of a step that have an adapter.

While decoding, nothing of it is written to memory but x Aᵀ: that is computed by the base product's
own programs, in its launch or beside it, and the kernel that reads the product next adds the rest
(`project` hands it the tables). In steps of more than MAX_FOLDED_ROWS rows, and where an op that
cannot add it comes next, the delta is added to the product in place.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.decoder_weights import Projection
from engine.side_branch import SideBranch
from kernels.linear import linear
from kernels.linear_arrangement import parts_in_product, splits_in_launch
from kernels.linear_config import MAX_ROWS, card, linear_config
from kernels.linear_shrink import linear_shrink
from kernels.linear_shrink_parts import linear_shrink_parts
from kernels.lora_arguments import NO_LORA
from kernels.lora_gather import lora_gather
from kernels.lora_metadata import lora_metadata
from kernels.lora_segments import shrink_split_k
from kernels.partials import splits_of
from kernels.sgemm import sgemm_a, sgemm_b
from memory.adapter_tables import AdapterTables, LinearTables
from memory.lora_batch_info import LoRABatchInfo
from memory.lora_targets import Target

LoRABackend = Literal["torch", "sgemm"]

MAX_FOLDED_ROWS = 128  # above, deltas are added in place

_Tensor = torch.Tensor | None
DeltaArgs = tuple[
    _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, int
]
"""What an op still adds to a product that it reads: see `kernels.lora_arguments`."""


@dataclass(frozen=True)
class LoRADelta:
    """One step's LoRA: which rows use which slot, and where the slots' weights lie.

    `shrunk` is flat float32 workspace for one x Aᵀ at a time: what reads it comes before the next
    one. `arrivals` int32 are zeros between launches. Backend "torch" is plain torch on a GPU; on
    the CPU every backend is the ops' torch twins.
    """

    backend: LoRABackend
    side: SideBranch
    info: LoRABatchInfo
    tables: AdapterTables
    adapter_enabled: torch.Tensor
    arena: torch.Tensor
    arena_address: int
    shrunk: torch.Tensor
    arrivals: torch.Tensor
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
            info.row_slot,
            info.row_order,
        )

    def project(
        self,
        layer: int,
        first: Target,
        x: torch.Tensor,
        projection: Projection,
        out: torch.Tensor,
        fold: bool,
        most_parts: int,
    ) -> DeltaArgs:
        """`out` = x Wᵀ + bias of the layers stacked from `first`, for `x` [T, in], and each row's
        deltas: in place, or where `fold` allows and the step is small, returned to be added by
        the op that reads `out`, which takes x Aᵀ in up to `most_parts` parts. `out` is [T, N] or
        float32 partials [S, T, N]."""
        stacked, sizes = slice(first, first + len(projection.slice_sizes)), projection.slice_sizes
        tables = self.tables.linear.at(layer, stacked)
        if self.backend == "torch" and x.is_cuda:
            linear(x, projection.weight, projection.bias, out)
            self._gather(x, tables, sizes, out)
            return NO_LORA
        info, folds = self.info, fold and x.shape[0] <= MAX_FOLDED_ROWS
        shrunk = self._multiply_and_shrink(x, projection, tables, out, most_parts if folds else 0)
        if folds:
            return (
                shrunk,
                self.arena,
                tables.b_ptrs,
                tables.lora_ranks,
                tables.scalings,
                info.row_slot,
                info.row_order,
                info.seg_indptr,
                info.weight_indices,
                info.num_segments,
                self.max_rank,
            )
        sgemm_b(
            shrunk,
            self.arena,
            tables.b_ptrs,
            tables.lora_ranks,
            tables.scalings,
            info.seg_indptr,
            info.weight_indices,
            info.pair_row,
            info.num_segments,
            self.max_rank,
            sizes,
            _summand(out),
        )
        return NO_LORA

    def _multiply_and_shrink(
        self,
        x: torch.Tensor,
        projection: Projection,
        tables: LinearTables,
        out: torch.Tensor,
        most_parts: int,
    ) -> torch.Tensor:
        """`out` = x Wᵀ + bias, and x Aᵀ [T, stack · max_rank], which needs nothing but `x`; or
        [T, P, stack · max_rank] of P parts. By the programs of the product, where the reader takes
        as many parts as those make, or in its launch, where the product is our own and has room;
        else beside the product, which is what goes on the branch: so it comes first to the
        multiprocessors, and x Aᵀ to what room it leaves."""
        tokens, width = x.shape[0], len(projection.slice_sizes) * self.max_rank
        info, weight, bias = self.info, projection.weight, projection.bias
        product = (x, weight, bias, out)
        adapters = (self.arena, tables.a_ptrs, tables.lora_ranks)
        segments = (info.seg_indptr, info.weight_indices, info.pair_row, info.num_segments)
        parts = self._parts_in_product(x, weight, tables, out) if most_parts else 0
        if 0 < parts <= most_parts:
            shrunk = self.shrunk[: tokens * parts * width].view(tokens, parts, width)
            tail = (self.max_rank, shrunk)
            linear_shrink_parts(*product, *adapters, *segments, info.row_slot, *tail)
            return shrunk
        in_launch = self._splits_in_launch(x, weight, tables, out)
        splits = in_launch or shrink_split_k(tokens, x.shape[1])
        shrunk = self.shrunk[: splits * tokens * width].view(splits, tokens, width)
        result = (self.max_rank, shrunk, self.arrivals)
        if in_launch:
            linear_shrink(*product, *adapters, *segments, info.row_slot, *result)
            return shrunk[0]
        with self.side.forked():
            linear(*product)
        sgemm_a(x, *adapters, *segments, *result)
        self.side.join()
        return shrunk[0]

    def _parts_in_product(
        self, x: torch.Tensor, weight: torch.Tensor, tables: LinearTables, out: torch.Tensor
    ) -> int:
        """Of an x Aᵀ by the product's own programs; 0 where it has others."""
        if not x.is_cuda or self.arena.dtype != x.dtype:
            return 0
        tokens, (out_features, in_features) = x.shape[0], weight.shape
        config = linear_config(tokens, out_features, in_features, x.dtype, x.device)
        product = (config, out_features, in_features, splits_of(out))
        stack, max_loras = tables.a_ptrs.shape
        return parts_in_product(*product, stack, max_loras, self.max_rank, card(x.device))

    def _splits_in_launch(
        self, x: torch.Tensor, weight: torch.Tensor, tables: LinearTables, out: torch.Tensor
    ) -> int:
        """Of an x Aᵀ in the launch of its product; 0 where it has a launch of its own."""
        if not x.is_cuda:
            return 1
        tokens, (out_features, in_features) = x.shape[0], weight.shape
        if tokens > MAX_ROWS and self.arena.dtype != x.dtype:
            return 0
        shape = (tokens, out_features, in_features)
        config = linear_config(*shape, x.dtype, x.device)
        stack, max_loras = tables.a_ptrs.shape
        slots = (stack, max_loras, self.max_rank)
        return splits_in_launch(config, *shape, splits_of(out), *slots, card(x.device))

    def _gather(
        self, x: torch.Tensor, tables: LinearTables, sizes: list[int], out: torch.Tensor
    ) -> None:
        lora_gather(
            x,
            self.arena,
            self.arena_address,
            tables.a_ptrs,
            tables.b_ptrs,
            tables.lora_ranks,
            tables.scalings,
            self.info.row_adapter,
            self.adapter_enabled,
            self.max_rank,
            sizes,
            _summand(out),
        )


def _summand(out: torch.Tensor) -> torch.Tensor:
    """[T, N] of a product, to which a delta can be added: of partials the first."""
    return out[0] if out.dim() == 3 else out


def project(
    x: torch.Tensor,
    projection: Projection,
    layer: int,
    first: Target,
    lora: LoRADelta | None,
    out: torch.Tensor,
    fold: bool = False,
    most_parts: int = 0,
) -> DeltaArgs:
    """`out` [T, N] = x Wᵀ + bias, with each row's own adapter where there are adapters; of the
    deltas what is still to be added, which is nothing unless `fold`; x Aᵀ of it in no more parts
    than the next op takes."""
    if lora is None:
        linear(x, projection.weight, projection.bias, out)
        return NO_LORA
    return lora.project(layer, first, x, projection, out, fold, most_parts)
