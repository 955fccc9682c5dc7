"""The gated activation between an MLP's gate/up and down products, with the first's LoRA deltas.

`lora_arguments` says what the LoRA arguments are, `lora_expand` how a delta is added.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.lora_arguments import (
    FEW_ROWS,
    LORA_TABLES,
    lora_of,
    row_blocks,
    row_columns,
    row_tiles,
    tile_blocks,
)
from kernels.lora_expand import (
    find_rows,
    find_slice,
    first_ranks,
    row_delta,
    row_product,
    row_sums,
    tile_delta,
    tile_sums,
)
from kernels.op import define_op

KINDS = ("silu", "gelu", "gelu_tanh")

_BLOCK = 512  # columns a program; small, so that one row alone still spreads over the GPU
_NUM_WARPS = 2

_INVERSE_SQRT_2 = tl.constexpr(1 / math.sqrt(2))
_SQRT_8_OVER_PI = tl.constexpr(math.sqrt(8 / math.pi))
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """The activation of a float32 tile, in float32."""
    if KIND == "silu":
        return gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * _INVERSE_SQRT_2))
    else:  # gelu_tanh: (1 + tanh(u)) / 2 is sigmoid(2u), with u = sqrt(2/pi) · (g + 0.044715 g³)
        tl.static_assert(KIND == "gelu_tanh", "unknown kind of activation")
        cubed = gate * gate * gate * _GELU_CUBIC  # Triton 3.9 interprets tensor · constant only so
        return gate * tl.sigmoid((gate + cubed) * _SQRT_8_OVER_PI)


@triton.jit(do_not_specialize_on_alignment=LORA_TABLES)
def _gated_activation_kernel(
    gate_up,  # [T, 2I]
    shrunk,  # this and the next tensors None without LoRA
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_slot,
    out,  # [T, I]
    gate_up_stride,
    out_stride,
    INTERMEDIATE: tl.constexpr,
    KIND: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INTERMEDIATE
    if shrunk is not None:
        slot = tl.load(row_slot + row)
        gate_b, gate_rank, gate_scaling = find_slice(
            b_ptrs, lora_ranks, scalings, slot, 0, MAX_LORAS
        )
        up_b, up_rank, up_scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 1, MAX_LORAS)
        gate_first = first_ranks(gate_b, arena, gate_rank, column, mask, VECTOR, BLOCK_R)
        up_first = first_ranks(up_b, arena, up_rank, column, mask, VECTOR, BLOCK_R)
    wait_for_inputs(PDL, HOLD=shrunk is not None)
    if shrunk is not None:
        gate_s = shrunk + row * SHRUNK_STRIDE
        up_s = gate_s + MAX_RANK
        gate_sums = row_sums(gate_s, gate_rank, VECTOR, BLOCK_R)
        up_sums = row_sums(up_s, up_rank, VECTOR, BLOCK_R)
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    if shrunk is not None:
        gate_delta = row_delta(
            row_product(gate_first, gate_sums),
            gate_b,
            arena,
            gate_rank,
            gate_scaling,
            gate_s,
            column,
            mask,
            VECTOR,
            BLOCK_R,
            ONE_BLOCK,
        )
        up_delta = row_delta(
            row_product(up_first, up_sums),
            up_b,
            arena,
            up_rank,
            up_scaling,
            up_s,
            column,
            mask,
            VECTOR,
            BLOCK_R,
            ONE_BLOCK,
        )
        gate = tl.where(gate_rank > 0, gate + gate_delta, gate)
        up = tl.where(up_rank > 0, up + up_delta, up)
    result = activate(gate, KIND) * up
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens", "max_segments"],
    do_not_specialize_on_alignment=LORA_TABLES,
)
def _gated_activation_tile_kernel(
    gate_up,  # [T, 2I]
    shrunk,
    arena,
    b_ptrs,
    lora_ranks,
    scalings,
    row_order,
    seg_indptr,
    weight_indices,
    num_segments,
    out,  # [T, I]
    gate_up_stride,
    out_stride,
    num_tokens,
    max_segments,
    INTERMEDIATE: tl.constexpr,
    KIND: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < INTERMEDIATE
    slot, rows, live, any_live = find_rows(
        row_order,
        seg_indptr,
        weight_indices,
        num_segments,
        num_tokens,
        max_segments,
        tl.program_id(1),
        BLOCK_M,
        BLOCK_SEGMENTS,
    )
    gate_b, gate_rank, gate_scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 0, MAX_LORAS)
    up_b, up_rank, up_scaling = find_slice(b_ptrs, lora_ranks, scalings, slot, 1, MAX_LORAS)
    gate_first = first_ranks(gate_b, arena, gate_rank, column, inside, VECTOR, BLOCK_R)
    up_first = first_ranks(up_b, arena, up_rank, column, inside, VECTOR, BLOCK_R)
    wait_for_inputs(PDL, HOLD=True)
    if not any_live:  # of the tiles that could be, most are not there
        return
    gate_s = shrunk + rows * SHRUNK_STRIDE
    up_s = gate_s + MAX_RANK
    gate_sums = tile_sums(gate_s, live, gate_rank, VECTOR, BLOCK_R)
    up_sums = tile_sums(up_s, live, up_rank, VECTOR, BLOCK_R)
    mask = live[:, None] & inside[None, :]
    source = gate_up + rows[:, None] * gate_up_stride + column[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    up = tl.load(source + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    gate_delta = tile_delta(
        gate_first,
        gate_sums,
        gate_b,
        arena,
        gate_rank,
        gate_scaling,
        gate_s,
        live,
        column,
        inside,
        VECTOR,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
    )
    up_delta = tile_delta(
        up_first,
        up_sums,
        up_b,
        arena,
        up_rank,
        up_scaling,
        up_s,
        live,
        column,
        inside,
        VECTOR,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
    )
    gate = tl.where(gate_rank > 0, gate + gate_delta, gate)
    up = tl.where(up_rank > 0, up + up_delta, up)
    result = (activate(gate, KIND) * up).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * out_stride + column[None, :], result, mask=mask)


def _check(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    assert kind in KINDS, f"kind is one of {KINDS}, not {kind!r}"
    num_tokens, intermediate = out.shape
    assert gate_up.shape == (num_tokens, 2 * intermediate), (
        f"gate_up is [T, 2I] and out [T, I], not {tuple(gate_up.shape)} and {tuple(out.shape)}"
    )
    assert gate_up.dtype == out.dtype, f"{gate_up.dtype} and {out.dtype} differ"
    assert gate_up.stride(1) == out.stride(1) == 1, "rows are contiguous"


def gated_activation_triton(
    gate_up: torch.Tensor,
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
    kind: str,
    out: torch.Tensor,
) -> None:
    """`out = f(gate) · up`, where gate is the left half of `gate_up` and up the right half.

    gate_up: [T, 2I], out: [T, I] (written), of one dtype, rows contiguous, any row stride; from
    shrunk to max_rank LoRA of two slices, whose deltas are added to gate and to up before f.
    kind: f is "silu" (`g · sigmoid(g)`), "gelu" (`g · Φ(g)`, by erf) or "gelu_tanh" (its tanh
    approximation). Computed in float32, rounded once. Moves 3·T·I elements, and 2·I·rank of B for
    each row up to FEW_ROWS rows, for each tile of rows of one slot above. Raises AssertionError on
    other shapes, dtypes, strides or kinds. Method: Shazeer, "GLU Variants Improve Transformer"
    (2020); Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
    """
    _check(gate_up, kind, out)
    num_tokens, intermediate = out.shape
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    lora = lora_of(num_tokens, 2, shrunk, arena, b_ptrs, lora_ranks, scalings, *rows, max_rank)
    if lora is not None and num_tokens > FEW_ROWS:
        blocks = tile_blocks(lora)
        column_tiles = triton.cdiv(intermediate, blocks["BLOCK_N"])
        _gated_activation_tile_kernel[(column_tiles, row_tiles(lora, blocks["BLOCK_M"]))](
            gate_up,
            shrunk,
            arena,
            b_ptrs,
            lora_ranks,
            scalings,
            row_order,
            seg_indptr,
            weight_indices,
            num_segments,
            out,
            gate_up.stride(0),
            out.stride(0),
            INTERMEDIATE=intermediate,
            KIND=kind,
            MAX_RANK=max_rank,
            **blocks,
            num_warps=4,
            num_stages=1,
            **dependent_launch(gate_up.device),
        )
        return
    block, num_warps = _BLOCK, _NUM_WARPS
    if lora is not None:
        block, num_warps = row_columns(num_tokens)
    _gated_activation_kernel[(num_tokens, triton.cdiv(intermediate, block))](
        gate_up,
        shrunk,
        arena,
        b_ptrs,
        lora_ranks,
        scalings,
        row_slot,
        out,
        gate_up.stride(0),
        out.stride(0),
        INTERMEDIATE=intermediate,
        KIND=kind,
        MAX_RANK=max_rank,
        BLOCK=block,
        **row_blocks(lora),
        num_warps=num_warps,
        **dependent_launch(gate_up.device),
    )


def gated_activation_torch(
    gate_up: torch.Tensor,
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
    kind: str,
    out: torch.Tensor,
) -> None:
    """Twin of `gated_activation_triton`."""
    _check(gate_up, kind, out)
    num_tokens, intermediate = out.shape
    rows = (row_slot, row_order, seg_indptr, weight_indices, num_segments)
    lora = lora_of(num_tokens, 2, shrunk, arena, b_ptrs, lora_ranks, scalings, *rows, max_rank)
    wide = gate_up.float()
    if lora is not None:
        wide = wide + lora.delta([intermediate, intermediate])
    gate, up = wide.chunk(2, dim=1)  # [T, I] each
    if kind == "silu":
        activated = torch.nn.functional.silu(gate)
    else:
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        activated = torch.nn.functional.gelu(gate, approximate=approximate)
    out.copy_(activated * up)


gated_activation = define_op(gated_activation_triton, gated_activation_torch, mutates=("out",))
