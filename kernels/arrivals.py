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


def check_arrivals(arrivals: torch.Tensor, needed: int) -> None:
    """At least `needed` counters."""
    assert arrivals.dtype == torch.int32, f"arrivals is {arrivals.dtype}, not int32"
    assert arrivals.is_contiguous(), "arrivals is not contiguous"
    assert arrivals.numel() >= needed, f"{arrivals.numel()} arrivals, {needed} needed"
