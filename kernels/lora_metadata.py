"""Which rows belong to which adapter: the sorted pairs and segments of one step, on the device.

Computed once a step and shared by every layer. Knows slots and rows, never an adapter's weights,
ranks or name.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op

MAX_ROWS = 8192
MAX_SLOTS = 256


@triton.jit
def _slot_or_last(row_adapter, adapter_enabled, rows, num_rows, MAX_LORAS: tl.constexpr):
    """Each row's slot; MAX_LORAS, which sorts last, for rows that give no pair."""
    slot = tl.load(row_adapter + rows, mask=rows < num_rows, other=-1)
    known = (slot >= 0) & (slot < MAX_LORAS)
    enabled = tl.load(adapter_enabled + slot, mask=known, other=0)
    return tl.where(known & (enabled != 0), slot, MAX_LORAS)


@triton.jit
def _write_segments(
    row_adapter,
    adapter_enabled,
    seg_indptr,
    weight_indices,
    num_segments,
    num_rows,
    max_segments,
    MAX_LORAS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the rows of every slot, then close the gaps that slots without rows leave."""
    slots = tl.arange(0, BLOCK_SLOTS)
    seen = tl.zeros([BLOCK_SLOTS, CHUNK], tl.int32)
    for first in range(0, num_rows, CHUNK):
        rows = first + tl.arange(0, CHUNK)
        slot = _slot_or_last(row_adapter, adapter_enabled, rows, num_rows, MAX_LORAS)
        seen += (slot[None, :] == slots[:, None]).to(tl.int32)
    counts = tl.where(slots < MAX_LORAS, tl.sum(seen, axis=1), 0)
    present = (counts > 0).to(tl.int32)
    segment = tl.cumsum(present) - present
    used = tl.sum(present)
    total = tl.sum(counts)
    tl.store(weight_indices + segment, slots, mask=present != 0)
    tl.store(seg_indptr + segment, tl.cumsum(counts) - counts, mask=present != 0)
    unused = (slots >= used) & (slots < max_segments)
    tl.store(weight_indices + slots, -1, mask=unused)
    tl.store(seg_indptr + slots, total, mask=unused)
    tl.store(seg_indptr + max_segments, total)
    tl.store(num_segments, used)


@triton.jit(
    do_not_specialize=["num_rows", "max_segments"],
    do_not_specialize_on_alignment=[
        "row_adapter",
        "adapter_enabled",
        "seg_indptr",
        "weight_indices",
        "permutation",
        "num_segments",
        "pair_row",
        "pair_slot",
        "row_slot",
        "row_order",
    ],
)
def _lora_metadata_kernel(
    row_adapter,
    adapter_enabled,
    seg_indptr,
    weight_indices,
    permutation,
    num_segments,
    pair_row,
    pair_slot,
    row_slot,
    row_order,
    num_rows,
    max_segments,
    MAX_LORAS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOT_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    block = tl.program_id(0) - 1
    if block < 0:
        _write_segments(
            row_adapter,
            adapter_enabled,
            seg_indptr,
            weight_indices,
            num_segments,
            num_rows,
            max_segments,
            MAX_LORAS,
            BLOCK_SLOTS,
            SLOT_CHUNK,
        )
        return
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slot = _slot_or_last(row_adapter, adapter_enabled, rows, num_rows, MAX_LORAS)
    order = slot * num_rows + rows
    before = tl.zeros([BLOCK_ROWS, CHUNK], tl.int32)
    for first in range(0, num_rows, CHUNK):
        others = first + tl.arange(0, CHUNK)
        other_slot = _slot_or_last(row_adapter, adapter_enabled, others, num_rows, MAX_LORAS)
        other_order = other_slot * num_rows + others
        before += (other_order[None, :] < order[:, None]).to(tl.int32)
    position = tl.sum(before, axis=1)  # a bijection: every row lands on a place of its own
    has_pair = slot < MAX_LORAS
    inside = rows < num_rows
    pair = tl.where(has_pair, rows, -1)
    slot_or_none = tl.where(has_pair, slot, -1)
    tl.store(permutation + position, pair, mask=inside)
    tl.store(pair_row + position, pair, mask=inside)
    tl.store(pair_slot + position, slot_or_none, mask=inside)
    tl.store(row_slot + rows, slot_or_none, mask=inside)
    tl.store(row_order + position, rows, mask=inside)


def lora_metadata_triton(
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    permutation: torch.Tensor,
    num_segments: torch.Tensor,
    pair_row: torch.Tensor,
    pair_slot: torch.Tensor,
    row_slot: torch.Tensor,
    row_order: torch.Tensor,
) -> None:
    """Sort the step's (row, slot) pairs by slot and cut them into segments of one slot each.

    row_adapter int32[T] holds each row's adapter slot, -1 for none; a row gives one pair where
    its slot lies in [0, max_loras) and adapter_enabled int32[max_loras] is not zero there.
    Written in place, every element, all int32, with S = min(T, max_loras):

        pair_row[T], pair_slot[T]   the pairs by slot, rows ascending within a slot; then -1
        permutation[T]              unsorted index of each sorted pair (its row, while a row has
                                    one pair); then -1
        seg_indptr[S + 1]           segment s spans pairs seg_indptr[s]:seg_indptr[s + 1];
                                    unused segments start and end at the number of pairs
        weight_indices[S]           slot of each segment, ascending; then -1
        num_segments[1]
        row_slot[T]                 slot of each row; -1 where it gives no pair
        row_order[T]                every row: those of the pairs as in pair_row, then the others

    One launch, the same for any contents: T at most 8192, max_loras at most 256. A pair's place
    is the number of pairs with a smaller (slot, row), so T * T comparisons over T / BLOCK_ROWS
    programs and no atomics; one more program counts the rows of each slot. Compiled once for
    T <= 128 and once for larger T.
    """
    num_rows, max_loras = row_adapter.shape[0], adapter_enabled.shape[0]
    max_segments = min(num_rows, max_loras)
    assert 1 <= num_rows <= MAX_ROWS, f"{num_rows} rows, not in 1..{MAX_ROWS}"
    assert 1 <= max_loras <= MAX_SLOTS, f"{max_loras} adapter slots, not in 1..{MAX_SLOTS}"
    for name, tensor, length in (
        ("row_adapter", row_adapter, num_rows),
        ("adapter_enabled", adapter_enabled, max_loras),
        ("seg_indptr", seg_indptr, max_segments + 1),
        ("weight_indices", weight_indices, max_segments),
        ("permutation", permutation, num_rows),
        ("num_segments", num_segments, 1),
        ("pair_row", pair_row, num_rows),
        ("pair_slot", pair_slot, num_rows),
        ("row_slot", row_slot, num_rows),
        ("row_order", row_order, num_rows),
    ):
        assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32"
        assert tensor.shape == (length,), f"{name} has shape {tuple(tensor.shape)}, not ({length},)"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    few = num_rows <= 128
    block_rows = 32 if few else 64
    _lora_metadata_kernel[(1 + triton.cdiv(num_rows, block_rows),)](
        row_adapter,
        adapter_enabled,
        seg_indptr,
        weight_indices,
        permutation,
        num_segments,
        pair_row,
        pair_slot,
        row_slot,
        row_order,
        num_rows,
        max_segments,
        MAX_LORAS=max_loras,
        BLOCK_SLOTS=triton.next_power_of_2(max_loras),
        BLOCK_ROWS=block_rows,
        CHUNK=128,
        SLOT_CHUNK=32 if few else 128,
        num_warps=4 if few else 16,
        **dependent_launch(row_adapter.device),
    )


def lora_metadata_torch(
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    permutation: torch.Tensor,
    num_segments: torch.Tensor,
    pair_row: torch.Tensor,
    pair_slot: torch.Tensor,
    row_slot: torch.Tensor,
    row_order: torch.Tensor,
) -> None:
    """Torch twin of `lora_metadata_triton`: a stable sort, then runs of equal slots."""
    max_loras = adapter_enabled.shape[0]
    known = (row_adapter >= 0) & (row_adapter < max_loras)
    enabled = adapter_enabled[row_adapter.clamp(0, max_loras - 1)] != 0
    slot_or_last = torch.where(known & enabled, row_adapter, max_loras)
    sorted_slots, order = torch.sort(slot_or_last, stable=True)
    total = int((sorted_slots < max_loras).sum())
    slots, counts = torch.unique_consecutive(sorted_slots[:total], return_counts=True)
    used = slots.shape[0]
    for tensor, values in (
        (permutation, order[:total]),
        (pair_row, order[:total]),
        (pair_slot, sorted_slots[:total]),
        (weight_indices, slots),
    ):
        tensor.fill_(-1)
        tensor[: values.shape[0]] = values
    seg_indptr.fill_(total)
    seg_indptr[0] = 0
    seg_indptr[1 : used + 1] = counts.cumsum(0)
    num_segments.fill_(used)
    row_slot.copy_(torch.where(slot_or_last < max_loras, slot_or_last, -1))
    row_order.copy_(order)


lora_metadata = define_op(
    lora_metadata_triton,
    lora_metadata_torch,
    mutates=(
        "seg_indptr",
        "weight_indices",
        "permutation",
        "num_segments",
        "pair_row",
        "pair_slot",
        "row_slot",
        "row_order",
    ),
)
