"""What the host costs a steady decode: time in which the GPU waits for it, and where its own goes.

    python -m profiles.host --model D8,SmolLM2 --batch 8,128

Through `Engine.step()`, greedy, with eight adapters round robin unless --adapters says else. The
host launches a step before it reads the one before, so its work hides behind the replay until it
takes longer than that. Of one batch:

    alone     the graph replayed back to back, without the engine's host work
    steady    steps by the wall clock; a step's time over a replay's is what the host adds
    timed     the same with a clock around the host's parts, which itself costs a little; steps
              are split by whether pages were reserved, and copies and waits are counted in each
    marked    steps with two of the GPU's events around each replay: the time between replays,
              the events' and the copies' own included
    traced    128 steps under the profiler, device and API records only: the GPU's idle time
              between replays. The profiler slows the host, at times for 2 ms at once while it
              takes a buffer, which shows where steps are shorter than that
    changing  every tenth step a request leaves and another joins

Host-to-device copies are the engine's own count (`stats()`), waits are synchronisations with
events. What the API records show besides is printed as well. Without a GPU all but
`marked` and `traced` run, with nothing to wait for.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine import Engine
from engine.detokenizer import IncrementalDetokenizer
from engine.errors import EngineError
from memory.readback import Readback
from profiles.arguments import integers, names, positive
from profiles.device_trace import trace_device
from profiles.gpu_idle import (
    calls_per_step,
    copies_per_step,
    idle_between_replays,
    waits_and_copies,
)
from profiles.host_clock import HostClock
from profiles.replay_marks import ReplayMarks
from profiles.result_file import RESULTS, provenance, write_result
from profiles.running_batch import PROMPT_TOKENS, RunningBatch, random_prompts
from profiles.shape_engine import DISTINCT, adapter_names, random_adapters, shape_engine
from profiles.shapes import ORIGINS, SHAPES, open_shape
from profiles.step_counts import StepCounter, by_case

CHANGES_EVERY = 10
TRACED_STEPS = 128  # at most: a step leaves some hundred records
REPLAYS = 50
PARTS = (
    "schedule",
    "write tables",
    "stage",
    "launch replay",
    "start readback",
    "wait for the GPU",
    "read",
    "take tokens",
    "detokenize",
    "make outputs",
    "rest of the step",
)


def main() -> None:
    try:
        _run(_parse())
    except EngineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _run(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "host",
        **provenance(options.commit),
        "adapters": options.adapters,
        "steps": options.steps,
        "rows": rows,
    }
    for name in options.model:
        checkpoint, case = open_shape(name), options.adapters
        with random_adapters(checkpoint, [case], device) as paths:
            engine = shape_engine(
                checkpoint,
                paths,
                options.batch,
                PROMPT_TOKENS + _tokens(options.steps),
                lora=case != "off",
                tokenizer=options.tokenizer,
            )
        with engine:
            for batch in options.batch:
                keep = options.keep and options.keep / f"{name}-{batch}.json"
                found = measure(engine, batch, case, options.steps, keep)
                row = {"model": name, "batch": batch, **found}
                rows.append(row)
                print_row(row)
                if options.output:
                    write_result(RESULTS / options.output, result)
    print(json.dumps(result))


def _tokens(steps: int) -> int:
    """Of a request: all runs, and the replays that move a batch on besides."""
    return 4 * steps + TRACED_STEPS + 64


def measure(
    engine: Engine, batch: int, case: str, steps: int, keep: Path | None = None
) -> dict[str, Any]:
    """All runs of one batch size; the trace file stays at `keep`."""
    rows = adapter_names(case, batch)
    with RunningBatch(engine, rows, _tokens(steps)) as running:
        # In the middle of the steady run's contexts: attention grows with them.
        _step(running, max(0, (steps - REPLAYS) // 2))
        replay_ms = running.replay_ms(REPLAYS)
    with RunningBatch(engine, rows, _tokens(steps)) as running:
        running.synchronize()
        steady_ms = _steps_ms(running, steps)
        counter, parts = timed_steps(running, steps)
        row: dict[str, Any] = {}
        if engine.device.type == "cuda":
            marked = marked_steps(running, steps)
            traced = min(steps, TRACED_STEPS)
            trace = trace_device(lambda: _step(running, traced), keep=keep)
            calls = calls_per_step(trace)
            row = {
                "marked": marked,
                "gpu": idle_between_replays(trace, traced),
                "api_waits_and_copies_per_step": waits_and_copies(calls),
                "device_copies_per_step": copies_per_step(trace, traced),
            }
        changing = changing_steps(running, case, steps)
    return {
        "ms_per_step": round(steady_ms, 4),
        "ms_per_replay": round(replay_ms, 4),
        "host_share": round(1 - replay_ms / steady_ms, 5),
        **row,
        "host_us_per_step": parts,
        "cases": by_case(counter.steps)
        + [found for found in by_case(changing.steps) if found["case"] == "composition changed"],
    }


def timed_steps(running: RunningBatch, steps: int) -> tuple[StepCounter, dict[str, float]]:
    """Steady steps with a clock around the host's parts: µs a step by part."""
    with HostClock() as clock:
        watch_parts(clock, running.engine)
        counter = _counted_steps(clock, running, steps)
        parts = {part: clock.seconds.get(part, 0.0) / steps * 1e6 for part in PARTS}
    return counter, {part: round(us, 2) for part, us in parts.items()}


def marked_steps(running: RunningBatch, steps: int) -> dict[str, float]:
    """Steady steps between events of the GPU: see `ReplayMarks.between_replays`."""
    with ReplayMarks(running.engine) as marks:
        _step(running, steps)
        running.synchronize()
    return marks.between_replays()


def changing_steps(running: RunningBatch, case: str, steps: int) -> StepCounter:
    """Every tenth step a request is aborted and another, of the next adapter, joins."""
    engine = running.engine
    prompts = random_prompts(engine, running.size)
    waiting = adapter_names(case, running.size + 1)

    def change(step: int) -> None:
        if step % CHANGES_EVERY == 0:
            engine.abort(running.requests.pop(0))
            name = waiting[step // CHANGES_EVERY % len(waiting)]
            prompt = prompts[step // CHANGES_EVERY % len(prompts)]
            running.requests.append(engine.add_request(prompt, running.params, name))

    with HostClock() as clock:
        return _counted_steps(clock, running, steps, change)


def watch_parts(clock: HostClock, engine: Engine) -> None:
    """Every part of a step on the host, by the methods that do it."""
    runner, loop = engine.runner, engine._loop
    clock.watch(engine, "step", "make outputs")
    clock.watch(engine, "_advance", "rest of the step")
    clock.watch(engine._scheduler, "plan", "schedule")
    clock.watch(runner._admission, "admit", "write tables")
    clock.watch(runner._admission, "write_pages", "write tables")
    clock.watch(runner, "_stage", "stage")
    for captured in runner.graphs._captured.values():
        clock.watch(captured.graph, "replay", "launch replay")
    clock.watch(runner._readback, "start", "start readback")
    clock.watch(loop, "_collect", "take tokens")
    clock.watch(Readback, "wait", "read")
    if engine.device.type == "cuda":
        clock.watch(torch.cuda.Event, "synchronize", "wait for the GPU")
    clock.watch(IncrementalDetokenizer, "append", "detokenize")


def _counted_steps(
    clock: HostClock,
    running: RunningBatch,
    steps: int,
    before: Callable[[int], None] | None = None,
) -> StepCounter:
    engine, counter, waits = running.engine, StepCounter(), [0]

    def see_wait(*_: Any) -> None:
        waits[0] += 1

    clock.observe(engine.runner, "launch", counter.see_plan)
    if engine.device.type == "cuda":
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            clock.observe(kind, "synchronize", see_wait)
    engine.step()  # what ran before the watching is behind
    running.synchronize()
    clock.reset()
    counter.steps.clear()
    for step in range(steps):
        if before is not None:
            before(step)
        copies, waits[0] = engine.runner.host_to_device_copies, 0
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        counter.end_step(engine.runner.host_to_device_copies - copies, waits[0], seconds)
    return counter


def _step(running: RunningBatch, steps: int) -> None:
    for _ in range(steps):
        running.engine.step()


def _steps_ms(running: RunningBatch, steps: int) -> float:
    start = time.perf_counter()
    _step(running, steps)
    running.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def print_row(row: dict[str, Any]) -> None:
    """The tables of one model and batch."""
    print(
        f"\n{row['model']}, batch {row['batch']}: {row['ms_per_step']:.3f} ms a step, the replay "
        f"alone {row['ms_per_replay']:.3f}: the host adds {row['host_share']:.2%}"
    )
    if "gpu" in row:
        marked, gpu = row["marked"], row["gpu"]
        print(
            f"  marked: {marked['step_us']:.1f} us a step, {marked['between_us']:.1f} between "
            f"replays ({marked['between_share']:.2%}, median {marked['median_between_us']:.1f}, at "
            f"most {marked['longest_between_us']:.1f})"
        )
        print(
            f"  traced: {gpu['step_us']:.1f} us a step, {gpu['idle_us']:.1f} idle between replays "
            f"({gpu['idle_share']:.2%}, at most {gpu['longest_idle_us']:.1f}), "
            f"{gpu['other_kernels_us']:.1f} of other kernels and copies"
        )
        for title, key in (
            ("API calls that wait or copy", "api_waits_and_copies_per_step"),
            ("copies on the device", "device_copies_per_step"),
        ):
            found = ", ".join(f"{name} {count:g}" for name, count in row[key].items())
            print(f"  {title}, per step: {found or 'none'}")
    parts = row["host_us_per_step"]
    print("  host us a step: " + ", ".join(f"{part} {us:.1f}" for part, us in parts.items()))
    work = sum(us for part, us in parts.items() if part != "wait for the GPU")
    print(f"  of which work {work:.1f}")
    for case in row["cases"]:
        print(
            f"  {case['steps']:>5} steps, {case['case']}: {case['ms_per_step']:.3f} ms; "
            f"copies (steps) {_spread(case['copies_per_step'])}; "
            f"waits {_spread(case['waits_per_step'])}",
            flush=True,
        )


def _spread(histogram: dict[str, int]) -> str:
    return ", ".join(f"{value} ({count})" for value, count in histogram.items())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shapes = "; ".join(f"{name}: {origin}" for name, origin in ORIGINS.items())
    parser.add_argument(
        "--model", type=names(SHAPES), default=["D8"], help=f"D8 by default. {shapes}"
    )
    parser.add_argument("--batch", type=integers, default=[8, 128], help="8,128 by default")
    parser.add_argument(
        "--adapters", choices=list(DISTINCT), default="mix8", help="mix8 by default"
    )
    parser.add_argument("--steps", type=positive, default=256, help="of each run; 256 by default")
    parser.add_argument("--tokenizer", help="as Engine takes it, to detokenize; none by default")
    parser.add_argument("--keep", type=Path, help="a directory for the profiler's trace files")
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument("--output", help="file name under profiles/results/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
