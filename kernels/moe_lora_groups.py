"""Groups as the grouped expert-LoRA kernels see them: blocks of pairs of one slot and one expert.

Shared by the launchers and the twins of `moe_lora_shrink_grouped` and `moe_lora_expand_grouped`.
Knows where the blocks of `moe_lora_align_block_size` lie and whose they are, not what is computed
with them.

Every slot has a list of pairs of its own, but together the lists hold each pair once. So the
blocks in use are numbered through, list after list: they are far fewer than slots times the
longest list, and a grid laid over them does not grow with the slots that have nothing to do.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from kernels.moe_align import max_m_blocks
from kernels.op import FLOATS

MAX_PROGRAMS = 8192
"""Programs a launch starts at most, about: further blocks are taken in turn."""

GROUP_TABLES = (
    "a_ptrs",
    "b_ptrs",
    "lora_ranks",
    "scalings",
    "outer_ptrs",
    "outer_ranks",
    "sorted_token_ids_lora",
    "expert_ids_lora",
    "num_tokens_post_padded_lora",
    "lora_ids",
)


@triton.jit
def block_ends(
    num_tokens_post_padded_lora,
    lora_ids,
    MAX_LORAS: tl.constexpr,
    BLOCK_LORAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """For each list, the number of blocks up to its end; and the number of all blocks."""
    lists = tl.arange(0, BLOCK_LORAS)
    slots = tl.load(lora_ids + lists, mask=lists < MAX_LORAS, other=-1)
    lengths = tl.load(num_tokens_post_padded_lora + lists, mask=slots >= 0, other=0)
    counts = lengths // BLOCK_M
    return tl.cumsum(counts), tl.sum(counts)


@triton.jit
def find_group(
    block,
    ends,
    sorted_token_ids_lora,
    expert_ids_lora,
    lora_ids,
    list_stride,
    blocks_stride,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A block's slot, its index (slot, expert) into one slice's table, and its pairs.

    Entries of padding are pairs beyond the last.
    """
    owner = tl.sum((ends <= block).to(tl.int32))
    local = block - tl.max(tl.where(ends <= block, ends, 0))
    slot = tl.load(lora_ids + owner)
    expert = tl.load(expert_ids_lora + owner * blocks_stride + local)
    entries = (owner * list_stride).to(tl.int64) + local * BLOCK_M + tl.arange(0, BLOCK_M)
    return slot, slot * NUM_EXPERTS + expert, tl.load(sorted_token_ids_lora + entries)


def block_programs(
    num_pairs: int, max_loras: int, num_experts: int, block_size_m: int, programs_a_block: int
) -> int:
    """The grid's length along the blocks."""
    blocks = max_m_blocks(num_pairs, max_loras * num_experts, block_size_m)
    return min(blocks, max(1, MAX_PROGRAMS // programs_a_block))


def check_table(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """A contiguous tensor of this dtype and shape."""
    assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
    assert tensor.shape == tuple(shape), (
        f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}"
    )
    assert tensor.is_contiguous(), f"{name} is not contiguous"


def check_groups(
    rows: torch.Tensor,
    num_pairs: int,
    arena: torch.Tensor,
    pointers: torch.Tensor,
    lora_ranks: torch.Tensor,
    outer_ranks: torch.Tensor | None,
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    lora_ids: torch.Tensor,
    block_size_m: int,
    top_k: int,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """What the shrink and the expand ask of their arguments alike; `rows` is x or y."""
    stack, max_loras, num_experts = pointers.shape
    assert stack in (1, 2), f"{stack} slices, not 1 or 2"
    assert 1 <= max_rank <= 256, f"max_rank {max_rank}, not in 1..256"
    assert block_size_m in (16, 32, 64, 128), f"blocks of {block_size_m}, not 16, 32, 64 or 128"
    assert top_k >= 1, f"top_k {top_k}, not 1 or more"
    assert num_pairs % top_k == 0, f"{num_pairs} pairs are not rows of {top_k}"
    for name, tensor in (("activations", rows), ("arena", arena)):
        assert tensor.dtype in FLOATS, f"{name} are {tensor.dtype}, not one of {FLOATS}"
    check_table("pointers", pointers, torch.int64, (stack, max_loras, num_experts))
    check_table("lora_ranks", lora_ranks, torch.int32, pointers.shape)
    if outer_ranks is not None:
        check_table("outer_ranks", outer_ranks, torch.int32, (stack, max_loras))
    lengths = num_tokens_post_padded_lora
    check_table("num_tokens_post_padded_lora", lengths, torch.int32, (max_loras,))
    check_table("lora_ids", lora_ids, torch.int32, (max_loras,))
    for name, tensor in (
        ("sorted_token_ids_lora", sorted_token_ids_lora),
        ("expert_ids_lora", expert_ids_lora),
    ):
        assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32"
        assert tensor.shape[:-1] == (max_loras,), (
            f"{name} has shape {tuple(tensor.shape)}, not ({max_loras}, ...)"
        )
        assert tensor.stride(1) == 1, f"{name}'s last dim has stride {tensor.stride(1)}"
    assert rows.stride(1) == 1, f"activations' last dim has stride {rows.stride(1)}"
    assert shrunk.dtype == torch.float32, f"shrunk is {shrunk.dtype}, not float32"
    assert shrunk.shape[1:] == (num_pairs, stack * max_rank), (
        f"shrunk has shape {tuple(shrunk.shape)}, not (splits, {num_pairs}, {stack * max_rank})"
    )
    assert shrunk.stride(2) == 1, f"shrunk's last dim has stride {shrunk.stride(2)}"
    assert shrunk.stride(0) % shrunk.stride(1) == 0, (
        f"shrunk has strides {shrunk.stride()}: splits are not a whole number of rows apart"
    )


def walk_groups(
    sorted_token_ids_lora: torch.Tensor,
    expert_ids_lora: torch.Tensor,
    num_tokens_post_padded_lora: torch.Tensor,
    lora_ids: torch.Tensor,
    block_size_m: int,
    num_pairs: int,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(slot, expert, int64 pairs) of every slot and expert with pairs."""
    lengths = num_tokens_post_padded_lora.tolist()
    for owner, slot in enumerate(lora_ids.tolist()):
        if slot < 0 or not lengths[owner]:
            continue
        pairs = sorted_token_ids_lora[owner, : lengths[owner]].long()
        experts = expert_ids_lora[owner, : lengths[owner] // block_size_m]
        experts = experts.repeat_interleave(block_size_m)
        for expert in experts.unique().tolist():
            yield slot, expert, pairs[(experts == expert) & (pairs < num_pairs)]
