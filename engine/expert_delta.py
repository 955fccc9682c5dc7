"""Adapters on the experts and the router of one layer, for the rows of a step."""

from dataclasses import dataclass

import torch

from engine.lora_delta import LoRADelta
from kernels.activation import gated_activation
from kernels.lora_arguments import NO_LORA
from kernels.moe_align import moe_lora_align_block_size
from kernels.moe_combine import moe_combine
from kernels.moe_gemm import moe_gemm
from kernels.moe_gemm_shrink import moe_gemm_shrink, shares_launch
from kernels.moe_lora_down import moe_lora_down
from kernels.moe_lora_expand_grouped import moe_lora_expand_grouped
from kernels.moe_lora_gate_up import moe_lora_gate_up
from kernels.moe_lora_shrink import moe_lora_shrink, moe_shrink_split_k
from kernels.moe_lora_shrink_grouped import moe_lora_shrink_grouped
from memory.adapter_tables import ExpertTables, LinearTables
from memory.lora_targets import Target
from memory.moe_workspace import MoEWorkspace

MAX_PAIRWISE = 1024  # pairs: above, those of one (slot, expert) are taken together

_Table = torch.Tensor | None
RouterTables = tuple[_Table, _Table, _Table, _Table, _Table, _Table, _Table]
NO_ROUTER_TABLES: RouterTables = (None, None, None, None, None, None, None)
Sort = tuple[_Table, _Table, _Table]
"""The pairs sorted by expert, as `moe_gemm` takes them, or nothing."""

GATE_UP, DOWN = slice(0, 2), slice(2, 3)  # of the experts' tables


@dataclass(frozen=True)
class ExpertDelta:
    """Layer `index` of one step: `moe` holds its pairs, already routed.

    Up to MAX_PAIRWISE pairs each reads its own adapter's B, and the deltas are added inside the
    activation and inside the weighted sum. With more, pairs are sorted by (slot, expert) so that
    weights are read once, and each delta is added in place before those two. x Aᵀ is computed in
    the launch of the experts' product, pair by pair while they are fewest and by its blocks of
    pairs above that, where `shares_launch` has a way, and beside the product elsewhere.
    """

    lora: LoRADelta
    index: int
    moe: MoEWorkspace
    top_k: int

    @property
    def _experts(self) -> ExpertTables:
        experts = self.lora.tables.experts
        assert experts is not None
        return experts

    @property
    def _is_grouped(self) -> bool:
        return self.moe.topk_ids.numel() > MAX_PAIRWISE

    def router_tables(self) -> RouterTables:
        """What `moe_route` takes: each row's slot, the mask, the arena and the router's tables."""
        router = self.lora.tables.linear.at(self.index, int(Target.ROUTER))
        return (
            self.lora.info.row_adapter,
            self.lora.adapter_enabled,
            self.lora.arena,
            router.a_ptrs,
            router.b_ptrs,
            router.lora_ranks,
            router.scalings,
        )

    def begin_gate_up(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """What `multiply_gate_up` leaves to do beside it, for `hidden` [T, H] and `weight`
        [E, 2 I, H]. The layer's other adapters must not be at work between the two."""
        if self._shares(weight):
            return
        with self.lora.side.forked():
            if self._is_grouped:
                self._align()
            self._shrink(GATE_UP, hidden)

    def multiply_gate_up(self, hidden: torch.Tensor, weight: torch.Tensor, sort: Sort) -> None:
        """`moe.gate_up` [P, 2 I] = x Wᵀ of every pair's expert, and x Aᵀ of gate and up."""
        self._multiply(GATE_UP, hidden, weight, sort, self.moe.gate_up)

    def add_gate_up(self, kind: str) -> None:
        """`moe.activated` [P, I] = f(gate + Δgate) · (up + Δup), from `moe.gate_up`."""
        moe, tables = self.moe, self._tables(GATE_UP)
        shrunk = self._shrunk(GATE_UP)
        outer_ranks = self._experts.outer_ranks[self.index, GATE_UP]
        if self._is_grouped:
            self._expand_grouped(shrunk, tables, outer_ranks, moe.gate_up)
            gated_activation(moe.gate_up, *NO_LORA, kind, moe.activated)
            return
        moe_lora_gate_up(
            moe.gate_up,
            shrunk[0],
            self.lora.arena,
            tables.b_ptrs,
            tables.lora_ranks,
            tables.scalings,
            outer_ranks,
            self.lora.info.row_adapter,
            self.lora.adapter_enabled,
            moe.topk_ids,
            self.lora.max_rank,
            kind,
            moe.activated,
        )

    def multiply_down(self, weight: torch.Tensor, sort: Sort) -> None:
        """`moe.down` [P, H] likewise, for `moe.activated` [P, I] and `weight` [E, H, I]."""
        if not self._shares(weight):
            with self.lora.side.forked():
                self._shrink(DOWN, self.moe.activated)
        self._multiply(DOWN, self.moe.activated, weight, sort, self.moe.down)

    def add_down_and_combine(
        self, shared: torch.Tensor | None, shared_gate: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """`out` [T, H] = Σ weight · (down + Δdown) over each row's experts, plus the expert that
        every token passes; from `moe.down` [P, H]."""
        moe, experts = self.moe, self._experts
        tables, shrunk = self._tables(DOWN), self._shrunk(DOWN)
        if self._is_grouped:
            self._expand_grouped(shrunk, tables, None, moe.down)
            moe_combine(moe.down, moe.topk_ids, moe.topk_weights, shared, shared_gate, out)
            return
        moe_lora_down(
            moe.down,
            shrunk[0],
            self.lora.arena,
            tables.b_ptrs,
            tables.lora_ranks,
            tables.scalings,
            experts.outer_ptrs[self.index, DOWN],
            experts.outer_ranks[self.index, DOWN],
            self.lora.info.row_adapter,
            self.lora.adapter_enabled,
            moe.topk_ids,
            moe.topk_weights,
            shared,
            shared_gate,
            self.lora.max_rank,
            out,
        )

    def _tables(self, stacked: slice) -> LinearTables:
        """The layer's tables of the slices that read the same input."""
        return self._experts.linear.at(self.index, stacked)

    def _shrunk(self, stacked: slice, splits: int = 1) -> torch.Tensor:
        """float32 [splits, P, stack · max_rank] of workspace: the slices' x Aᵀ is the first."""
        pairs, stack = self.moe.topk_ids.numel(), stacked.stop - stacked.start
        shape = (splits, pairs, stack * self.lora.max_rank)
        return self.lora.shrunk[: shape[0] * shape[1] * shape[2]].view(shape)

    def _pair_sums(self, stacked: slice, x: torch.Tensor) -> torch.Tensor:
        """`_shrunk` in as many parts as pair by pair the sums are made of."""
        pairs = self.moe.topk_ids.numel()
        return self._shrunk(stacked, moe_shrink_split_k(pairs, x.shape[1]) if x.is_cuda else 1)

    def _shares(self, weight: torch.Tensor) -> bool:
        """Whether x Aᵀ is computed in the launch of the product with `weight`."""
        pairs = self.moe.topk_ids.numel()
        return not self._is_grouped and shares_launch(weight, pairs, self.moe.block_size_m)

    def _multiply(
        self, stacked: slice, x: torch.Tensor, weight: torch.Tensor, sort: Sort, out: torch.Tensor
    ) -> None:
        """`out` = x Wᵀ of the pairs, and the slices' x Aᵀ, which is computed with it or joins."""
        moe, lora, tables = self.moe, self.lora, self._tables(stacked)
        product = (x, weight, moe.topk_ids, *sort, moe.block_size_m)
        if not self._shares(weight):
            moe_gemm(*product, self._pairs_per_row(stacked), out)
            lora.side.join()
            return
        moe_gemm_shrink(
            *product,
            self._pairs_per_row(stacked),
            out,
            lora.arena,
            tables.a_ptrs,
            tables.lora_ranks,
            *self._outer(stacked),
            lora.info.row_adapter,
            lora.adapter_enabled,
            lora.max_rank,
            self._pair_sums(stacked, x),
            lora.arrivals,
        )

    def _shrink(self, stacked: slice, x: torch.Tensor) -> None:
        """The slices' x Aᵀ in a launch of its own."""
        lora, tables = self.lora, self._tables(stacked)
        if self._is_grouped:
            moe_lora_shrink_grouped(
                x,
                lora.arena,
                tables.a_ptrs,
                tables.lora_ranks,
                *self._outer(stacked),
                *self.moe.lora.lists,
                self.moe.block_size_m,
                self.top_k,
                self._pairs_per_row(stacked),
                lora.max_rank,
                self._shrunk(stacked),
            )
        else:
            moe_lora_shrink(
                x,
                lora.arena,
                tables.a_ptrs,
                tables.lora_ranks,
                *self._outer(stacked),
                lora.info.row_adapter,
                lora.adapter_enabled,
                self.moe.topk_ids,
                self._pairs_per_row(stacked),
                lora.max_rank,
                self._pair_sums(stacked, x),
                lora.arrivals,
            )

    def _pairs_per_row(self, stacked: slice) -> int:
        return self.top_k if stacked == GATE_UP else 1

    def _outer(self, stacked: slice) -> tuple[_Table, _Table]:
        """Addresses and ranks of an A that all experts share, which gate and up may have."""
        if stacked != GATE_UP:
            return None, None
        experts = self._experts
        return experts.outer_ptrs[self.index, stacked], experts.outer_ranks[self.index, stacked]

    def _align(self) -> None:
        """Sort the pairs by (slot, expert), every row being a request of its own."""
        moe, sort = self.moe, self.moe.lora
        moe_lora_align_block_size(
            moe.topk_ids,
            sort.row_indptr,
            self.lora.info.row_adapter,
            self._experts.linear.lora_ranks.shape[3],
            moe.block_size_m,
            sort.sorted_token_ids_lora.shape[0],
            sort.sorted_token_ids_lora.shape[1],
            sort.expert_ids_lora.shape[1],
            sort.sorted_token_ids_lora,
            sort.expert_ids_lora,
            sort.num_tokens_post_padded_lora,
            self.lora.adapter_enabled,
            sort.lora_ids,
            None,
        )

    def _expand_grouped(
        self,
        shrunk: torch.Tensor,
        tables: LinearTables,
        outer_ranks: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        stack = tables.b_ptrs.shape[0]
        moe_lora_expand_grouped(
            shrunk,
            self.lora.arena,
            tables.b_ptrs,
            tables.lora_ranks,
            tables.scalings,
            outer_ranks,
            *self.moe.lora.lists,
            self.moe.block_size_m,
            self.top_k,
            self.lora.max_rank,
            [y.shape[1] // stack] * stack,
            y,
        )
