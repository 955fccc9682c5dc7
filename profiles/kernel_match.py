"""Which op launched a kernel of a graph replay.

In an eager run every op is marked, and a kernel belongs to the mark that was open when it was
launched. A replay launches the same kernels without ops: the n-th of a name is the n-th of that
name in the eager run.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from profiles.device_trace import DeviceTrace, HostSpan, Kernel
from profiles.op_log import MARK


@dataclass(frozen=True)
class Launch:
    """A kernel of the eager run, in order of launch; `op` is the number of the op's mark."""

    name: str
    op: int | None
    stream: int


@dataclass(frozen=True)
class StepKernel:
    """A kernel of one replay, from the replay's start. `launch` is its place in the eager run's
    order, a half behind the one before where that run has no such kernel. `lane`: 0 is the main
    stream's."""

    name: str
    start_us: float
    us: float
    op: int | None
    launch: float
    lane: int

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def launches(trace: DeviceTrace) -> list[Launch]:
    """The kernels of an eager run of marked ops, in order of launch."""
    marks = sorted(
        (mark for mark in trace.marks if mark.name.startswith(MARK)), key=lambda m: m.start_us
    )
    starts = [mark.start_us for mark in marks]
    called: dict[int | None, HostSpan] = {call.correlation: call for call in trace.calls}
    hosts: dict[int | None, HostSpan] = {op.external_id: op for op in trace.ops}
    called.pop(None, None)
    hosts.pop(None, None)

    def launched_at(kernel: Kernel) -> float | None:
        host = called.get(kernel.correlation) or hosts.get(kernel.external_id)
        return host.start_us if host is not None else None

    def op_at(time: float | None) -> int | None:
        if time is None:
            return None
        index = bisect_right(starts, time) - 1
        if index < 0 or time > marks[index].start_us + marks[index].us:
            return None
        return int(marks[index].name.removeprefix(MARK))

    found, last = [], float("-inf")
    for kernel in trace.kernels:
        time = launched_at(kernel)
        last = last if time is None else time
        found.append((last, Launch(kernel.name, op_at(time), kernel.stream)))
    found.sort(key=lambda pair: pair[0])  # stable: a kernel of unknown launch stays in its place
    return [launch for _, launch in found]


def match(replay: Sequence[Kernel], eager: Sequence[Launch]) -> list[StepKernel]:
    """Each kernel of a replay with its op, in order of start.

    What is left over by name is matched by order where both sides are left with as many: a
    library may choose another kernel under capture.
    """
    places: defaultdict[str, deque[int]] = defaultdict(deque)
    for index, launch in enumerate(eager):
        places[launch.name].append(index)
    ordered = sorted(replay, key=lambda kernel: (kernel.start_us, kernel.end_us))
    at = [places[kernel.name].popleft() if places[kernel.name] else None for kernel in ordered]
    left = sorted(index for queue in places.values() for index in queue)
    if len(left) == sum(place is None for place in at):
        rest = iter(left)
        at = [next(rest) if place is None else place for place in at]
    streams = lanes(eager)
    start = ordered[0].start_us if ordered else 0.0
    kernels, last = [], -1.0
    for kernel, place in zip(ordered, at, strict=True):
        last = place if place is not None else int(last) + 0.5
        source = eager[place] if place is not None else None
        kernels.append(
            StepKernel(
                kernel.name,
                kernel.start_us - start,
                kernel.us,
                source.op if source else None,
                last,
                streams[source.stream] if source else 0,
            )
        )
    return kernels


def lanes(eager: Sequence[Launch]) -> dict[int, int]:
    """The eager run's streams by lane: the one with most launches is lane 0, the main one."""
    counts = Counter(launch.stream for launch in eager)
    return {stream: lane for lane, (stream, _) in enumerate(counts.most_common())}


def unmatched(kernels: Sequence[StepKernel]) -> list[str]:
    """Names of kernels that no op is known for."""
    return sorted({kernel.name for kernel in kernels if kernel.op is None})


def short_name(name: str, width: int = 48) -> str:
    """A kernel's name without its C++ return type, namespaces' filler and template arguments."""
    name = re.sub(r"^void ", "", name.replace("(anonymous namespace)::", ""))
    name = re.split(r"[<(]", name, maxsplit=1)[0] or name
    return name if len(name) <= width else name[: width - 1] + "…"
