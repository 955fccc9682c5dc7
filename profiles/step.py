"""Where the time of one decode step goes: its kernels, one by one.

    python -m profiles.step --model D8 --batch 8 --adapters mix8 --picture step.png

The graph of a batch under way is replayed under the profiler, which gives each kernel's start and
duration; the same step run eagerly tells which op launched it, and the op's arguments how many
bytes it must move. So each kernel stands beside the share that it reaches of the read bandwidth
that this card was just measured to have. Activations come out of the cache, so a share above one
is possible; a share far below one in a kernel of many megabytes is time to win.

The critical path is what the step's end waited for; "gap" is the time between a kernel on it and
the one before, in which the step stood still. Where it is negative the kernel had been launched
ahead and stood waiting for so long; "own us" is without that, and sums and shares go by it.
Kernels beside the path cost nothing. The profiler itself makes gaps wider: the step's time without
it is printed with the sums.

`--picture` needs matplotlib; `--from FILE.json` draws a result that was written elsewhere. `--keep`
leaves the trace files, which Perfetto and chrome://tracing show.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from engine.errors import EngineError
from profiles.arguments import positive
from profiles.bandwidth import read_bandwidth
from profiles.device_trace import replays_of, trace_device
from profiles.kernel_match import launches, match, unmatched
from profiles.op_log import log_ops, mark_ops, missing_counts
from profiles.result_file import RESULTS, provenance, write_result
from profiles.running_batch import PROMPT_TOKENS, RunningBatch
from profiles.shape_engine import DISTINCT, adapter_names, random_adapters, shape_engine
from profiles.shapes import ORIGINS, SHAPES, open_shape
from profiles.timeline import Timeline, own_us

TOKENS = 288  # of a request; the measurement takes about a hundred
REPLAYS = 11


def main() -> None:
    options = _parse()
    if options.picture:  # before minutes are spent
        from profiles.step_picture import check_picture, draw_step

        check_picture(options.picture)
    try:
        result = read_result(options.source) if options.source else _measure(options)
    except EngineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    print_tables(result)
    if options.output:
        write_result(RESULTS / options.output, result)
    if options.picture:
        draw_step(result, options.picture)
    print(json.dumps(result))


def read_result(path: Path) -> dict[str, Any]:
    """A result of this benchmark: its file, or any output of which it is the last line."""
    try:
        text = path.read_text()
        try:
            result = json.loads(text)
        except json.JSONDecodeError:
            result = json.loads(text.rstrip().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise SystemExit(f"--from {path}: {error}") from None
    if not isinstance(result, dict) or result.get("benchmark") != "step":
        raise SystemExit(f"--from {path}: no result of profiles.step")
    return result


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise SystemExit("profiles.step needs a GPU; --from draws a result written elsewhere")
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    checkpoint, case = open_shape(options.model), options.adapters
    names = adapter_names(case, options.batch)
    with random_adapters(checkpoint, [case], device) as paths:
        engine = shape_engine(
            checkpoint,
            paths,
            [options.batch],
            PROMPT_TOKENS + TOKENS,
            lora=case != "off",
            lora_backend=options.lora_backend,
        )
    with engine, RunningBatch(engine, names, TOKENS) as running:
        replay_ms = running.replay_ms()
        timeline, spans_us = trace_step(running, bandwidth, options.keep)
    return {
        "benchmark": "step",
        **provenance(options.commit),
        "model": options.model,
        "batch": options.batch,
        "adapters": case,
        "read_bandwidth_tb_per_s": round(bandwidth / 1e12, 3),
        "ms_per_replay": round(replay_ms, 4),
        "ms_per_profiled_replay": [round(us / 1e3, 4) for us in spans_us],
        **summary(timeline),
    }


def trace_step(
    running: RunningBatch, bandwidth: float, keep: Path | None = None
) -> tuple[Timeline, list[float]]:
    """The replay of median length, and the shortest, the median and the longest in µs. What they
    were read from stays in the directory `keep`."""
    ops = log_ops(running.step_eagerly)
    if keep:
        write_result(keep / "ops.json", {"ops": [vars(op) for op in ops]})
    marked: list[int] = []
    eager = trace_device(
        lambda: marked.append(mark_ops(running.step_eagerly)),
        with_host_ops=True,
        keep=keep and keep / "eager.json",
    )
    if marked != [len(ops)]:
        raise SystemExit(f"two eager runs of one step ran {len(ops)} and {marked[0]} ops")

    def replay() -> None:
        for _ in range(REPLAYS):
            running.replay()
            running.synchronize()  # they stay apart

    trace = trace_device(replay, keep=keep and keep / "replays.json")
    replays = replays_of(trace.kernels, REPLAYS)
    replays.sort(key=lambda kernels: max(k.end_us for k in kernels) - kernels[0].start_us)
    spans = [max(k.end_us for k in kernels) - kernels[0].start_us for kernels in replays]
    middle = replays[len(replays) // 2]
    kernels = match(middle, launches(eager))
    return Timeline(kernels, ops, bandwidth), [spans[0], statistics.median(spans), spans[-1]]


def summary(timeline: Timeline) -> dict[str, Any]:
    """What the benchmark says of a replay: one layer in full, head and sampling, the sums."""
    layers = timeline.layers
    index = len(layers) // 2
    layer = timeline.rows(layers[index]) if layers else []
    head = timeline.rows(range(layers[-1].stop if layers else 0, len(timeline.ops)))
    return {
        "kernels_per_step": len(timeline.kernels),
        "kernels_per_layer": len(layer),
        "layers": len(layers),
        "path": timeline.path_sums(),
        "by_kind": timeline.by_kind(),
        "by_op": timeline.by_op(),
        "layer": {"index": index, "us": _length_us(layer), "kernels": layer},
        "head": {"us": _length_us(head), "kernels": head},
        "ops_without_count": missing_counts(timeline.ops),
        "kernels_without_op": unmatched(timeline.kernels),
    }


def _length_us(rows: list[dict[str, Any]]) -> float:
    return round(max((row["start_us"] + row["us"] for row in rows), default=0.0), 3)


def print_tables(result: dict[str, Any]) -> None:
    """The tables of a result; the JSON line is the caller's."""
    print(
        f"{result['hardware']}: reads {result['read_bandwidth_tb_per_s']} TB/s\n"
        f"{result['model']}, batch {result['batch']}, adapters {result['adapters']}"
    )
    layer, head = result["layer"], result["head"]
    _print_kernels(
        f"layer {layer['index'] + 1} of {result['layers']}: {layer['us']:.1f} us",
        layer["kernels"],
    )
    _print_kernels(f"after the last layer: {head['us']:.1f} us", head["kernels"])
    for title, rows in (("kind", result["by_kind"]), ("op", result["by_op"])):
        print(
            f"\n{title + ', over the step':<44}{'kernels':>8} {'us':>9} {'beside':>8} "
            f"{'MB':>10} {'share':>6}"
        )
        for row in rows:
            share = "-" if row["share"] is None else f"{row['share']:.2f}"
            print(
                f"{row['name']:<44}{row['kernels']:>8} {row['us']:>9.1f} {row['beside_us']:>8.1f} "
                f"{row['megabytes']:>10.2f} {share:>6}"
            )
    path, (least, median, most) = result["path"], result["ms_per_profiled_replay"]
    print(
        f"\nreplay alone {result['ms_per_replay']:.3f} ms; under the profiler {median:.3f} "
        f"({least:.3f} to {most:.3f})\n"
        f"critical path: {path['kernels']} of {result['kernels_per_step']} kernels "
        f"({result['kernels_per_layer']} a layer), {path['kernels_us']:.0f} us of kernels + "
        f"{path['gaps_us']:.0f} of gaps - {path['overlaps_us']:.0f} of overlaps = "
        f"{path['span_us']:.0f}; beside it {path['beside_us']:.0f}"
    )
    for what, key in (
        ("ops whose bytes nothing counts", "ops_without_count"),
        ("kernels whose op is not known", "kernels_without_op"),
    ):
        if result[key]:
            print(f"{what}: {', '.join(result[key])}")


def _print_kernels(title: str, rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{title}\n{'start':>8} {'us':>8} {'gap':>7} {'own us':>7} {'MB':>9} {'share':>6}  "
        f"{'op':<32} kernel"
    )
    for row in rows:
        gap = f"{row['gap_us']:.2f}" if "gap_us" in row else "beside"
        megabytes = f"{row['megabytes']:.3f}" if "megabytes" in row else "-"
        share = f"{row['share']:.2f}" if row.get("share") is not None else "-"
        op = ("  | " if row["lane"] else "") + row["op"]
        print(
            f"{row['start_us']:>8.2f} {row['us']:>8.2f} {gap:>7} {own_us(row):>7.2f} "
            f"{megabytes:>9} {share:>6}  "
            f"{op:<32} {row['kernel']}"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shapes = "; ".join(f"{name}: {origin}" for name, origin in ORIGINS.items())
    parser.add_argument(
        "--model", choices=list(SHAPES), default="D8", help=f"D8 by default. {shapes}"
    )
    parser.add_argument("--batch", type=positive, default=8, help="rows; 8 by default")
    parser.add_argument(
        "--adapters", choices=list(DISTINCT), default="mix8", help="mix8 by default"
    )
    parser.add_argument("--lora-backend", default="auto", help="as Engine takes it")
    parser.add_argument("--picture", type=Path, help="a file to draw, PNG or what matplotlib knows")
    parser.add_argument("--from", dest="source", type=Path, help="a result to show and draw")
    parser.add_argument("--keep", type=Path, help="a directory for the profiler's trace files")
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument("--output", help="file name under profiles/results/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
