"""What the GPU did while something ran, by the profiler's records: kernels, copies, API calls.

Knows nothing of ops or steps. Records come through the profiler's trace file, whose fields are
the same from one release of torch to the next.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
API = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill on the device. Those of one graph launch share a `correlation`."""

    name: str
    start_us: float
    us: float
    stream: int
    correlation: int | None
    external_id: int | None = None
    category: str = "kernel"

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


@dataclass(frozen=True)
class HostSpan:
    """An API call, an op or a mark on the host."""

    name: str
    start_us: float
    us: float
    correlation: int | None
    external_id: int | None


@dataclass(frozen=True)
class DeviceTrace:
    """In order of start."""

    kernels: tuple[Kernel, ...]
    calls: tuple[HostSpan, ...] = ()
    ops: tuple[HostSpan, ...] = ()
    marks: tuple[HostSpan, ...] = ()

    @classmethod
    def from_events(cls, events: Sequence[Mapping[str, Any]]) -> "DeviceTrace":
        """From the `traceEvents` of a trace file."""
        spans = [event for event in events if event.get("ph") == "X"]
        spans.sort(key=lambda event: float(event["ts"]))
        return cls(
            tuple(_kernel(e) for e in spans if e.get("cat") in ON_DEVICE),
            tuple(_host_span(e) for e in spans if e.get("cat") in API),
            tuple(_host_span(e) for e in spans if e.get("cat") == "cpu_op"),
            tuple(_host_span(e) for e in spans if e.get("cat") == "user_annotation"),
        )


def trace_device(
    run: Callable[[], None], with_host_ops: bool = False, keep: Path | None = None
) -> DeviceTrace:
    """Profile `run` until the device is done. Without host ops only CUPTI records, which costs
    the host the least. The trace file stays at `keep`. Needs CUDA."""
    # CUPTI that is torn down and started again has crashed on graphs captured before.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    activities = [ProfilerActivity.CUDA]
    if with_host_ops:
        activities.append(ProfilerActivity.CPU)
    with profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = keep or Path(directory, "trace.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    trace = DeviceTrace.from_events(events)
    if not trace.kernels:
        kinds = sorted({str(event.get("cat")) for event in events})
        raise SystemExit(f"the profiler recorded no kernel (categories: {', '.join(kinds)})")
    return trace


def replays_of(kernels: Sequence[Kernel], expected: int) -> list[list[Kernel]]:
    """The kernels of each graph replay, in order of start.

    Kernels of one launch share its correlation; groups of another size than most (the first,
    where the profiler set in late) are left out. Records without that are cut into `expected`
    equal parts.
    """
    groups: dict[int | None, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.correlation, []).append(kernel)
    graphs = [group for key, group in groups.items() if key is not None and len(group) > 1]
    if graphs:
        sizes = [len(group) for group in graphs]
        usual = max(set(sizes), key=lambda size: (sizes.count(size), size))
        return [group for group in graphs if len(group) == usual]
    count, rest = divmod(len(kernels), expected)
    if rest or not count:
        raise SystemExit(f"{len(kernels)} kernels are not those of {expected} equal replays")
    return [list(kernels[at * count : (at + 1) * count]) for at in range(expected)]


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Time in which at least one of them ran."""
    return sum(end - start for start, end in _busy_spans(kernels))


def _busy_spans(kernels: Sequence[Kernel]) -> Iterator[tuple[float, float]]:
    start = end = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if kernel.start_us > end:
            if end > start:
                yield start, end
            start = kernel.start_us
        end = max(end, kernel.end_us)
    if end > start:
        yield start, end


def _kernel(event: Mapping[str, Any]) -> Kernel:
    args = event.get("args", {})
    stream = args.get("stream", event.get("tid", 0))
    return Kernel(
        name=str(event["name"]),
        start_us=float(event["ts"]),
        us=float(event.get("dur", 0)),
        stream=int(stream) if str(stream).lstrip("-").isdigit() else 0,
        correlation=args.get("correlation"),
        external_id=args.get("External id"),
        category=str(event["cat"]),
    )


def _host_span(event: Mapping[str, Any]) -> HostSpan:
    args = event.get("args", {})
    return HostSpan(
        str(event["name"]),
        float(event["ts"]),
        float(event.get("dur", 0)),
        args.get("correlation"),
        args.get("External id"),
    )
