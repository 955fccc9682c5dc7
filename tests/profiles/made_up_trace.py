"""The profiler's records of a step as a GPU would leave them, made up from a log of ops.

Every op gives a kernel of its name, some give two; `sgemm_a` runs on a side stream beside the
product behind it. A microsecond lies between kernels that follow each other.
"""

from collections.abc import Sequence
from typing import Any

from profiles.op_log import MARK, LoggedOp

MAIN, SIDE = 7, 20
SPLIT = {"sample": "_sample_rows_kernel"}
MICROSECONDS = {"linear": 40.0, "paged_attention": 8.0, "sample": 9.0}

Event = dict[str, Any]


def kernel_names(op: LoggedOp) -> list[str]:
    name = "nvjet_tst_64x8" if op.name == "linear" else f"_{op.name}_kernel"
    return [name, SPLIT[op.name]] if op.name in SPLIT else [name]


def eager_events(ops: Sequence[LoggedOp]) -> list[Event]:
    """Marks, the API calls in them, and the kernels of those."""
    events, now, correlation = [], 1000.0, 100
    for number, op in enumerate(ops):
        kernels = kernel_names(op)
        events.append(span("user_annotation", f"{MARK}{number}", now, 20.0))
        for name in kernels:
            correlation += 1
            args = {"correlation": correlation}
            events.append(span("cuda_runtime", "cudaLaunchKernel", now + 5, 2.0, **args))
            args["stream"] = SIDE if op.name == "sgemm_a" else MAIN
            events.append(span("kernel", name, now + 9, 1.0, **args))
            now += 3
        now += 25
    return [*events, {"ph": "M", "name": "process_name"}]


def replay_events(
    ops: Sequence[LoggedOp], correlation: int = 5, start: float = 5000.0
) -> list[Event]:
    """The kernels of one graph launch, all on one stream as far as the records say."""
    events, now, branch_end = [], start, start
    for op in ops:
        for name in kernel_names(op):
            us = MICROSECONDS.get(op.name, 2.0)
            if op.name == "sgemm_b":
                now = max(now, branch_end + 1)
            events.append(span("kernel", name, now, us, correlation=correlation, stream=MAIN))
            if op.name == "sgemm_a":
                branch_end = now + us
            else:
                now += us + 1
    return events


def span(category: str, name: str, start_us: float, us: float, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": us, "args": args}
