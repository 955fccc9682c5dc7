"""The LoRA arguments of the ops that fold a delta (x A^T) B^T into what they compute.

Eleven, after those of the base product; all of them None and 0 without LoRA:

    shrunk float32[T, stack * max_rank]   x A^T of the base product's x: row t, slice j and rank
        index r at [t, j * max_rank + r]. What lies beyond a slice's true rank, and the rows
        without adapter, may hold anything and enter no result. Where an op says that it takes
        them, float32[T, P, stack * max_rank]: P parts, a power of two, of which it is the sum.
    arena [flat]                 every adapter's weights; its dtype is the weights' dtype
    b_ptrs int64[stack, max_loras], lora_ranks int32 and scalings float32 likewise
        at a slice's address lies B [N, rank], row-major, of true rank, starting on 16 bytes or
        more. Rank 0: the slot has no such module, and its address is never read.
    row_slot int32[T]            each row's slot, -1 for none
    row_order int32[T]           every row, by slot, those without one last
    seg_indptr, weight_indices, num_segments   from `lora_metadata`, as the two before
    max_rank                     1..256

Slice j of row t, in slot s, is base + scalings[j, s] * shrunk[t, j] B^T,
summed in float32 and not rounded until the op's own result is. A row without adapter, and a
slice of rank 0, gives the very bits that the op gives without LoRA.

All but `shrunk` must be two launches old when the op starts (see `dependent_launch`): a kernel
reads them while the base product still runs. How a kernel goes about it: `lora_expand`.
"""

from dataclasses import dataclass

import torch
import triton

from kernels.lora_segments import check_shrunk, walk_segments, weight_view
from kernels.op import FLOATS

FEW_ROWS = 16
"""Up to so many rows activation and addition go row by row, above by tiles of rows of one slot.
Rotary always goes row by row, the norm wherever it adds deltas (`norm.holds_delta`)."""

FEW_PARTS = 4
"""Of x A^T, which a kernel that goes row by row loads one by one, in the layout of B. More come in
a tile, whose layout B would follow: rotary, where many programs add up the same, takes no more."""

COLUMNS_PER_WARP = 64  # row by row: 16 ranks of so much of a 16-bit B are 16 registers a thread

LORA_TABLES = (
    "b_ptrs",
    "lora_ranks",
    "scalings",
    "row_slot",
    "row_order",
    "seg_indptr",
    "weight_indices",
    "num_segments",
)

NO_LORA = (None, None, None, None, None, None, None, None, None, None, 0)
"""The eleven where there is nothing to add."""


@dataclass(frozen=True)
class Expand:
    """The LoRA arguments of one call, checked."""

    shrunk: torch.Tensor
    arena: torch.Tensor
    b_ptrs: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor
    row_slot: torch.Tensor
    row_order: torch.Tensor
    seg_indptr: torch.Tensor
    weight_indices: torch.Tensor
    num_segments: torch.Tensor
    max_rank: int

    @property
    def parts(self) -> torch.Tensor:
        """`shrunk` [T, P, stack * max_rank]."""
        return self.shrunk if self.shrunk.dim() == 3 else self.shrunk.unsqueeze(1)

    def constants(self) -> dict[str, int]:
        """What either way's kernels need to know besides the tensors."""
        return {
            "SHRUNK_STRIDE": self.shrunk.stride(0),
            "MAX_LORAS": self.b_ptrs.shape[1],
            "VECTOR": 16 // self.arena.element_size(),
        }

    def delta(self, slice_sizes: list[int]) -> torch.Tensor:
        """What the kernels add, float32 [T, sum of slice_sizes]; -0.0, which keeps bits, else.

        Every product takes all T rows and keeps the segment's: a library product's bits may
        depend on its number of rows, which must not be how many neighbours share an adapter.
        """
        shape = (self.row_slot.shape[0], sum(slice_sizes))
        delta = torch.full(shape, -0.0, dtype=torch.float32, device=self.shrunk.device)
        slices, sums = delta.split(slice_sizes, dim=1), self.parts.sum(dim=1)
        tables = (self.lora_ranks, self.seg_indptr, self.weight_indices, self.row_order.long())
        for _, rows, slot, stacked, address, rank in walk_segments(
            self.b_ptrs, *tables, self.num_segments
        ):
            b = weight_view(self.arena, address, slice_sizes[stacked], rank)  # [N, rank]
            first = stacked * self.max_rank
            product = (sums[:, first : first + rank] @ b.T).index_select(0, rows)
            slices[stacked].index_copy_(0, rows, self.scalings[stacked, slot] * product)
        return delta


def lora_of(
    num_tokens: int,
    stack: int,
    shrunk: torch.Tensor | None,
    arena: torch.Tensor | None,
    b_ptrs: torch.Tensor | None,
    lora_ranks: torch.Tensor | None,
    scalings: torch.Tensor | None,
    row_slot: torch.Tensor | None,
    row_order: torch.Tensor | None,
    seg_indptr: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    num_segments: torch.Tensor | None,
    max_rank: int,
    takes_parts: bool = False,
) -> Expand | None:
    """The LoRA arguments of an op of `stack` slices, checked; None where there are none."""
    tensors = {
        "shrunk": shrunk,
        "arena": arena,
        "b_ptrs": b_ptrs,
        "lora_ranks": lora_ranks,
        "scalings": scalings,
        "row_slot": row_slot,
        "row_order": row_order,
        "seg_indptr": seg_indptr,
        "weight_indices": weight_indices,
        "num_segments": num_segments,
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not given:
        assert max_rank == 0, f"max_rank {max_rank}, but no adapters"
        return None
    absent = sorted(tensors.keys() - given.keys())
    assert not absent, f"adapters without {', '.join(absent)}"
    lora = Expand(**given, max_rank=max_rank)
    max_loras = lora.b_ptrs.shape[1]
    segments = min(num_tokens, max_loras)
    for name, dtype, shape in (
        ("b_ptrs", torch.int64, (stack, max_loras)),
        ("lora_ranks", torch.int32, (stack, max_loras)),
        ("scalings", torch.float32, (stack, max_loras)),
        ("row_slot", torch.int32, (num_tokens,)),
        ("row_order", torch.int32, (num_tokens,)),
        ("seg_indptr", torch.int32, (segments + 1,)),
        ("weight_indices", torch.int32, (segments,)),
        ("num_segments", torch.int32, (1,)),
    ):
        tensor = given[name]
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    assert 1 <= max_rank <= 256, f"max_rank {max_rank}, not in 1..256"
    assert lora.arena.dtype in FLOATS, f"arena is {lora.arena.dtype}, not one of {FLOATS}"
    dims, parts = lora.shrunk.dim(), lora.parts.shape[1]
    assert dims == 2 or (takes_parts and dims == 3), f"shrunk has {dims} dims, not 2: rows, ranks"
    assert parts.bit_count() == 1, f"shrunk has {parts} parts, not a power of two"
    check_shrunk(lora.parts[:, 0], num_tokens, stack * max_rank)
    return lora


def row_columns(num_tokens: int) -> tuple[int, int]:
    """(columns, warps) of a program that goes row by row."""
    num_warps = 2 if num_tokens <= 4 else 4
    return COLUMNS_PER_WARP * num_warps, num_warps


def row_tensors(lora: Expand | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors that a kernel reads which goes row by row."""
    if lora is None:
        return (None,) * 6
    return lora.shrunk, lora.arena, lora.b_ptrs, lora.lora_ranks, lora.scalings, lora.row_slot


def row_blocks(lora: Expand | None) -> dict[str, int]:
    """Numbers and constexprs of a kernel that goes row by row, or has no delta to add."""
    if lora is None:
        names = ("SHRUNK_STRIDE", "MAX_LORAS", "VECTOR", "BLOCK_R", "ONE_BLOCK")
        return dict.fromkeys(names, 0)
    most = 32 // lora.arena.element_size()
    block_r = min(most, max(8, triton.next_power_of_2(lora.max_rank)))
    return lora.constants() | {"BLOCK_R": block_r, "ONE_BLOCK": lora.max_rank <= block_r}


def part_blocks(lora: Expand | None) -> dict[str, int]:
    """Constexprs of a kernel that takes x A^T in parts."""
    if lora is None:
        return {"PARTS": 1, "PART_STRIDE": 0}
    return {"PARTS": lora.parts.shape[1], "PART_STRIDE": lora.parts.stride(1)}


def tile_blocks(lora: Expand) -> dict[str, int]:
    """Numbers and constexprs of a kernel that goes by tiles of rows."""
    num_tokens, max_loras = lora.row_slot.shape[0], lora.b_ptrs.shape[1]
    exact = lora.arena.dtype != torch.bfloat16
    return lora.constants() | {
        "num_tokens": num_tokens,
        "max_segments": min(num_tokens, max_loras),
        "BLOCK_SEGMENTS": triton.next_power_of_2(max_loras),
        "BLOCK_M": 16,
        "BLOCK_N": 32 if exact else 128,
        "BLOCK_R": 16,
    }


def row_tiles(lora: Expand, block_m: int) -> int:
    """Tiles that cover any rows of a step: those of `find_pairs`, the rows without adapter as one
    segment more."""
    num_tokens, max_loras = lora.row_slot.shape[0], lora.b_ptrs.shape[1]
    return min(num_tokens, max_loras) + 1 + num_tokens // block_m
