"""What becomes of a token's heads: normalised, rotated and stored, or stored as they are.

Device functions of `rotary`, which knows where a head comes from and goes to. A head is two
halves, `left` and `right` [GROUP, BLOCK], columns i and i + D/2 of which rotation mixes.
"""

import triton
import triton.language as tl


@triton.jit
def load_heads(
    source,  # [heads, D]
    head,
    inside,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both halves of GROUP heads from `head` on, those that are `inside`."""
    group, column = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    mask = inside[:, None] & (column < HALF)[None, :]
    places = source + (head + group)[:, None] * (2 * HALF) + column[None, :]
    return tl.load(places, mask=mask, other=0.0), tl.load(places + HALF, mask=mask, other=0.0)


@triton.jit
def store_heads(
    left,
    right,
    target,  # [heads, D]
    head,
    inside,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The reverse, in the target's dtype."""
    group, column = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    mask = inside[:, None] & (column < HALF)[None, :]
    places = target + (head + group)[:, None] * (2 * HALF) + column[None, :]
    tl.store(places, left.to(target.dtype.element_ty), mask=mask)
    tl.store(places + HALF, right.to(target.dtype.element_ty), mask=mask)


@triton.jit
def rotate_heads(
    left,
    right,
    left_delta,  # [GROUP, BLOCK] float32 to be added first, or None
    right_delta,
    rank,  # of the delta; 0: there is nothing to add
    norm_weight,  # [D], or None
    norm_eps,
    norm_weight_offset,
    cos,  # [BLOCK]
    sin,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise if asked, and rotate: both halves in float32."""
    column = tl.arange(0, BLOCK)
    in_half = column < HALF
    left, right = left.to(tl.float32), right.to(tl.float32)
    if left_delta is not None:
        left = tl.where(rank > 0, left + left_delta, left)
        right = tl.where(rank > 0, right + right_delta, right)
    if norm_weight is not None:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)  # [G]
        inverse_rms = tl.rsqrt(squares / (2 * HALF) + norm_eps)[:, None]
        left_weight = tl.load(norm_weight + column, mask=in_half, other=0.0).to(tl.float32)
        right_weight = tl.load(norm_weight + HALF + column, mask=in_half, other=0.0).to(tl.float32)
        left = left * inverse_rms * (left_weight + norm_weight_offset)[None, :]
        right = right * inverse_rms * (right_weight + norm_weight_offset)[None, :]
    cos, sin = cos[None, :], sin[None, :]
    # Which of the two products is fused with the sum is said here: left to the compiler it may
    # differ between a launch with deltas and one without, and with it a base row's last bit.
    return tl.fma(left, cos, -(right * sin)), tl.fma(right, cos, left * sin)


@triton.jit
def add_delta(half, delta, rank):
    """One half of heads that are stored as they are, but for a delta, or None."""
    if delta is not None:
        half = tl.where(rank > 0, (half.to(tl.float32) + delta).to(half.dtype), half)
    return half
