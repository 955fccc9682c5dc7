"""The weighted sum of each row's experts, and of the experts that every row shares.

`out[t] = sum_j topk_weights[t, j] * pairs[t * k + j] (+ shared[t] * sigmoid(shared_gate[t]))`, in
float32, in the order j = 0 .. k - 1, the shared part last, rounded once. `add_pair` and
`add_shared` are the steps of that sum for kernels that must give the same bits.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.op import define_op

_BLOCK = 512  # columns a program: two warps of 16-byte loads, k of them in flight a thread
_NUM_WARPS = 2


@triton.jit
def add_pair(total, expert, weight, value):
    """`total + weight * value` in one rounding; `total` alone where the pair has no expert (-1).

    A skipped value or weight may be NaN. All float32; `expert` and `weight` are scalars.
    """
    return tl.where(expert >= 0, tl.fma(value, weight, total), total)


@triton.jit
def add_shared(total, shared, shared_stride, shared_gate, gate_stride, row, columns, mask):
    """`total` [columns] plus the shared experts' part of `row`, an int64 scalar.

    shared [T, H] and shared_gate [T, 1] are pointers with row strides, either None: without
    `shared` nothing is added, without `shared_gate` it counts in full.
    """
    if shared is not None:
        value = tl.load(shared + row * shared_stride + columns, mask=mask, other=0.0)
        value = value.to(tl.float32)
        if shared_gate is not None:
            gate = tl.load(shared_gate + row * gate_stride).to(tl.float32)
            total = tl.fma(value, tl.sigmoid(gate), total)
        else:
            total += value
    return total


@triton.jit
def _moe_combine_kernel(
    pairs,  # [T * k, H]
    topk_ids,  # int32[T, k]
    topk_weights,  # float32[T, k]
    shared,  # [T, H] or None
    shared_gate,  # [T, 1] or None
    out,  # [T, H]
    pairs_stride,
    shared_stride,
    gate_stride,
    out_stride,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(topk_ids + pair)
        weight = tl.load(topk_weights + pair)
        source = pairs + pair * pairs_stride + columns
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        total = add_pair(total, expert, weight, value)  # skips pairs without an expert
    total = add_shared(total, shared, shared_stride, shared_gate, gate_stride, row, columns, mask)
    tl.store(out + row * out_stride + columns, total.to(out.dtype.element_ty), mask=mask)


def _check(
    pairs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    (num_tokens, top_k), hidden = topk_ids.shape, out.shape[1]
    shapes: list[tuple[str, torch.Tensor, tuple[int, int]]] = [
        ("pairs", pairs, (num_tokens * top_k, hidden)),
        ("topk_weights", topk_weights, (num_tokens, top_k)),
        ("out", out, (num_tokens, hidden)),
    ]
    assert shared is not None or shared_gate is None, "shared_gate without shared"
    if shared is not None:
        shapes.append(("shared", shared, (num_tokens, hidden)))
    if shared_gate is not None:
        shapes.append(("shared_gate", shared_gate, (num_tokens, 1)))
    for name, tensor, shape in shapes:
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.stride(1) == 1 or shape[1] == 1, f"{name}'s rows are not contiguous"
    assert topk_ids.dtype == torch.int32, f"topk_ids is {topk_ids.dtype}, not int32"
    assert topk_weights.dtype == torch.float32, f"topk_weights is {topk_weights.dtype}, not float32"
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        assert tensor.is_contiguous(), f"{name} is not contiguous"


def moe_combine_triton(
    pairs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`out[t] = sum_j topk_weights[t, j] * pairs[t * k + j]`, plus the shared experts' part.

    pairs: [T * k, H], topk_ids: int32[T, k], topk_weights: float32[T, k], shared: [T, H] or None,
    shared_gate: [T, 1] or None (None: 1, else sigmoid of it), out: [T, H] (written). Activations
    float32, float16 or bfloat16, rows contiguous, any row stride. A pair of id -1 is skipped and
    may hold NaN; a row without pairs gets its shared part, or zeros. Sums in float32 in the order
    of j, the shared part last, rounded once. Raises AssertionError on other shapes, dtypes or
    strides.
    """
    _check(pairs, topk_ids, topk_weights, shared, shared_gate, out)
    (num_tokens, top_k), hidden = topk_ids.shape, out.shape[1]
    _moe_combine_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
        pairs,
        topk_ids,
        topk_weights,
        shared,
        shared_gate,
        out,
        pairs.stride(0),
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        out.stride(0),
        HIDDEN=hidden,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **dependent_launch(pairs.device),
    )


def moe_combine_torch(
    pairs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Twin of `moe_combine_triton`, in the same order."""
    _check(pairs, topk_ids, topk_weights, shared, shared_gate, out)
    top_k = topk_ids.shape[1]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for j in range(top_k):
        value = topk_weights[:, j, None] * pairs[j::top_k].float()  # [T, H]
        total = torch.where(topk_ids[:, j, None] >= 0, total + value, total)
    if shared is not None:
        part = shared.float()
        total += part if shared_gate is None else part * torch.sigmoid(shared_gate.float())
    out.copy_(total)


moe_combine = define_op(moe_combine_triton, moe_combine_torch, mutates=("out",))
