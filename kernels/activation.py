"""The gated activation between an MLP's gate/up and down products."""

import math

import torch
import triton
import triton.language as tl

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


@triton.jit
def _gated_activation_kernel(
    gate_up,  # [T, 2I]
    out,  # [T, I]
    gate_up_stride,
    out_stride,
    INTERMEDIATE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INTERMEDIATE
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, KIND) * up
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


def _check(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    assert kind in KINDS, f"kind is one of {KINDS}, not {kind!r}"
    num_tokens, intermediate = out.shape
    assert gate_up.shape == (num_tokens, 2 * intermediate), (
        f"gate_up is [T, 2I] and out [T, I], not {tuple(gate_up.shape)} and {tuple(out.shape)}"
    )
    assert gate_up.dtype == out.dtype, f"{gate_up.dtype} and {out.dtype} differ"
    assert gate_up.stride(1) == out.stride(1) == 1, "rows are contiguous"


def gated_activation_triton(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """`out = f(gate) · up`, where gate is the left half of `gate_up` and up the right half.

    gate_up: [T, 2I], out: [T, I] (written), of one dtype, rows contiguous, any row stride.
    kind: f is "silu" (`g · sigmoid(g)`), "gelu" (`g · Φ(g)`, by erf) or "gelu_tanh" (its tanh
    approximation). Computed in float32, rounded once. Moves 3·T·I elements. Raises
    AssertionError on other shapes, dtypes, strides or kinds. Method: Shazeer, "GLU Variants
    Improve Transformer" (2020); Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
    """
    _check(gate_up, kind, out)
    num_tokens, intermediate = out.shape
    _gated_activation_kernel[(num_tokens, triton.cdiv(intermediate, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        INTERMEDIATE=intermediate,
        KIND=kind,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def gated_activation_torch(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """Twin of `gated_activation_triton`."""
    _check(gate_up, kind, out)
    gate, up = gate_up.float().chunk(2, dim=1)  # [T, I] each
    if kind == "silu":
        activated = torch.nn.functional.silu(gate)
    else:
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        activated = torch.nn.functional.gelu(gate, approximate=approximate)
    out.copy_(activated * up)


gated_activation = define_op(gated_activation_triton, gated_activation_torch, mutates=("out",))
