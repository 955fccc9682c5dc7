"""Milliseconds per decode step, beside what the bytes alone would take.

    python -m profiles.decode --model D8,SmolLM2 --batch 1,8,32,128 --adapters none,one,mix8

Decode at these batch sizes is bound by memory: every step reads all weights once, of a mixture
those of the experts that its tokens chose. So a step is judged by the bytes it must move over the
read bandwidth that this card was just measured to have.

A request is 128 random tokens of prompt, greedy, end tokens ignored. A step's time is
(time of 288 tokens - time of 32) / 256, either from when the last row has its first token and the
quickest of three, through `Engine.generate`, so host work counts; "replay" is the same step's graph
replayed alone, back to back, at a shorter context. `--adapters` are the cases of
`profiles/shape_engine.py`. On a GPU the last columns are what `profiles/peers.py` holds: the goal,
and what vLLM and two versions of SGLang take on an H200.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine import Engine, SamplingParams
from engine.checkpoint import Checkpoint
from engine.errors import EngineError
from profiles.arguments import integers, names
from profiles.bandwidth import read_bandwidth
from profiles.expert_hits import count_expert_hits
from profiles.peers import PeerTimes, peer_times
from profiles.result_file import RESULTS, provenance, write_result
from profiles.running_batch import PROMPT_TOKENS, RunningBatch, random_prompts
from profiles.shape_engine import DISTINCT, RANK, adapter_names, random_adapters, shape_engine
from profiles.shapes import ORIGINS, SHAPES, open_shape
from profiles.step_bytes import step_bytes

SHORT, LONG = 32, 288
MEAN_CONTEXT = PROMPT_TOKENS + (SHORT + LONG) // 2
REPEATS = 3


def main() -> None:
    try:
        _run(_parse())
    except EngineError as error:  # D8 and M16 need a GPU's memory
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _run(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = read_bandwidth(device) if device.type == "cuda" else None
    if bandwidth:
        print(f"{torch.cuda.get_device_name()}: reads {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "decode",
        **provenance(options.commit),
        "graphs": options.graphs,
        "read_bandwidth_tb_per_s": bandwidth and round(bandwidth / 1e12, 3),
        "rows": rows,
    }
    print(
        f"{'model':<8} {'case':<5} {'batch':>5} {'ms/step':>8} {'replay':>8} {'GB':>7} "
        f"{'limit ms':>9} {'ratio':>6} {'goal':>6} {'vLLM':>6} {'SGLang':>6} {'newest':>6}"
    )
    for name in options.model:
        checkpoint = open_shape(name)
        with random_adapters(checkpoint, options.adapters, device) as paths:
            for lora in (True, False):
                cases = [case for case in options.adapters if (case != "off") == lora]
                used = paths if lora else {}
                for row in _measure(name, checkpoint, cases, used, options, bandwidth):
                    rows.append(row)
                    if options.output:  # after every row: what was measured is kept
                        write_result(RESULTS / options.output, result)
    print(json.dumps(result))


def _measure(
    name: str,
    checkpoint: Checkpoint,
    cases: list[str],
    paths: dict[str, Path],
    options: argparse.Namespace,
    bandwidth: float | None,
) -> Iterator[dict[str, Any]]:
    if not cases:
        return
    start = time.perf_counter()
    with shape_engine(
        checkpoint,
        paths,
        options.batch,
        PROMPT_TOKENS + LONG,
        lora=bool(paths) or "none" in cases,
        graphs=options.graphs,
        lora_backend=options.lora_backend,
    ) as engine:
        print(
            f"  ready after {time.perf_counter() - start:.1f} s, of which capture "
            f"{engine.stats().capture_seconds:.1f} s"
        )
        for case in cases:
            for batch in options.batch:
                names = adapter_names(case, batch)
                step_ms = _step_ms(engine, batch, names)
                with RunningBatch(engine, names, LONG) as running:
                    replay_ms = running.replay_ms()
                    hits = count_expert_hits(running.step_eagerly)
                moved = step_bytes(
                    checkpoint.architecture,
                    engine.dtype.itemsize,
                    batch,
                    MEAN_CONTEXT,
                    len({name for name in names if name}),
                    RANK,
                    hits,
                )
                row: dict[str, Any] = {
                    "model": name,
                    "case": case,
                    "batch": batch,
                    "ms_per_step": round(step_ms, 3),
                    "ms_per_replay": round(replay_ms, 3),
                    "gigabytes": round(moved.total / 1e9, 3),
                }
                if hits.experts:
                    row["experts_per_layer"] = round(hits.mean_experts, 1)
                if bandwidth:
                    row["limit_ms"] = round(moved.total / bandwidth * 1e3, 3)
                    row["ratio"] = round(row["ms_per_step"] / row["limit_ms"], 3)
                peers = peer_times(name, case, batch) if bandwidth else None
                if peers:
                    row["goal_ms"], row["best_peer_ms"] = peers.goal, peers.best
                print(
                    f"{name:<8} {case:<5} {batch:>5} {row['ms_per_step']:>8.3f} "
                    f"{row['ms_per_replay']:>8.3f} {row['gigabytes']:>7.2f} "
                    f"{row.get('limit_ms', '-'):>9} {row.get('ratio', '-'):>6}" + _beside(peers),
                    flush=True,
                )
                yield row


def _beside(peers: PeerTimes | None) -> str:
    """The columns of goal, vLLM, SGLang and its newest engine."""
    times = (peers.goal, peers.vllm, peers.sglang, peers.sglang_v2) if peers else ()
    return "".join(f" {time or '-':>6}" for time in times)


def _step_ms(engine: Engine, batch: int, names: list[str | None]) -> float:
    prompts = random_prompts(engine, batch)

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params, names)
        for error in (output.error for output in outputs if output.error):
            raise error
        # Without the prompts: those of a large batch take as long as a hundred steps, and what
        # differs in them from run to run would be taken for steps.
        start = max(output.metrics.first_token_time or math.inf for output in outputs)
        return max(output.metrics.finished_time or math.nan for output in outputs) - start

    seconds(8)  # adapters become resident, the allocator settles
    times = [(seconds(LONG), seconds(SHORT)) for _ in range(REPEATS)]
    longest, shortest = map(min, zip(*times, strict=True))
    return (longest - shortest) / (LONG - SHORT) * 1e3


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    shapes = "; ".join(f"{name}: {origin}" for name, origin in ORIGINS.items())
    parser.add_argument(
        "--model", type=names(SHAPES), default=["D8"], help=f"D8 by default. {shapes}"
    )
    parser.add_argument(
        "--batch", type=integers, default=[8], help="batch sizes, each with a graph; 8 by default"
    )
    parser.add_argument(
        "--adapters",
        type=names(DISTINCT),
        default=["none", "mix8"],
        help=f"of {', '.join(DISTINCT)}; none,mix8 by default",
    )
    parser.add_argument("--graphs", default="auto", help="as Engine takes it")
    parser.add_argument("--lora-backend", default="auto", help="as Engine takes it")
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument("--output", help="file name under profiles/results/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
