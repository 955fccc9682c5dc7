"""Times configurations of the grouped GEMM and prints them in order, the best first."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kernels.moe_gemm import launch_moe_gemm
from kernels.moe_gemm_config import MoeGemmConfig, moe_block_size_m
from profiles.launch_time import launch_us
from profiles.moe_layer import NO_SORT, MoeLayer, MoeStep, routed_step

SHOWN = 6  # configurations printed for each product
THREADS = 16
LAUNCHES = 16


def _configs(text: str, group_blocks: int = 1) -> list[MoeGemmConfig]:
    """One a word: block_n x block_k x warps x stages, then `s`: swapped."""
    configs = []
    for word in text.split():
        block_n, block_k, warps, stages = map(int, word.rstrip("s").split("x"))
        swapped = word.endswith("s")
        configs.append(MoeGemmConfig(block_n, block_k, warps, stages, group_blocks, swapped))
    return configs


CANDIDATES = {
    0: _configs(
        "4x1024x4x1 8x512x4x1 16x256x4x1 16x512x8x1 8x256x2x4 8x256x4x6 8x512x4x3 8x512x4x5 "
        "16x256x4x3 16x256x4x5 16x512x4x3 16x512x4x4 16x512x8x3 32x256x4x3 32x256x8x4 4x1024x4x3"
    ),
    16: _configs(
        "64x64x4x6s 64x128x4x3s 64x128x4x4s 64x128x4x5s 64x256x4x3s 64x256x4x4s 128x64x4x4s "
        "128x64x4x6s 128x128x4x3s 128x128x4x4s 128x128x8x4s 128x64x8x5s 32x128x4x4s "
        "16x256x2x4 32x128x2x4 32x128x4x3 32x128x4x5 32x256x4x3 32x256x4x4 64x128x4x3 64x128x4x4 "
        "64x128x8x3 128x64x4x4"
    ),
    64: _configs(
        "128x64x4x3 128x64x4x4 128x64x8x4 128x128x8x3 256x64x8x3 256x64x8x4 128x64x4x4s",
        8,
    ),
    128: _configs(
        "128x64x4x3 128x64x8x3 128x64x8x4 128x64x8x5 128x128x8x2 256x64x8x3",
        8,
    ),
}


@dataclass(frozen=True)
class Product:
    """Gate/up or down, and the steps of each case it is timed on (by a name of the case)."""

    name: str
    block_size_m: int
    weight: torch.Tensor
    cases: dict[str, list[MoeStep]]

    def launch(self, config: MoeGemmConfig, step: MoeStep) -> None:
        buffers = step.sort if self.block_size_m else NO_SORT
        gate_up = self.name == "gate_up"
        launch_moe_gemm(
            config,
            step.x if gate_up else step.inner,
            self.weight,
            step.ids,
            *buffers,
            self.block_size_m,
            step.ids.shape[1] if gate_up else 1,
            step.gate_up if gate_up else step.down,
        )

    def out(self, step: MoeStep) -> torch.Tensor:
        return step.gate_up if self.name == "gate_up" else step.down


def sweep(layer: MoeLayer, rows: list[int], prefill: list[int]) -> None:
    """Rank CANDIDATES for every product; the last line of each is ready for the table.

    Rows of `rows` are timed in blocks of 16 pairs, and unsorted up to 64 pairs; those of
    `prefill` in the block size that their number asks for. Needs CUDA.
    """
    start = time.perf_counter()
    products = list(_products(layer, rows, prefill))
    broken = _compile(products)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    for product in products:
        configs = [c for c in CANDIDATES[product.block_size_m] if (product.name, c) not in broken]
        _rank(product, configs)
        print(f"  after {time.perf_counter() - start:.0f} s", flush=True)


def _products(layer: MoeLayer, rows: list[int], prefill: list[int]) -> list[Product]:
    shape, device = layer.shape, layer.down.device
    cases: dict[int, dict[str, list[MoeStep]]] = {size: {} for size in CANDIDATES}
    for count in [*rows, *prefill]:
        active = shape.active(count)
        size = moe_block_size_m(count * shape.top_k, shape.experts) if count in prefill else 16
        # A quarter of the launches where one alone reads all weights.
        turns = LAUNCHES if active * 2 <= shape.experts else LAUNCHES // 4
        steps = [routed_step(shape, count, active, size, turn, device) for turn in range(turns)]
        cases[size][f"{count}/{active}"] = steps
        if count in rows and count * shape.top_k <= 64:
            cases[0][f"{count}/{active}"] = steps
    return [
        Product(name, size, weight, cases[size])
        for size in CANDIDATES
        if cases[size]
        for name, weight in (("gate_up", layer.gate_up), ("down", layer.down))
    ]


def _compile(products: list[Product]) -> set[tuple[str, MoeGemmConfig]]:
    """Launch everything once, many at a time: most of it is waiting for the compiler.

    Returns the configurations that this card cannot run, and says why.
    """
    device = products[0].weight.device

    def attempt(product: Product, config: MoeGemmConfig) -> str | None:
        torch.cuda.set_device(device)
        try:
            product.launch(config, next(iter(product.cases.values()))[0])
        except Exception as error:  # a configuration may be too large in any of several ways
            return f"{type(error).__name__}: {error}"[:150]
        return None

    jobs = [(p, config) for p in products for config in CANDIDATES[p.block_size_m]]
    with ThreadPoolExecutor(THREADS) as pool:
        reasons = list(pool.map(lambda job: attempt(*job), jobs))
    torch.cuda.synchronize(device)
    broken = set()
    for (product, config), reason in zip(jobs, reasons, strict=True):
        if reason:
            print(f"left out: {product.name} {config}: {reason}")
            broken.add((product.name, config))
    return broken


def _time(product: Product, config: MoeGemmConfig, steps: list[MoeStep]) -> float:
    device = product.weight.device
    return launch_us(lambda index: product.launch(config, steps[index]), len(steps), device)


def _rank(product: Product, configs: list[MoeGemmConfig]) -> None:
    times: dict[MoeGemmConfig, list[float]] = {config: [] for config in configs}
    expert_bytes = product.weight[0].numel() * 2
    for steps in product.cases.values():
        expected: torch.Tensor | None = None
        for config in configs:
            product.out(steps[0]).fill_(torch.nan)
            product.launch(config, steps[0])
            found = product.out(steps[0]).float()
            expected = found if expected is None else expected
            if not torch.allclose(found, expected, rtol=0.02, atol=0.02):
                print(f"WRONG: {product.name} {config}")
            times[config].append(_time(product, config, steps))
    best = [min(column) for column in zip(*times.values(), strict=True)]

    def slowdown(config: MoeGemmConfig) -> float:
        logs = [math.log(us / least) for us, least in zip(times[config], best, strict=True)]
        return math.exp(sum(logs) / len(logs))

    ranked = sorted(configs, key=slowdown)
    out_features, in_features = product.weight.shape[1:]
    print(f"\n{product.name} block_size_m={product.block_size_m} N={out_features} K={in_features}")
    print(f"  {'us (TB/s) by rows/active':<32}" + "".join(f"{c:>18}" for c in product.cases))
    for config in ranked[:SHOWN]:
        cells = "".join(
            f"{us:>10.2f} ({int(case.split('/')[1]) * expert_bytes / us / 1e6:5.2f})"
            for case, us in zip(product.cases, times[config], strict=True)
        )
        print(f"  {_short(config):<24}{slowdown(config):>7.3f} {cells}")
    fastest = [min(configs, key=lambda c, i=i: times[c][i]) for i in range(len(best))]  # type: ignore[misc]
    least = "".join(
        f"{us:>10.2f} {_short(config)}" for us, config in zip(best, fastest, strict=True)
    )
    print(f"  best of each case: {least}")
    config = ranked[0]
    print(f"    ({product.block_size_m}, {out_features}, {in_features}): {config},")


def _short(config: MoeGemmConfig) -> str:
    sizes = (config.block_n, config.block_k, config.num_warps, config.num_stages)
    return "x".join(map(str, sizes)) + "s" * config.swapped
