"""What becomes of a token's heads: normalised, rotated and stored, or stored as they are.

Device functions of `rotary`, which knows where a head comes from and goes to. A head is two
halves, `left` and `right`, columns i and i + D/2 of which rotation mixes.
"""

import triton
import triton.language as tl


@triton.jit
def load_angles(angles, HALF: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """(cos, sin) of a position's row of the table, for each head [GROUP, BLOCK]: as wide as heads,
    so that they are loaded in the layout of heads."""
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (GROUP, BLOCK))
    cos = tl.load(angles + column, mask=column < HALF, other=0.0)
    sin = tl.load(angles + HALF + column, mask=column < HALF, other=0.0)
    return cos, sin


@triton.jit
def rotate_heads(
    source,  # [heads, D]
    target,  # [heads, D], may be source
    left_delta,  # [GROUP, BLOCK] to be added first, or None
    right_delta,
    rank,  # of the delta; 0: there is nothing to add
    norm_weight,  # [D], or None
    norm_eps,
    norm_weight_offset,
    cos,  # [GROUP, BLOCK]
    sin,
    first_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise if asked, rotate, and store heads [first_head, first_head + GROUP)."""
    head = first_head + tl.arange(0, GROUP)
    column = tl.arange(0, BLOCK)
    mask = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    offset = head[:, None] * (2 * HALF) + column[None, :]
    left = tl.load(source + offset, mask=mask, other=0.0).to(tl.float32)  # [G, D/2]
    right = tl.load(source + HALF + offset, mask=mask, other=0.0).to(tl.float32)  # [G, D/2]
    if left_delta is not None:
        left = tl.where(rank > 0, left + left_delta, left)
        right = tl.where(rank > 0, right + right_delta, right)
    if norm_weight is not None:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)  # [G]
        inverse_rms = tl.rsqrt(squares / (2 * HALF) + norm_eps)[:, None]
        weights = tl.broadcast_to(norm_weight + column[None, :], (GROUP, BLOCK))
        left_weight = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
        right_weight = tl.load(weights + HALF, mask=mask, other=0.0).to(tl.float32)
        left = left * inverse_rms * (left_weight + norm_weight_offset)
        right = right * inverse_rms * (right_weight + norm_weight_offset)
    # Which of the two products is fused with the sum is said here: left to the compiler it may
    # differ between a launch with deltas and one without, and with it a base row's last bit.
    rotated_left = tl.fma(left, cos, -(right * sin)).to(target.dtype.element_ty)
    rotated_right = tl.fma(right, cos, left * sin).to(target.dtype.element_ty)
    tl.store(target + offset, rotated_left, mask=mask)
    tl.store(target + HALF + offset, rotated_right, mask=mask)


@triton.jit
def copy_heads(
    source,  # [heads, D]
    target,  # [heads, D]
    left_delta,  # [GROUP, BLOCK] to be added, or None
    right_delta,
    rank,  # of the delta; 0: there is nothing to add
    first_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store heads [first_head, first_head + GROUP)."""
    head = first_head + tl.arange(0, GROUP)
    column = tl.arange(0, BLOCK)
    mask = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    offset = head[:, None] * (2 * HALF) + column[None, :]
    left = tl.load(source + offset, mask=mask)
    right = tl.load(source + HALF + offset, mask=mask)
    if left_delta is not None:
        left = tl.where(rank > 0, (left.to(tl.float32) + left_delta).to(left.dtype), left)
        right = tl.where(rank > 0, (right.to(tl.float32) + right_delta).to(right.dtype), right)
    tl.store(target + offset, left, mask=mask)
    tl.store(target + HALF + offset, right, mask=mask)
