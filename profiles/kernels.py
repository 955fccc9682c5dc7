"""Microseconds per launch of the mixture-of-experts kernels, beside the bytes they move.

    python -m profiles.kernels moe
    python -m profiles.kernels moe --sweep     # times configurations of the grouped GEMM

One layer of bfloat16 experts, by default the shapes of Qwen3-30B-A3B (128 experts, 8 a row, hidden
2048, intermediate 768). Launches are captured in one graph and replayed; each takes other experts
than the one before, so that the caches do not serve what a step would read. `gemm` is gate/up and
down together, `grouped_mm` the same through torch on pairs that are sorted already. The `lora`
kernels serve a mix of 8 adapters of rank 16 on every expert; the two that fold them into
activation and combine stand beside the plain ones.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.activation import gated_activation
from kernels.lora_arguments import NO_LORA
from kernels.moe_align import moe_align_block_size
from kernels.moe_combine import moe_combine
from kernels.moe_gemm import moe_gemm
from kernels.moe_gemm_config import moe_block_size_m
from kernels.moe_lora_down import moe_lora_down
from kernels.moe_lora_gate_up import moe_lora_gate_up
from kernels.moe_lora_shrink import moe_lora_shrink, moe_shrink_arrivals, moe_shrink_split_k
from kernels.moe_route import moe_route
from kernels.moe_route_parts import route_arrivals, scratch_shape
from profiles.arguments import integers
from profiles.bandwidth import read_bandwidth
from profiles.launch_time import launch_us
from profiles.moe_adapters import ExpertAdapters
from profiles.moe_layer import NO_SORT, MoeLayer, MoeShape, MoeStep, SortBuffers, routed_step
from profiles.moe_sweep import sweep
from profiles.result_file import RESULTS, provenance, write_result

NUM_ADAPTERS, RANK = 8, 16


@dataclass(frozen=True)
class Timed:
    """A kernel (or two), what launches it for step i and how many bytes that moves."""

    name: str
    launch: Callable[[int], None]
    moved: int


def main() -> None:
    options = _parse()
    if options.sweep and not torch.cuda.is_available():
        raise SystemExit("--sweep needs a GPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = MoeLayer.random(options.shape, device)
    if options.sweep:
        sweep(layer, options.rows, options.prefill)
        return
    bandwidth = read_bandwidth(device) if device.type == "cuda" else None
    adapters = ExpertAdapters.random(options.shape, NUM_ADAPTERS, RANK, device)
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "kernels moe",
        **provenance(options.commit),
        "shape": vars(options.shape),
        "read_bandwidth_tb_per_s": bandwidth and round(bandwidth / 1e12, 3),
        "rows": rows,
    }
    print(f"{'rows':>5} {'active':>6} {'kernel':<20} {'us':>8} {'MB':>9} {'TB/s':>6}")
    for count in options.rows:
        for row in _measure(layer, adapters, count, device):
            rows.append(row)
            print(
                f"{row['rows']:>5} {row['active']:>6} {row['kernel']:<20} {row['us']:>8.2f} "
                f"{row['megabytes']:>9.2f} {row['tb_per_s']:>6.2f}",
                flush=True,
            )
    if options.output:
        write_result(RESULTS / options.output, result)
    print(json.dumps(result))


def _measure(
    layer: MoeLayer, adapters: ExpertAdapters, rows: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    shape, active = layer.shape, layer.shape.active(rows)
    block_size_m = moe_block_size_m(rows * shape.top_k, shape.experts)
    # Each launch takes other experts; few rows take many launches to go round all adapters.
    launches = 16 if device.type == "cuda" else 1
    turns = launches * max(1, 8 // rows)
    steps = [routed_step(shape, rows, active, block_size_m, turn, device) for turn in range(turns)]
    kernels = _base_kernels(layer, steps, active) + _lora_kernels(layer, adapters, steps)
    for kernel in kernels:
        us = launch_us(kernel.launch, len(steps), device)
        yield {
            "rows": rows,
            "active": active,
            "kernel": kernel.name,
            "us": round(us, 2),
            "megabytes": round(kernel.moved / 1e6, 3),
            "tb_per_s": round(kernel.moved / us / 1e6, 3),
        }


def _base_kernels(layer: MoeLayer, steps: list[MoeStep], active: int) -> list[Timed]:
    shape, first = layer.shape, steps[0]
    num_pairs = first.ids.numel()

    def gate_up(step: MoeStep, sort: SortBuffers) -> None:
        size = step.block_size_m
        moe_gemm(step.x, layer.gate_up, step.ids, *sort, size, shape.top_k, step.gate_up)

    def down(step: MoeStep, sort: SortBuffers) -> None:
        moe_gemm(step.inner, layer.down, step.ids, *sort, step.block_size_m, 1, step.down)

    def both(step: MoeStep, sort: SortBuffers) -> None:
        gate_up(step, sort)
        down(step, sort)

    router = torch.randn(shape.experts, shape.hidden, device=first.x.device).bfloat16()
    routed_weights, routed_ids = torch.empty_like(first.weights), torch.empty_like(first.ids)
    rows, element_size = first.x.shape[0], first.x.element_size()
    parts = scratch_shape(rows, shape.hidden, shape.experts, element_size)
    scratch = torch.empty(parts, device=first.x.device)
    arrivals = torch.zeros(route_arrivals(rows), dtype=torch.int32, device=first.x.device)

    def route(step: MoeStep) -> None:
        nothing = (None, None, None, None, None, None, None, None)
        moe_route(step.x, router, *nothing, True, routed_weights, routed_ids, scratch, arrivals)

    def align(step: MoeStep) -> None:
        ids, blocks, end = step.sort
        assert ids is not None
        assert blocks is not None
        assert end is not None
        moe_align_block_size(step.ids, shape.experts, step.block_size_m, ids, blocks, end)

    around_gate_up = _bytes(first.x, first.gate_up)
    around_down = _bytes(first.inner, first.down)
    gate_up_bytes = active * _bytes(layer.gate_up[0]) + around_gate_up
    down_bytes = active * _bytes(layer.down[0]) + around_down
    timed = [
        Timed("route", lambda i: route(steps[i]), _bytes(router, first.x)),
        Timed("align", lambda i: align(steps[i]), _bytes(first.ids)),
        Timed("gemm", lambda i: both(steps[i], steps[i].sort), gate_up_bytes + down_bytes),
        Timed("gemm gate_up", lambda i: gate_up(steps[i], steps[i].sort), gate_up_bytes),
        Timed("gemm down", lambda i: down(steps[i], steps[i].sort), down_bytes),
    ]
    if num_pairs <= 64:
        timed.append(
            Timed("gemm unsorted", lambda i: both(steps[i], NO_SORT), gate_up_bytes + down_bytes)
        )
    if hasattr(torch, "_grouped_mm") and first.x.is_cuda:
        grouped = [_grouped_inputs(step, shape) for step in steps]

        def library(index: int) -> None:
            gathered, inner, ends = grouped[index]
            torch._grouped_mm(gathered, layer.gate_up.transpose(1, 2), offs=ends)
            torch._grouped_mm(inner, layer.down.transpose(1, 2), offs=ends)

        timed.append(Timed("grouped_mm", library, gate_up_bytes + down_bytes))
    return [
        *timed,
        Timed(
            "activation",
            lambda i: gated_activation(steps[i].gate_up, *NO_LORA, "silu", steps[i].inner),
            _bytes(first.gate_up, first.inner),
        ),
        Timed(
            "combine",
            lambda i: moe_combine(
                steps[i].down, steps[i].ids, steps[i].weights, None, None, steps[i].out
            ),
            _bytes(first.down, first.out),
        ),
    ]


def _grouped_inputs(
    step: MoeStep, shape: MoeShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows gathered by expert, and where each expert's rows end."""
    order = step.ids.flatten().argsort(stable=True)
    ends = torch.bincount(step.ids.flatten(), minlength=shape.experts).cumsum(0).int()
    return step.x[order // shape.top_k], step.inner[order], ends


def _lora_kernels(layer: MoeLayer, adapters: ExpertAdapters, steps: list[MoeStep]) -> list[Timed]:
    shape, device = layer.shape, layer.down.device
    (rows, top_k), num_pairs = steps[0].ids.shape, steps[0].ids.numel()
    slots = [  # by launch; one row's launches go round the experts first, then the adapters
        ((torch.arange(rows) + turn * len(adapters.enabled) // len(steps)) % len(adapters.enabled))
        .int()
        .to(device)
        for turn in range(len(steps))
    ]
    rank, arena, enabled = adapters.rank, adapters.arena, adapters.enabled
    wide = torch.zeros(
        moe_shrink_split_k(num_pairs, shape.hidden), num_pairs, 2 * rank, device=device
    )
    narrow = torch.zeros(
        moe_shrink_split_k(num_pairs, shape.intermediate), num_pairs, rank, device=device
    )
    counters = moe_shrink_arrivals(num_pairs, 2, rank)
    arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
    first, second = adapters.gate_up, adapters.down

    def shrink_gate_up(index: int) -> None:
        step = steps[index]
        moe_lora_shrink(
            step.x,
            arena,
            first.a_ptrs,
            first.ranks,
            None,
            None,
            slots[index],
            enabled,
            step.ids,
            top_k,
            rank,
            wide,
            arrivals,
        )

    def gate_up(index: int) -> None:
        step = steps[index]
        moe_lora_gate_up(
            step.gate_up,
            wide[0],
            arena,
            first.b_ptrs,
            first.ranks,
            first.scalings,
            None,
            slots[index],
            enabled,
            step.ids,
            rank,
            "silu",
            step.inner,
        )

    def shrink_down(index: int) -> None:
        step = steps[index]
        moe_lora_shrink(
            step.inner,
            arena,
            second.a_ptrs,
            second.ranks,
            None,
            None,
            slots[index],
            enabled,
            step.ids,
            1,
            rank,
            narrow,
            arrivals,
        )

    def down(index: int) -> None:
        step = steps[index]
        moe_lora_down(
            step.down,
            narrow[0],
            arena,
            second.b_ptrs,
            second.ranks,
            second.scalings,
            None,
            None,
            slots[index],
            enabled,
            step.ids,
            step.weights,
            None,
            None,
            rank,
            step.out,
        )

    moved = adapters.pair_bytes(shape)
    step = steps[0]
    around = {
        "shrink_gate_up": _bytes(step.x, wide),
        "gate_up": _bytes(step.gate_up, wide, step.inner),
        "shrink_down": _bytes(step.inner, narrow),
        "down": _bytes(step.down, narrow, step.out),
    }
    launches = {
        "shrink_gate_up": shrink_gate_up,
        "gate_up": gate_up,
        "shrink_down": shrink_down,
        "down": down,
    }
    return [
        Timed(f"lora {name}", launch, moved[name] * num_pairs + around[name])
        for name, launch in launches.items()
    ]


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def shape(text: str) -> MoeShape:
        return MoeShape(*integers(text))

    parser.add_argument("family", choices=["moe"])
    parser.add_argument(
        "--rows", type=integers, default=[1, 8, 32, 128], help="of a step; 1,8,32,128 by default"
    )
    parser.add_argument(
        "--shape",
        type=shape,
        default=MoeShape(128, 8, 2048, 768),
        help="experts, experts a row, hidden, intermediate: 128,8,2048,768",
    )
    parser.add_argument("--sweep", action="store_true", help="time configurations and stop")
    parser.add_argument(
        "--prefill", type=integers, default=[2048, 8192], help="rows of a sweep's larger blocks"
    )
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument("--output", help="file name under profiles/results/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
