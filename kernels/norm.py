"""RMS normalisation of rows, alone or after adding a product, and its LoRA delta, to a residual.

`y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)`, in float32 throughout and rounded once
to the output's dtype. (Models whose reference rounds the normalised row before the product with
`weight` differ from this by that one rounding, in 16-bit dtypes only.) `lora_arguments` says what
the LoRA arguments are, `lora_expand` how a delta is added.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import (
    LORA_TABLES,
    Expand,
    lora_of,
    part_blocks,
    row_blocks,
    row_tensors,
)
from kernels.lora_expand import (
    fetch_slice,
    find_slice,
    first_ranks,
    row_delta,
    row_product,
    row_sums,
)
from kernels.op import define_op
from kernels.partials import check_partials, check_rows, sum_partials, sum_partials_torch

_ELEMENTS_PER_THREAD = 8  # one 16-byte load of a 16-bit dtype
_CHUNK_PER_THREAD = 2  # and so many are in work at once
_MAX_WARPS = 16
_AHEAD = 2  # chunks
_MAX_ROWS_BESIDE = 32  # up to here a product's program leaves room for one of the norm beside it
_REGISTERS = 40960  # of all threads of that
_COLUMNS_A_WARP = 256  # 16 ranks of so much of a 16-bit B are 64 registers a thread
_MAX_DELTA_ROWS = 64  # behind any product
_MAX_OWN_DELTA_ROWS = 128  # behind one that lets the norm up before its end


@triton.jit(do_not_specialize_on_alignment=LORA_TABLES)
def _rms_norm_kernel(
    x,  # [T, H], or [S, T, H] to be summed over S
    residual,  # [T, H] in place, or None
    shrunk,  # this and the next tensors None without LoRA
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_slot,
    weight,  # [H]
    out,  # [T, H]
    eps,
    weight_offset,
    partial_stride,
    x_stride,
    residual_stride,
    out_stride,
    PARTIALS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,  # of shrunk
    PART_STRIDE: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,  # columns that are in work at once
    AHEAD: tl.constexpr,  # of which so many more are under way
    EARLY: tl.constexpr,  # chunks of which B is read, and not only fetched, before the wait
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    CHUNKS: tl.constexpr = BLOCK // CHUNK
    blocks = tl.tuple(())  # of B, by chunk
    if shrunk is not None:
        slot = tl.load(row_slot + row)
        address, rank, scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 0, MAX_LORAS)
        for chunk in tl.static_range(EARLY):
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = column < HIDDEN
            block = first_ranks(address, arena, rank, column, inside, VECTOR, BLOCK_R)
            blocks = blocks + (block,)
        fetch_slice(address, arena, rank * HIDDEN, BLOCK * BLOCK_R, PDL and EARLY < CHUNKS)
    wait_for_inputs(PDL)
    if shrunk is not None:
        s_row = shrunk + row * SHRUNK_STRIDE
        sums = row_sums(s_row, rank, VECTOR, BLOCK_R, PARTS, PART_STRIDE)
    values, totals = tl.tuple(()), tl.tuple(())
    for step in tl.static_range(CHUNKS + AHEAD):
        if step < CHUNKS:
            column = step * CHUNK + tl.arange(0, CHUNK)
            mask = column < HIDDEN
            value = sum_partials(x + row * x_stride + column, mask, partial_stride, PARTIALS)
            if residual is not None:
                places = residual + row * residual_stride + column
                value += tl.load(places, mask=mask, other=0.0).to(tl.float32)
            values = values + (value,)
            if shrunk is not None and step >= EARLY:
                block = first_ranks(address, arena, rank, column, mask, VECTOR, BLOCK_R)
                blocks = blocks + (block,)
        if shrunk is not None and step >= AHEAD:
            totals = totals + (row_product(blocks[step - AHEAD], sums),)
    summed = tl.tuple(())
    for chunk in tl.static_range(CHUNKS):
        value = values[chunk]
        if residual is not None:
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            mask = column < HIDDEN
            if shrunk is not None:
                delta = row_delta(
                    totals[chunk],
                    address,
                    arena,
                    rank,
                    scaling,
                    s_row,
                    column,
                    mask,
                    VECTOR,
                    BLOCK_R,
                    ONE_BLOCK,
                    PARTS,
                    PART_STRIDE,
                )
                value = tl.where(rank > 0, value + delta, value)
            rounded = value.to(residual.dtype.element_ty)
            tl.store(residual + row * residual_stride + column, rounded, mask=mask)
            value = rounded.to(tl.float32)
        summed = summed + (value,)
    squares = summed[0] * summed[0]
    for chunk in tl.static_range(1, CHUNKS):
        squares += summed[chunk] * summed[chunk]
    inverse_rms = tl.rsqrt(tl.sum(squares) / HIDDEN + eps)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = column < HIDDEN
        scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + weight_offset
        result = summed[chunk] * inverse_rms * scale
        tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    lora: Expand | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    num_tokens, hidden = out.shape
    block = triton.next_power_of_2(hidden)
    num_warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)
    chunk = min(block, 32 * num_warps * _CHUNK_PER_THREAD)
    is_early = lora is not None and num_tokens > _MAX_ROWS_BESIDE
    _rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        *row_tensors(lora),
        weight,
        out,
        eps,
        weight_offset,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        PARTIALS=x.shape[0] if x.dim() == 3 else 1,
        HIDDEN=hidden,
        BLOCK=block,
        CHUNK=chunk,
        AHEAD=min(_AHEAD, block // chunk),
        EARLY=block // chunk if is_early else 0,
        **row_blocks(lora),
        **part_blocks(lora),
        num_warps=num_warps,
        maxnreg=None if lora is None or is_early else _REGISTERS // (32 * num_warps),
        **dependent_launch(x.device),
    )


def holds_delta(
    num_tokens: int, hidden: int, max_rank: int, dtype: torch.dtype, is_own: bool
) -> bool:
    """Whether `add_rms_norm` is the quicker way to add deltas, and not `add_expand` before
    `rms_norm`, which spreads a row over many programs.

    It is where the row's one program can read all of its B, of `dtype`, in no more time than the
    base product leaves it: with few rows it comes up beside a program of the product, has the
    cache fetch B and reads it in chunks; with more rows it holds B in registers before the product
    has ended, which takes one that `is_own`, not the library's. A rank whose rows of B do not
    start on 16 bytes is read after it, rank by rank.
    """
    block = triton.next_power_of_2(hidden)
    fits = block <= _MAX_WARPS * _COLUMNS_A_WARP and max_rank <= 16 and dtype.itemsize == 2
    return fits and num_tokens <= (_MAX_OWN_DELTA_ROWS if is_own else _MAX_DELTA_ROWS)


def _check(weight: torch.Tensor, *rows: torch.Tensor) -> None:
    hidden = rows[0].shape[1]
    assert weight.shape == (hidden,), f"weight is [{hidden}], not {tuple(weight.shape)}"
    assert weight.is_contiguous(), "weight is contiguous"
    check_rows(*rows)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor
) -> None:
    """`out = x / sqrt(mean(x²) + eps) · (weight + weight_offset)` by rows.

    x, out: [T, H] of one dtype, rows contiguous, any row stride; `out` is written and may be `x`.
    weight: [H] of any float dtype. One program a row; moves 2·T·H elements and the weight.
    Raises AssertionError on other shapes, dtypes or strides. Method: Zhang and Sennrich, "Root
    Mean Square Layer Normalization" (2019); `weight_offset` is 1 for Gemma's zero-centred weights.
    """
    _check(weight, x, out)
    _launch(x, None, None, weight, eps, weight_offset, out)


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor
) -> None:
    """Twin of `rms_norm_triton`."""
    _check(weight, x, out)
    value = x.float()  # [T, H]
    inverse_rms = torch.rsqrt(value.square().mean(dim=1, keepdim=True) + eps)  # [T, 1]
    out.copy_(value * inverse_rms * (weight.float() + weight_offset))


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
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
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    """`residual += x + delta`, then `out = rms_norm(residual)` of the sum as rounded to its dtype.

    x, residual, out: [T, H] of one dtype, rows contiguous, any row stride; `residual` and `out`
    are written, `out` may be `x`. Or x is partials of such a matrix, float32 [S, T, H]: then
    `residual` becomes (x[0] + x[1] + ...) + residual, added in float32 in this order. From shrunk
    to max_rank LoRA of one slice; takes shrunk in parts. weight: [H] of any float dtype. Moves x,
    3·T·H elements, the weight, and H·rank of B for each row with an adapter, all by the row's one
    program: see `holds_delta`. Raises AssertionError on other shapes, dtypes or strides.
    """
    _check(weight, residual, out)
    check_partials(x, residual)
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    tokens = residual.shape[0]
    tables = (b_ptrs, lora_ranks, scalings)
    lora = lora_of(tokens, 1, shrunk, arena, *tables, *rows, max_rank, takes_parts=True)
    _launch(x, residual, lora, weight, eps, weight_offset, out)


def add_rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
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
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> None:
    """Twin of `add_rms_norm_triton`."""
    _check(weight, residual, out)
    check_partials(x, residual)
    tokens, hidden = residual.shape
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    tables = (b_ptrs, lora_ranks, scalings)
    lora = lora_of(tokens, 1, shrunk, arena, *tables, *rows, max_rank, takes_parts=True)
    value = sum_partials_torch(x) + residual.float()
    residual.copy_(value if lora is None else value + lora.delta([hidden]))
    rms_norm_torch(residual, weight, eps, weight_offset, out)


rms_norm = define_op(rms_norm_triton, rms_norm_torch, mutates=("out",))
add_rms_norm = define_op(add_rms_norm_triton, add_rms_norm_torch, mutates=("residual", "out"))
