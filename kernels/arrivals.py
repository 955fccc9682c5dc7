"""Programs of one launch that leave parts behind, and the last of them to arrive, which joins them.

Each stores its part and counts itself on a counter, an int32 in memory that is 0 before the launch
and 0 again after it. Which program is the last does not show: it takes the parts in their order,
and loads them past the cache of its own multiprocessor (".cg"), where old ones may lie.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def arrives_last(arrival, expected):
    """Count this program at the counter `arrival`: whether it is the last of `expected`.

    What it stored before is seen by the last one. That one finds the counter back at 0.
    """
    tl.debug_barrier()  # every thread's part lies there before the arrival is counted
    is_last = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == expected - 1
    if is_last:
        tl.store(arrival, 0)
    return is_last


@triton.jit
def sum_in_order(places, mask, parts, stride):
    """float32 sum of `parts` that lie `stride` apart from the tile `places` on, one after the
    other; four are asked for at a time."""
    total = tl.zeros(places.shape, tl.float32)
    for first in range(0, parts, 4):
        part0 = _part(places, mask, first, parts, stride)
        part1 = _part(places, mask, first + 1, parts, stride)
        part2 = _part(places, mask, first + 2, parts, stride)
        part3 = _part(places, mask, first + 3, parts, stride)
        total = total + part0 + part1 + part2 + part3
    return total


@triton.jit
def sum_at_once(places, mask, stride, PARTS: tl.constexpr):
    """The same of so few PARTS that all are asked for before one is added."""
    total = tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(places + part * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _part(places, mask, part, parts, stride):
    """One of the parts; 0 if there is none."""
    there = mask & (tl.zeros(mask.shape, tl.int32) + part < parts)
    return tl.load(places + part * stride, mask=there, other=0.0, cache_modifier=".cg")


def check_arrivals(arrivals: torch.Tensor, needed: int) -> None:
    """At least `needed` counters."""
    assert arrivals.dtype == torch.int32, f"arrivals is {arrivals.dtype}, not int32"
    assert arrivals.is_contiguous(), "arrivals is not contiguous"
    assert arrivals.numel() >= needed, f"{arrivals.numel()} arrivals, {needed} needed"
