"""Which rows of a step use which adapter slot: derived on the device once a step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoRABatchInfo:
    """(row, slot, weight) pairs sorted by slot, and the segments they form; int32 unless said.

    T rows, S = min(T, max_loras) segments at most. `row_adapter` [T]: slot of each row, -1 none.
    The kernel `lora_metadata` fills the rest: segment s holds slot `weight_indices[s]` and the
    pairs `seg_indptr[s]:seg_indptr[s+1]`; `pair_row`, `pair_slot` [T] are in sorted order, -1
    where unused; `permutation` [T] maps a sorted pair to its unsorted index. `row_slot` [T]: the
    row's slot if that is enabled, else -1; `row_order` [T]: all rows, by slot, those without one
    last. `pair_weight` float32 [T] is one: a row has one adapter at most.
    """

    row_adapter: torch.Tensor
    seg_indptr: torch.Tensor
    weight_indices: torch.Tensor
    num_segments: torch.Tensor
    permutation: torch.Tensor
    pair_row: torch.Tensor
    pair_slot: torch.Tensor
    row_slot: torch.Tensor
    row_order: torch.Tensor
    pair_weight: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    @classmethod
    def allocate(cls, max_rows: int, max_loras: int, device: torch.device) -> "LoRABatchInfo":
        segments = min(max_rows, max_loras)

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return cls(
            row_adapter=empty(max_rows),
            seg_indptr=empty(segments + 1).zero_(),
            weight_indices=empty(segments),
            num_segments=empty(1).zero_(),
            permutation=empty(max_rows),
            pair_row=empty(max_rows),
            pair_slot=empty(max_rows),
            row_slot=empty(max_rows),
            row_order=empty(max_rows),
            pair_weight=torch.ones(max_rows, dtype=torch.float32, device=device),
        )

    def view(self, rows: int) -> "LoRABatchInfo":
        """The same memory for a smaller batch."""
        segments = min(rows, self.weight_indices.shape[0])
        return LoRABatchInfo(
            row_adapter=self.row_adapter[:rows],
            seg_indptr=self.seg_indptr[: segments + 1],
            weight_indices=self.weight_indices[:segments],
            num_segments=self.num_segments,
            permutation=self.permutation[:rows],
            pair_row=self.pair_row[:rows],
            pair_slot=self.pair_slot[:rows],
            row_slot=self.row_slot[:rows],
            row_order=self.row_order[:rows],
            pair_weight=self.pair_weight[:rows],
        )
