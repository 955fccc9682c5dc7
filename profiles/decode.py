"""Milliseconds per decode step, beside what the bytes alone would take.

    python -m profiles.decode --model D8,SmolLM2 --batch 1,8,32,128 --adapters none,one,mix8

Decode at these batch sizes is bound by memory: every step reads all weights once, of a mixture
those of the experts that its tokens chose. So a step is judged by the bytes it must move over the
read bandwidth that this card was just measured to have.

A request is 128 random tokens of prompt, greedy, end tokens ignored. A step's time is
(time of 288 tokens - time of 32) / 256, the median of three, through `Engine.generate`, so host
work counts; "replay" is the same step's graph replayed alone, back to back. Adapters of rank 16
sit on every linear layer, of a mixture on every expert too (not on the router): `none` uses none,
with LoRA enabled; `one` the same for all rows; `mix8` eight of them round robin; `off` is an
engine without adapter slots.
"""

import argparse
import json
import statistics
import tempfile
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
from profiles.expert_hits import ExpertHits, count_expert_hits
from profiles.random_adapters import save_random_adapter
from profiles.result_file import RESULTS, provenance, write_result
from profiles.shapes import ORIGINS, SHAPES, open_shape
from profiles.step_bytes import step_bytes

PROMPT_TOKENS, SHORT, LONG = 128, 32, 288
MEAN_CONTEXT = PROMPT_TOKENS + (SHORT + LONG) // 2
RANK = 16
REPEATS = 3
DISTINCT = {"off": 0, "none": 0, "one": 1, "mix8": 8}


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
        f"{'limit ms':>9} {'ratio':>6}"
    )
    for name in options.model:
        checkpoint = open_shape(name)
        with tempfile.TemporaryDirectory() as directory:
            paths = {}
            if any(DISTINCT[case] for case in options.adapters):
                paths = {
                    f"adapter{index}": save_random_adapter(
                        checkpoint.architecture, Path(directory, str(index)), RANK, index, device
                    )
                    for index in range(8)
                }
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
    largest = max(options.batch)
    tokens = PROMPT_TOKENS + LONG
    start = time.perf_counter()
    with Engine(
        checkpoint,
        adapters=paths,
        graphs=options.graphs,
        graph_batch_sizes=options.batch,
        max_batch_size=largest,
        max_seq_len=tokens,
        max_loras=8 if paths or "none" in cases else 0,
        max_lora_rank=RANK,
        kv_cache_tokens=largest * (tokens + 16),
        lora_backend=options.lora_backend,
        tokenizer=None,
    ) as engine:
        print(
            f"  ready after {time.perf_counter() - start:.1f} s, of which capture "
            f"{engine.stats().capture_seconds:.1f} s"
        )
        for case in cases:
            for batch in options.batch:
                names = [
                    f"adapter{row % DISTINCT[case]}" if DISTINCT[case] else None
                    for row in range(batch)
                ]
                step_ms = _step_ms(engine, batch, names)
                replay_ms, hits = _replay_ms(engine, batch, names)
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
                print(
                    f"{name:<8} {case:<5} {batch:>5} {row['ms_per_step']:>8.3f} "
                    f"{row['ms_per_replay']:>8.3f} {row['gigabytes']:>7.2f} "
                    f"{row.get('limit_ms', '-'):>9} {row.get('ratio', '-'):>6}",
                    flush=True,
                )
                yield row


def _prompts(engine: Engine, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, PROMPT_TOKENS)
    return torch.randint(0, engine.architecture.vocab_size, shape, generator=generator).tolist()


def _step_ms(engine: Engine, batch: int, names: list[str | None]) -> float:
    prompts = _prompts(engine, batch)

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        engine.generate(prompts, params, names)
        return time.perf_counter() - start

    seconds(8)  # adapters become resident, the allocator settles
    differences = [seconds(LONG) - seconds(SHORT) for _ in range(REPEATS)]
    return statistics.median(differences) / (LONG - SHORT) * 1e3


def _replay_ms(
    engine: Engine, batch: int, names: list[str | None], repeats: int = 50
) -> tuple[float, ExpertHits]:
    """The graph of a batch under way, replayed back to back without the engine's host work; and
    the experts that one more step of that batch chose.

    The replays draw tokens that nobody reads; the requests are aborted afterwards.
    """
    params = SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    prompts = _prompts(engine, batch)
    requests = [
        engine.add_request(prompt, params, name)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    for _ in range(batch * PROMPT_TOKENS // engine.config.prefill_chunk_tokens + 8):
        engine.step()
    graphs = engine.runner.graphs
    _synchronize(engine)
    start = time.perf_counter()
    for _ in range(repeats):
        graphs.run(batch, lambda buffers: None)
    _synchronize(engine)
    seconds = time.perf_counter() - start
    hits = count_expert_hits(lambda: engine.runner.step_eagerly(batch))
    for request in requests:
        engine.abort(request)
    while engine.has_unfinished():
        engine.step()
    return seconds / repeats * 1e3, hits


def _synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    shapes = "; ".join(f"{name}: {origin}" for name, origin in ORIGINS.items())
    parser.add_argument("--model", type=names, default=["D8"], help=f"D8 by default. {shapes}")
    parser.add_argument(
        "--batch", type=integers, default=[8], help="batch sizes, each with a graph; 8 by default"
    )
    parser.add_argument(
        "--adapters",
        type=names,
        default=["none", "mix8"],
        help=f"of {', '.join(DISTINCT)}; none,mix8 by default",
    )
    parser.add_argument("--graphs", default="auto", help="as Engine takes it")
    parser.add_argument("--lora-backend", default="auto", help="as Engine takes it")
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument("--output", help="file name under profiles/results/")
    options = parser.parse_args()
    unknown = [case for case in options.adapters if case not in DISTINCT]
    if unknown:
        parser.error(f"--adapters {unknown[0]}: known are {', '.join(DISTINCT)}")
    unknown = [name for name in options.model if name not in SHAPES]
    if unknown:
        parser.error(f"--model {unknown[0]}: known are {', '.join(SHAPES)}")
    return options


if __name__ == "__main__":
    main()
