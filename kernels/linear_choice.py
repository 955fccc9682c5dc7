"""Which products with a base weight are the own kernel's, and in which tiles, as measured on the
card in hand.

A rule of thumb (`tiles_for`) misses by several percent where tiles do not fill the card evenly,
and how good the library is for a shape only a measurement says. Each shape is measured once for a
card, the answer kept in a `ChoiceFile`: rows have the bits of what was chosen, so whoever finds
the file takes the same.

What is measured is the product alone. In a step the own kernel reads weights while the one before
it ends, the one after it comes up while it ends, and x A^T has room in its launch. The rule knows
this, so it is left for the library only where that is clearly faster.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton

from kernels.choice_file import ChoiceFile
from kernels.linear import launch_linear, linear_torch
from kernels.linear_config import (
    HOPPER,
    LINEAR_TABLE,
    MAX_ROWS,
    MIN_CAPABILITY,
    MOST_STAGES,
    VECTOR,
    Card,
    LinearConfig,
    LinearTable,
    Product,
    row_bucket,
    tiles_for,
)

logger = logging.getLogger(__name__)

MIN_WEIGHT_BYTES = 4 * 2**20  # below, starting a kernel takes longer than reading
MIN_COLD, COLD = 4, 16  # times the L2 cache: of weights that a measurement reads, at least and best
KERNEL_GAIN = 1.10  # that the kernel which the rule does not take, own or the library, must have
TILES_GAIN = 1.03  # that other tiles than the rule's must have: less is noise
ROUNDS = 2  # of timing all candidates, for the clock is slow to rise
READ_BANDWIDTH = 4e12  # bytes a second, at which what reads partials reads them
SPLITS = (1, 2, 4)
MIN_SPLIT_K = 512
SHALLOW = 4  # stages that do where tiles follow one another: their loads overlap anyway
_Tiles = tuple[tuple[int, int, int, int], ...]
_FEW_ROWS: _Tiles = ((64, 128, 4, 5), (64, 128, 4, 4), (64, 128, 4, 3), (128, 64, 8, 5))
_MANY_ROWS: _Tiles = ((128, 64, 8, 5),)
_HOPPER_FEW_ROWS: _Tiles = ((64, 128, 4, MOST_STAGES), (64, 128, 4, 3), (128, 64, 8, MOST_STAGES))
_HOPPER_MANY_ROWS: _Tiles = ((64, 128, 4, MOST_STAGES), (128, 64, 4, MOST_STAGES))
"""Tiles to try: block_n, block_k, warps, stages."""


@dataclass(frozen=True)
class ShapeWeights:
    """A model's weights [N, K] of one shape, in the order in which a step reads them.

    takes_partials: what reads their products adds up partials.
    """

    weights: Sequence[torch.Tensor]
    bias: torch.Tensor | None = None
    takes_partials: bool = False

    def product(self, rows: int) -> Product:
        out_features, in_features = self.weights[0].shape
        return Product(rows, out_features, in_features, self.weights[0].dtype)

    def cold(self, l2_bytes: int) -> Sequence[torch.Tensor]:
        """As many of them as push one another out of a cache of `l2_bytes`; none where the model
        has too few, or where they are so small that the choice matters little."""
        size = self.weights[0].nbytes
        count = min(len(self.weights), -(-COLD * l2_bytes // size))
        is_cold = size >= MIN_WEIGHT_BYTES and count * size >= MIN_COLD * l2_bytes
        return self.weights[:count] if is_cold else []


@dataclass(frozen=True)
class Trial:
    """One launch of a product by one candidate; `config` None: the library's."""

    config: LinearConfig | None
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor

    def __call__(self) -> None:
        if self.config is None:
            linear_torch(self.x, self.weight, self.bias, self.out)
        else:
            launch_linear(self.config, self.x, self.weight, self.bias, self.out)


class Timer(Protocol):
    """Times trials on one device."""

    @property
    def l2_bytes(self) -> int: ...

    def runs(self, trials: Sequence[Trial]) -> list[bool]:
        """Which of them this device can run; their kernels are compiled then."""

    def seconds(self, trials: Sequence[Trial]) -> float:
        """What one of `trials` takes where they follow one another."""


def ruled(product: Product, card: Card, takes_partials: bool) -> LinearConfig | None:
    """What `tiles_for` says, without splits where nobody takes partials; with many rows the
    library then, for it splits K on its own."""
    rule = tiles_for(product.rows, product.out_features, product.in_features, card)
    if rule is None or takes_partials:
        return rule
    return replace(rule, splits=1) if rule.serves(1) else None


def candidates(product: Product, card: Card, takes_partials: bool) -> list[LinearConfig]:
    """The rule's configuration, where it has one, and others around it; none where the own kernel
    cannot or should not run."""
    width, depth = product.out_features, product.in_features
    if card.capability < MIN_CAPABILITY or depth % VECTOR:
        return []
    rule = ruled(product, card, takes_partials)
    found = [] if rule is None else [rule]
    block_m = max(16, product.rows)
    few, many = _FEW_ROWS, _MANY_ROWS
    if card.capability == HOPPER:
        few, many = _HOPPER_FEW_ROWS, _HOPPER_MANY_ROWS
    tiles = few if product.rows <= MAX_ROWS else many
    for tile, splits in itertools.product(tiles, SPLITS if takes_partials else (1,)):
        block_n, block_k, num_warps, num_stages = tile
        programs = triton.cdiv(width, block_n) * splits
        filled = programs / card.multiprocessors
        is_split_well = depth % (splits * block_k) == 0 and depth >= splits * MIN_SPLIT_K
        if splits > 1 and not (is_split_well and filled <= 2):
            continue
        if filled >= (1 if num_stages <= SHALLOW else 0.1):
            config = LinearConfig(block_m, block_n, block_k, num_warps, num_stages, splits)
            found.append(card.fitted(config, programs))
    return [config for config in dict.fromkeys(found) if config.shared_bytes <= card.shared_bytes]


def best(
    product: Product, seconds: Mapping[LinearConfig | None, float], rule: LinearConfig | None
) -> LinearConfig | None:
    """The candidate to take; None: the library. It is `rule` unless another is clearly faster.

    `seconds` are of the launches alone, which write partials: what reads them has more to read.
    """
    numel = product.rows * product.out_features
    own: dict[LinearConfig, float] = {}
    for config, taken in seconds.items():
        if config is not None:
            read = 4 * numel * config.splits if config.splits > 1 else 0
            own[config] = taken + read / READ_BANDWIDTH
    if not own:
        return None
    fastest = min(own, key=own.__getitem__)
    if rule in own and own[rule] <= own[fastest] * TILES_GAIN:
        fastest = rule
    if rule is None:
        return fastest if own[fastest] * KERNEL_GAIN < seconds[None] else None
    return None if seconds[None] * KERNEL_GAIN < own[fastest] else fastest


def measure(
    shapes: Mapping[Product, ShapeWeights], card: Card, timer: Timer
) -> dict[Product, LinearConfig | None]:
    """The best of every product's candidates."""
    trials = {product: _trials(product, shape, card) for product, shape in shapes.items()}
    count = sum(map(len, trials.values()))
    logger.info("%s: timing %d ways to compute %d products", card.name, count, len(trials))
    runs = iter(timer.runs([trial for group in trials.values() for trial in group]))
    usable = {product: [t for t in group if next(runs)] for product, group in trials.items()}
    choices = {}
    for product, group in usable.items():
        weights = shapes[product].cold(timer.l2_bytes)
        seconds: dict[LinearConfig | None, float] = {}
        for trial in group * ROUNDS:
            taken = timer.seconds([replace(trial, weight=weight) for weight in weights])
            seconds[trial.config] = min(taken, seconds.get(trial.config, taken))
        rule = ruled(product, card, shapes[product].takes_partials)
        choices[product] = best(product, seconds, rule)
        times = ", ".join(f"{taken * 1e6:.1f} us {config}" for config, taken in seconds.items())
        logger.debug("%s: %s, of %s", product, choices[product], times)
    return choices


def _trials(product: Product, shape: ShapeWeights, card: Card) -> list[Trial]:
    """One of every candidate, on the first weight and a random x."""
    weight, rows, width = shape.weights[0], product.rows, product.out_features
    generator = torch.Generator(weight.device).manual_seed(rows)
    x = weight.new_empty(rows, product.in_features).normal_(generator=generator)  # [T, K]
    out = weight.new_empty(rows, width)  # [T, N]
    trials = [Trial(None, x, weight, shape.bias, out)]
    for config in candidates(product, card, shape.takes_partials):
        written = out
        if config.splits > 1:
            written = weight.new_empty(config.splits, rows, width, dtype=torch.float32)
        trials.append(Trial(config, x, weight, shape.bias, written))
    return trials


def settle(
    shapes: Iterable[ShapeWeights],
    row_counts: Iterable[int],
    card: Card,
    file: ChoiceFile,
    timer: Timer,
    table: LinearTable = LINEAR_TABLE,
) -> None:
    """Choose, for every one of `row_counts` rows, how products with `shapes` are computed: as
    `table` holds it, else as `file` says, else as is measured now and put into both.

    What cannot be measured (other cards, other dtypes, few or small weights) is left to the rule.
    """
    buckets = {rows for count in row_counts if (rows := row_bucket(count)) is not None}
    measurable = [
        shape
        for shape in shapes
        if shape.weights[0].dtype in (torch.float16, torch.bfloat16) and shape.cold(timer.l2_bytes)
    ]
    with table.lock:
        asked = {
            product: shape
            for shape in measurable
            for product in map(shape.product, sorted(buckets))
            if not table.holds(card, product)
        }
        accepted = {
            product: configs
            for product, shape in asked.items()
            if (configs := candidates(product, card, shape.takes_partials))
        }
        choices = file.read(accepted)
        missing = {product: asked[product] for product in accepted if product not in choices}
        if missing:
            start = time.monotonic()
            choices |= file.add(accepted, measure(missing, card, timer))
            taken = time.monotonic() - start
            logger.info("%s: timed in %.1f s, to be kept in %s", card.name, taken, file.path)
        table.settle(card, choices)
