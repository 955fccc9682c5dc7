"""How long the GPU had nothing to do between the replays of engine steps.

From the profiler's device records alone, by interval arithmetic.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from profiles.device_trace import DeviceTrace, HostSpan, Kernel, busy_us, replays_of

SYNCHRONISES = ("Synchronize", "cudaMemcpy", "cuMemcpy")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


def idle_between_replays(trace: DeviceTrace, steps: int) -> dict[str, Any]:
    """Of a steady run of `steps` steps, each with one replay: means per step in µs, from the
    first replay's start to the last one's.

    `idle` is the time between replays in which nothing ran, `other_kernels` that in which copies
    and small kernels did, `replay` from a replay's first kernel to its last, of which
    `gaps_in_replay` had no kernel running.
    """
    replays = replays_of([k for k in trace.kernels if k.category == "kernel"], steps)
    if len(replays) < 2:
        raise SystemExit(f"records of {len(replays)} replays, not of {steps}")
    own = {id(kernel) for replay in replays for kernel in replay}
    others = [kernel for kernel in trace.kernels if id(kernel) not in own]
    idle = between = inside = gaps = 0.0
    longest = []
    for replay, following in pairwise(replays):
        start, end = replay[0].start_us, max(kernel.end_us for kernel in replay)
        gap = max(0.0, following[0].start_us - end)
        used = busy_us(_clipped(others, end, end + gap))
        longest.append(gap - used)
        idle += gap - used
        between += used
        inside += end - start
        gaps += end - start - busy_us(replay)
    pairs = len(replays) - 1
    span = replays[-1][0].start_us - replays[0][0].start_us
    return {
        "replays": len(replays),
        "step_us": round(span / pairs, 2),
        "idle_us": round(idle / pairs, 2),
        "idle_share": round(idle / span, 5),
        "longest_idle_us": round(max(longest), 2),
        "other_kernels_us": round(between / pairs, 2),
        "replay_us": round(inside / pairs, 2),
        "gaps_in_replay_us": round(gaps / pairs, 2),
    }


def calls_per_step(trace: DeviceTrace) -> dict[str, float]:
    """Calls of the CUDA API by name, a graph launch being a step: between the first launch and
    the last. Whatever synchronises shows here, also where nobody meant to."""
    launches = [i for i, call in enumerate(trace.calls) if _names(call, GRAPH_LAUNCHES)]
    if len(launches) < 2:
        return {}
    within = trace.calls[launches[0] : launches[-1]]
    counts = Counter(call.name for call in within)
    steps = len(launches) - 1
    return {name: round(count / steps, 3) for name, count in sorted(counts.items())}


def waits_and_copies(calls: dict[str, float]) -> dict[str, float]:
    """Those of `calls_per_step` that wait for the device or copy."""
    return {name: count for name, count in calls.items() if any(s in name for s in SYNCHRONISES)}


def copies_per_step(trace: DeviceTrace, steps: int) -> dict[str, float]:
    """Copies and fills on the device by kind, per step."""
    counts = Counter(k.name for k in trace.kernels if k.category != "kernel")
    return {name: round(count / steps, 3) for name, count in sorted(counts.items())}


def _names(call: HostSpan, names: Sequence[str]) -> bool:
    return any(call.name.startswith(name) for name in names)


def _clipped(kernels: Sequence[Kernel], start: float, end: float) -> list[Kernel]:
    """The parts of kernels that lie between two times."""
    return [
        Kernel(
            kernel.name,
            max(kernel.start_us, start),
            min(kernel.end_us, end) - max(kernel.start_us, start),
            kernel.stream,
            None,
        )
        for kernel in kernels
        if kernel.start_us < end and kernel.end_us > start
    ]
