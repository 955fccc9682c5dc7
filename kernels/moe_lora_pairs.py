"""Expert LoRA pair by pair: what the decode kernels of MoE LoRA share.

A pair is a row and one of its k experts: pair p belongs to row p // k. `moe_lora_shrink`,
`moe_lora_gate_up` and `moe_lora_down` take pairs as they come, without sorting, which is right
while pairs are few and most of them name an expert of their own. Knows where a pair's weights
lie, not what is computed with them.

    topk_ids int32[T, k]        expert of each pair; -1: none, the pair is skipped
    row_adapter int32[T]        adapter slot of each row, -1 for none; adapter_enabled int32[L]
    a_ptrs, b_ptrs int64[stack, L, E], lora_ranks int32 and scalings float32 likewise
        per slice (gate and up: stack 2; down: 1), slot and expert. At an address lie A [rank, K]
        or B [N, rank], row-major, of true rank, starting on 16 bytes or more. Rank 0: the slot
        has nothing on that expert, and its address is never read.
    outer_ptrs int64[stack, L], outer_ranks int32[stack, L]
        where the rank is not 0, one factor serves all experts that the slot has in that slice: A
        for gate and up, B for down. Its rank is that of every such expert.
    shrunk float32[P, stack * max_rank]   sums x A^T between the two steps: pair p, slice j, rank
        index r at [p, j * max_rank + r]; with a shared A those of all of row t's pairs lie at
        pair t * k. What lies beyond a true rank is not written and enters no result. The first
        step takes [splits, P, stack * max_rank]: of those the sums are the first.
"""

from collections.abc import Iterator

import torch

from kernels.lora_segments import check_shrunk
from kernels.op import FLOATS

PAIR_TABLES = (
    "a_ptrs",
    "b_ptrs",
    "lora_ranks",
    "scalings",
    "outer_ptrs",
    "outer_ranks",
    "row_adapter",
    "adapter_enabled",
    "topk_ids",
    "topk_weights",
)


def check_pairs(
    arena: torch.Tensor,
    pointers: torch.Tensor,
    lora_ranks: torch.Tensor,
    scalings: torch.Tensor | None,
    outer_ptrs: torch.Tensor | None,
    outer_ranks: torch.Tensor | None,
    row_adapter: torch.Tensor,
    adapter_enabled: torch.Tensor,
    topk_ids: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """What the three ops ask of their arguments alike; `pointers` is a_ptrs or b_ptrs."""
    stack, max_loras, num_experts = pointers.shape
    num_tokens, top_k = topk_ids.shape
    assert 1 <= max_rank <= 256, f"max_rank {max_rank}, not in 1..256"
    assert num_tokens >= 1, "no rows"
    assert 1 <= top_k <= num_experts, f"{top_k} experts a row, not in 1..{num_experts}"
    assert arena.dtype in FLOATS, f"arena is {arena.dtype}, not one of {FLOATS}"
    for name, tensor, dtype, shape in (
        ("pointers", pointers, torch.int64, (stack, max_loras, num_experts)),
        ("lora_ranks", lora_ranks, torch.int32, (stack, max_loras, num_experts)),
        ("scalings", scalings, torch.float32, (stack, max_loras, num_experts)),
        ("outer_ptrs", outer_ptrs, torch.int64, (stack, max_loras)),
        ("outer_ranks", outer_ranks, torch.int32, (stack, max_loras)),
        ("row_adapter", row_adapter, torch.int32, (num_tokens,)),
        ("adapter_enabled", adapter_enabled, torch.int32, (max_loras,)),
        ("topk_ids", topk_ids, torch.int32, (num_tokens, top_k)),
    ):
        if tensor is None:
            continue
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    check_shrunk(shrunk, num_tokens * top_k, stack * max_rank)


def check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    """Activations of that shape, rows contiguous, of a dtype that the kernels serve."""
    assert tensor.dtype in FLOATS, f"{name} is {tensor.dtype}, not one of {FLOATS}"
    assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
    assert tensor.stride(1) == 1 or shape[1] == 1, f"{name}'s rows are not contiguous"


def columns_a_program(num_rows: int, width: int, least: int, most: int) -> int:
    """A power of two in [least, most] that cuts `num_rows` rows of `width` columns into enough
    programs, some two for each multiprocessor of a large GPU."""
    wanted = 1 << max(0, (num_rows * width // 256).bit_length() - 1)
    return max(least, min(most, wanted))


def walk_pairs(
    row_adapter: torch.Tensor, adapter_enabled: torch.Tensor, topk_ids: torch.Tensor
) -> Iterator[tuple[int, int, int]]:
    """(pair, slot, expert) of every pair whose row has an enabled slot; expert -1 among them."""
    enabled, top_k = adapter_enabled.tolist(), topk_ids.shape[1]
    experts = topk_ids.flatten().tolist()
    for row, slot in enumerate(row_adapter.tolist()):
        if 0 <= slot < len(enabled) and enabled[slot]:
            for pair in range(row * top_k, (row + 1) * top_k):
                yield pair, slot, experts[pair]
