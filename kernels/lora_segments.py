"""Segments as the LoRA kernels see them: tiles of pairs, and weights behind tables of addresses.

Shared by the launchers and the twins of segmented ops. Knows where a segment's rows and weights
lie, not what is computed with them.

Tiles of BLOCK_M pairs and segments share one grid axis. Segment s owns the tiles from
s + seg_indptr[s] // BLOCK_M on: at least as many as it needs, and with S segments over T rows
never more than S + T // BLOCK_M in all, whatever the segments are.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.op import FLOATS

ROW_REGIMES = (4, 16, 64, 128, 512)
"""Launches share compiled variants up to each of these token counts; above, there is one more."""

_SHRINK_SPLITS: dict[int | None, tuple[int, int]] = {
    4: (16, 256),
    16: (4, 1024),
    64: (4, 1024),
    128: (8, 1024),
}
"""By the regime: splits of K at most, and of how many elements each at least."""

MAX_SPLIT_ROWS = 128
"""Above, every program walks all of K."""

TABLES = (
    "a_ptrs",
    "b_ptrs",
    "lora_ranks",
    "scalings",
    "seg_indptr",
    "weight_indices",
    "pair_row",
    "num_segments",
)


@triton.jit
def find_pairs(
    seg_indptr,
    weight_indices,
    num_segments,
    max_segments,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """The slot of the segment that owns `tile`, the tile's first pair and the segment's end.

    first >= end where there is no work. ONE_TILE: no segment is longer than BLOCK_M. Waits for
    memory once: unused segments are empty ones, and of the others all are read.
    """
    if ONE_TILE:
        slot = tl.load(weight_indices + tile)
        first = tl.load(seg_indptr + tile)
        end = tl.load(seg_indptr + tile + 1)
    else:
        candidates = tl.arange(0, BLOCK_SEGMENTS)
        exists = candidates < max_segments
        starts = tl.load(seg_indptr + candidates, mask=exists, other=0)
        ends = tl.load(seg_indptr + candidates + 1, mask=exists, other=0)
        slots = tl.load(weight_indices + candidates, mask=exists, other=0)
        used = tl.load(num_segments)
        owned = (candidates < used) & (candidates + starts // BLOCK_M <= tile)
        segment = tl.sum(owned.to(tl.int32)) - 1
        chosen = candidates == segment
        slot = tl.sum(tl.where(chosen, slots, 0))
        start = tl.sum(tl.where(chosen, starts, 0))
        end = tl.sum(tl.where(chosen, ends, 0))
        first = start + (tile - segment - start // BLOCK_M) * BLOCK_M
    return slot, first, end


@triton.jit
def weights_at(table, index, arena):
    """A table's address as a pointer of the arena's dtype: see `as_weights`."""
    return as_weights(tl.load(table + index), arena)


@triton.jit
def as_weights(address, arena):
    """An address, or a block of them, as pointers of the arena's dtype.

    A loaded address carries no hint; that blocks start on 16 bytes is said here, and what that
    means for a row follows from the constexpr row length.
    """
    return tl.multiple_of(address.to(tl.pointer_type(arena.dtype.element_ty)), 16)


def check_segments(
    rows: torch.Tensor,
    arena: torch.Tensor,
    pointers: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
    max_rank: int,
    shrunk: torch.Tensor,
) -> None:
    """What ops on segments ask of their arguments alike; `rows` is x or y."""
    stack, max_loras = pointers.shape
    num_tokens = rows.shape[0]
    segments = min(num_tokens, max_loras)
    assert 1 <= stack <= 3, f"{stack} slices, not in 1..3"
    assert 1 <= max_rank <= 256, f"max_rank {max_rank}, not in 1..256"
    for name, tensor in (("activations", rows), ("arena", arena)):
        assert tensor.dtype in FLOATS, f"{name} are {tensor.dtype}, not one of {FLOATS}"
    for name, tensor, dtype, shape in (
        ("pointers", pointers, torch.int64, (stack, max_loras)),
        ("lora_ranks", lora_ranks, torch.int32, (stack, max_loras)),
        ("seg_indptr", seg_indptr, torch.int32, (segments + 1,)),
        ("weight_indices", weight_indices, torch.int32, (segments,)),
        ("pair_row", pair_row, torch.int32, (num_tokens,)),
        ("num_segments", num_segments, torch.int32, (1,)),
    ):
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    assert rows.stride(1) == 1, f"activations' last dim has stride {rows.stride(1)}"
    check_shrunk(shrunk, num_tokens, stack * max_rank)


def check_row_slot(row_slot: torch.Tensor, x: torch.Tensor) -> None:
    """int32, a slot for each row of x."""
    assert row_slot.shape == x.shape[:1], f"row_slot has shape {tuple(row_slot.shape)}"
    assert row_slot.dtype == torch.int32, f"row_slot is {row_slot.dtype}, not int32"
    assert row_slot.is_contiguous(), "row_slot is not contiguous"


def check_shrunk(shrunk: torch.Tensor, num_tokens: int, width: int) -> None:
    """float32 [num_tokens, width], or of so many rows each of several splits."""
    assert shrunk.dtype == torch.float32, f"shrunk is {shrunk.dtype}, not float32"
    assert shrunk.shape[-2:] == (num_tokens, width), (
        f"shrunk has shape {tuple(shrunk.shape)}, not ({num_tokens}, {width})"
    )
    assert shrunk.stride(-1) == 1, f"shrunk's last dim has stride {shrunk.stride(-1)}"
    assert shrunk.dim() <= 3, f"shrunk has {shrunk.dim()} dims, not 2 or 3"
    assert shrunk.dim() == 2 or shrunk.stride(0) % shrunk.stride(1) == 0, (
        f"shrunk has strides {shrunk.stride()}: splits are not a whole number of rows apart"
    )


def row_regime(num_tokens: int) -> int | None:
    """The first of ROW_REGIMES that holds `num_tokens` rows; None above the last."""
    return next((limit for limit in ROW_REGIMES if num_tokens <= limit), None)


def block_m_for(num_tokens: int) -> int:
    """Pairs per tile, from the number of rows alone."""
    return {None: 64, 512: 32}.get(row_regime(num_tokens), 16)


def shrink_split_k(num_tokens: int, in_features: int) -> int:
    """How many parts to split K into: few rows fill few programs, and one that walks a long K
    alone waits for memory at every step.

    The workspace `shrunk` takes split_k * T * stack * max_rank * 4 bytes, for T up to 128 at most
    1024 * stack * max_rank * 4.
    """
    most, width = _SHRINK_SPLITS.get(row_regime(num_tokens), (1, in_features))
    return max(1, min(most, in_features // width))


def tile_count(num_tokens: int, max_loras: int) -> int:
    """Tiles that cover any segments of `num_tokens` rows: the grid's length along them."""
    segments, block_m = min(num_tokens, max_loras), block_m_for(num_tokens)
    return segments if num_tokens <= block_m else segments + num_tokens // block_m


def weight_view(arena: torch.Tensor, address: int, rows: int, columns: int) -> torch.Tensor:
    """The row-major matrix at a device address inside `arena`, widened to float32."""
    offset = (address - arena.data_ptr()) // arena.element_size() + arena.storage_offset()
    return torch.as_strided(arena, (rows, columns), (columns, 1), offset).float()


def walk_segments(
    table: torch.Tensor,
    lora_ranks: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor,
    pair_row: torch.Tensor,
    num_segments: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor, int, int, int, int]]:
    """(pairs, rows, slot, slice, address, rank) of every segment and slice with work."""
    used = int(num_segments)
    bounds, slots = seg_indptr[: used + 1].tolist(), weight_indices[:used]
    ranks, addresses = lora_ranks[:, slots].tolist(), table[:, slots].tolist()
    for segment, slot in enumerate(slots.tolist()):
        pairs = slice(bounds[segment], bounds[segment + 1])
        rows = pair_row[pairs]
        for stacked in range(table.shape[0]):
            if ranks[stacked][segment]:
                address, rank = addresses[stacked][segment], ranks[stacked][segment]
                yield pairs, rows, slot, stacked, address, rank
