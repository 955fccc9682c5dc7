"""Steady decode for a profiler that records between cudaProfilerStart and cudaProfilerStop.

    profiles/nsys.sh --model D8 --batch 8 --adapters mix8

Captures the graph and brings a batch under way unrecorded, then takes `--steps` engine steps, each
one replay, within the profiler's range and within an nvtx range of that name. Engine phases have
nvtx ranges of their own where `ENCORE_NVTX=1` is set, as nsys.sh does.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import EngineError
from engine.trace import Trace
from profiles.arguments import positive
from profiles.running_batch import PROMPT_TOKENS, RunningBatch
from profiles.shape_engine import DISTINCT, adapter_names, random_adapters, shape_engine
from profiles.shapes import SHAPES, open_shape

WARM_STEPS = 8


def main() -> None:
    try:
        _run(_parse())
    except EngineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _run(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint, case = open_shape(options.model), options.adapters
    tokens = options.steps + WARM_STEPS + 64
    with random_adapters(checkpoint, [case], device) as paths:
        engine = shape_engine(
            checkpoint, paths, [options.batch], PROMPT_TOKENS + tokens, lora=case != "off"
        )
    with engine, RunningBatch(engine, adapter_names(case, options.batch), tokens) as running:
        record_steps(running, options.steps)
    print(f"{options.model}, batch {options.batch}, {case}: {options.steps} steps recorded")


def record_steps(running: RunningBatch, steps: int) -> None:
    """`steps` engine steps within the profiler's range, after a few that are not."""
    for _ in range(WARM_STEPS):
        running.engine.step()
    running.synchronize()
    with profiler_range(running.engine.device), Trace(True).range("steady steps"):
        for _ in range(steps):
            running.engine.step()
        running.synchronize()


@contextmanager
def profiler_range(device: torch.device) -> Iterator[None]:
    """cudaProfilerStart to cudaProfilerStop; nothing without CUDA."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.steady",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=list(SHAPES), default="D8", help="D8 by default")
    parser.add_argument("--batch", type=positive, default=8, help="rows; 8 by default")
    parser.add_argument(
        "--adapters", choices=list(DISTINCT), default="mix8", help="mix8 by default"
    )
    parser.add_argument("--steps", type=positive, default=20, help="recorded; 20 by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
