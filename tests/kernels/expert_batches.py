"""Batches of grouped expert LoRA: rows, their experts, adapters and lists; both ops run on them.

What a batch's result must be is worked out from merged matrices, by `check_result`.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.moe_align import max_m_blocks
from kernels.moe_lora_expand_grouped import (
    moe_lora_expand_grouped_torch,
    moe_lora_expand_grouped_triton,
)
from kernels.moe_lora_shrink_grouped import (
    moe_lora_shrink_grouped_torch,
    moe_lora_shrink_grouped_triton,
)
from tests.kernels.packed_experts import PackedExperts, pack_experts

NAN = float("nan")
OPS = {
    "triton": (moe_lora_shrink_grouped_triton, moe_lora_expand_grouped_triton),
    "torch": (moe_lora_shrink_grouped_torch, moe_lora_expand_grouped_torch),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative to the largest value: a few float32 sums' roundings, or one rounding of the dtype."""


@dataclass(frozen=True)
class Case:
    """A batch of num_tokens rows and the adapters it uses.

    Row t has slot (7 t) mod (slots + 1), less 1. Expert adapters take their ranks from `ranks`
    in turn over slices, slots and experts; those in `shared` have one A for all experts, of the
    slot's first rank, except where the turn says 0.
    """

    num_experts: int
    top_k: int
    slots: int
    num_tokens: int
    ranks: tuple[int, ...]
    stack: int = 2  # gate and up of a row's x, or down of a pair's
    routing: Literal["any", "last", "half", "holes"] = "any"
    shared: frozenset[int] = frozenset()
    disabled: frozenset[int] = frozenset()
    in_features: int = 40
    out_features: int = 70
    block_size_m: int = 16
    splits: int = 1
    dtype: torch.dtype = torch.float32
    x_by_pair: bool = False

    @property
    def max_rank(self) -> int:
        return max(self.ranks)

    @property
    def pairs_per_row(self) -> int:
        return 1 if self.stack == 1 or self.x_by_pair else self.top_k

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def slice_sizes(self) -> list[int]:
        return [self.out_features] * self.stack

    def row_adapter(self) -> list[int]:
        slots = [7 * row % (self.slots + 1) - 1 for row in range(self.num_tokens)]
        return [-1 if slot in self.disabled else slot for slot in slots]

    def topk_ids(self) -> torch.Tensor:
        """int32[T, k]: distinct experts a row; with "holes" also rows and pairs of none."""
        generator = torch.Generator().manual_seed(self.num_tokens)
        used = max(self.top_k, self.num_experts // 2)
        used = used if self.routing == "half" else self.num_experts
        scores = torch.rand(self.num_tokens, used, generator=generator)
        if self.routing == "last":
            scores[:, -1] = 2.0
        ids = scores.topk(self.top_k).indices.int()
        if self.routing == "holes":
            ids[1::4] = -1
            ids[2::4, -1] = -1
        return ids

    def rank_table(self) -> list[list[list[int]]]:
        turn = iter(range(10**9))
        table: list[list[list[int]]] = []
        for _ in range(self.stack):
            table.append([])
            for slot in range(self.slots):
                ranks = [self.ranks[next(turn) % len(self.ranks)] for _ in range(self.num_experts)]
                if slot in self.shared:
                    ranks = [max(ranks) if rank else 0 for rank in ranks]
                table[-1].append(ranks)
        return table


def packed(case: Case, order: list[int] | None = None) -> PackedExperts:
    ranks = case.rank_table()
    if order is not None:
        ranks = [[slots[name] for name in order] for slots in ranks]
    return pack_experts(
        ranks, case.in_features, case.out_features, case.dtype, shared=case.shared, order=order
    )


def activations(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y as columns of wider buffers, whose margins are NaN."""
    generator = torch.Generator().manual_seed(case.num_pairs)
    wide = []
    rows = case.num_pairs // case.pairs_per_row
    for height, width in ((rows, case.in_features), (case.num_pairs, sum(case.slice_sizes))):
        buffer = torch.full((height, width + 8), NAN, dtype=case.dtype)
        buffer[:, :width] = torch.randn(height, width, generator=generator)
        wide.append(buffer[:, :width])
    return wide[0], wide[1]


def lists_of(
    topk_ids: torch.Tensor,
    row_adapter: list[int],
    case: Case,
    lora_ids: list[int] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Each slot's pairs by expert in blocks; what no block covers names pair 0 and expert 0."""
    block, num_pairs = case.block_size_m, case.num_pairs
    lora_ids = lora_ids or list(range(case.slots))
    blocks = max_m_blocks(num_pairs, case.num_experts, block)
    lists = {
        "sorted_token_ids_lora": torch.zeros(case.slots, blocks * block + 3, dtype=torch.int32),
        "expert_ids_lora": torch.zeros(case.slots, blocks + 1, dtype=torch.int32),
        "num_tokens_post_padded_lora": torch.zeros(case.slots, dtype=torch.int32),
        "lora_ids": torch.full((case.slots,), -1, dtype=torch.int32),
    }
    for owner, slot in enumerate(lora_ids):
        entries, experts = [], []
        for expert in range(case.num_experts):
            pairs = [
                pair
                for pair, chosen in enumerate(topk_ids.flatten().tolist())
                if chosen == expert and row_adapter[pair // case.top_k] == slot
            ]
            used = -(-len(pairs) // block)
            entries += pairs + [num_pairs] * (used * block - len(pairs))
            experts += [expert] * used
        if entries:
            entries_here = torch.tensor(entries, dtype=torch.int32)
            lists["sorted_token_ids_lora"][owner, : len(entries)] = entries_here
            experts_here = torch.tensor(experts, dtype=torch.int32)
            lists["expert_ids_lora"][owner, : len(experts)] = experts_here
            lists["num_tokens_post_padded_lora"][owner] = len(entries)
            lists["lora_ids"][owner] = slot
    return {name: tensor.to(device) for name, tensor in lists.items()}


def empty_shrunk(case: Case, device: torch.device | str = "cpu") -> torch.Tensor:
    shape = (case.splits, case.num_pairs, case.stack * case.max_rank)
    return torch.full(shape, NAN, device=device)


def shrink(ops: str, case: Case, experts: PackedExperts, x, lists, shrunk, outer=True) -> None:
    outer = outer and bool(case.shared)
    OPS[ops][0](
        x,
        experts.arena,
        experts.a_ptrs,
        experts.lora_ranks,
        experts.outer_ptrs if outer else None,
        experts.outer_ranks if outer else None,
        **lists,
        block_size_m=case.block_size_m,
        top_k=case.top_k,
        pairs_per_row=case.pairs_per_row,
        max_rank=case.max_rank,
        shrunk=shrunk,
    )


def expand(ops: str, case: Case, experts: PackedExperts, shrunk, lists, y, outer=True) -> None:
    OPS[ops][1](
        shrunk,
        experts.arena,
        experts.b_ptrs,
        experts.lora_ranks,
        experts.scalings,
        experts.outer_ranks if outer and case.shared else None,
        **lists,
        block_size_m=case.block_size_m,
        top_k=case.top_k,
        max_rank=case.max_rank,
        slice_sizes=case.slice_sizes,
        y=y,
    )


def delta_added(
    ops: str, case: Case, experts: PackedExperts, x, y, lists, device="cpu", outer=True
) -> torch.Tensor:
    """y after both ops, on the CPU; the margins beside y are checked."""
    experts = experts.to(device)
    lists = {name: tensor.to(device) for name, tensor in lists.items()}
    x, y = (
        (t if t._base is None else t._base).to(device, copy=True)[:, : t.shape[1]] for t in (x, y)
    )
    shrunk = empty_shrunk(case, device)
    shrink(ops, case, experts, x, lists, shrunk, outer)
    expand(ops, case, experts, shrunk, lists, y, outer)
    if y._base is not None:
        assert y._base[:, y.shape[1] :].isnan().all()
    return y.cpu()


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected.double()).abs().max()
    assert error <= TOLERANCE[dtype] * expected.abs().max(), float(error)


def written(case: Case, experts: PackedExperts) -> torch.Tensor:
    """bool[P, stack * max_rank]: what a shrink writes."""
    mask = torch.zeros(case.num_pairs, case.stack, case.max_rank, dtype=torch.bool)
    rows = case.row_adapter()
    for pair, expert in enumerate(case.topk_ids().flatten().tolist()):
        slot = rows[pair // case.top_k]
        if slot >= 0 and expert >= 0:
            for j in range(case.stack):
                rank = int(experts.lora_ranks[j, slot, expert])
                if experts.outer_ranks[j, slot]:
                    first = pair % case.top_k == 0
                    rank = int(experts.outer_ranks[j, slot]) if first else 0
                mask[pair, j, :rank] = True
    return mask.flatten(1)


def check_result(case: Case, experts: PackedExperts, x, y, found: torch.Tensor) -> None:
    """Against W + scaling * B A of every pair; and what has no delta keeps its bits."""
    deltas = experts.deltas(x, case.topk_ids(), case.row_adapter())
    assert_close(found, y.double() + deltas, case.dtype)
    assert torch.equal(found[deltas == 0], y[deltas == 0])
