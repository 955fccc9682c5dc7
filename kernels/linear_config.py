"""How the product with a base weight is computed: by an own kernel, and in which tiles, or by the
vendor's library.

`linear_config` alone decides, from shapes, dtype and device: by what `linear_choice` measured on
the card in hand, and by a rule, `tiles_for`, where nothing was. Few rows are bound by reading the
weight: what counts is how many bytes are in flight and how evenly tiles fill the card. Above
`MAX_ROWS` reading the rows once for every tile counts as much, and the library does well too.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
import triton

MAX_ROWS = 64
ROW_BLOCKS = (16, 32, 64, 128)
"""Launches of up to each of these row counts share their tiles; their stages too, but for those
beside x A^T (`linear_arrangement.arranged`)."""
BLOCK_N, BLOCK_K, NUM_WARPS = 64, 128, 4
MIN_SPLIT_K = 1024
FILLED = 0.6  # of the multiprocessors that have a program: with fewer, K is split
VECTOR = 8  # 16-bit elements in 16 bytes
MIN_CAPABILITY = (9, 0)
HOPPER = (9, 0)  # where products are `hopper_linear`'s
WARP_GROUP = 4  # warps that multiply together there
WARP_ROWS = 16  # of the left operand, that each of them does at once
BARRIER_BYTES = 256  # of shared memory at most: a barrier for each stage
MIN_STAGES, MOST_STAGES = 2, 16  # there, which has them in shared memory alone: all that fit
ROW_BUCKETS = (1, *ROW_BLOCKS)  # numbers of rows up to which one choice holds


@dataclass(frozen=True)
class LinearConfig:
    """How one launch is tiled. It takes up to block_m rows; of its bits only tiles and splits
    decide.

    splits: so many programs share a tile's K where the result may be left in partials.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1

    @property
    def shared_bytes(self) -> int:
        """Bound on the shared memory of the pipelined loads of 16-bit elements."""
        return (self.block_n + self.block_m) * self.block_k * 2 * self.num_stages

    @property
    def fits_warp_groups(self) -> bool:
        """Whether Hopper's kernel can have these tiles."""
        rows_a_warp = self.block_n // self.num_warps
        fits = self.num_warps % WARP_GROUP == 0 and WARP_ROWS <= rows_a_warp <= 2 * WARP_ROWS
        return fits and self.block_k in (64, 128) and self.num_stages >= MIN_STAGES

    def serves(self, partials: int) -> bool:
        """Whether it is better than the library for a result in so many partials. With many rows a
        tile that is made for some of K is not for all of it."""
        return self.block_m <= MAX_ROWS or self.splits in (1, partials)


@dataclass(frozen=True)
class Card:
    """What of a GPU decides tiles: its multiprocessors, and the shared memory a block may take.

    name: of the card in hand, for which choices are measured.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    name: str = ""

    def fitted(self, config: LinearConfig, programs: int, beside: int = 0) -> LinearConfig:
        """`config` with as many of its stages as let `programs` of it, one or two for each
        multiprocessor, run at once, each with so many bytes of shared memory `beside` them; same
        bits."""
        share = self.shared_bytes
        if programs > self.multiprocessors:
            share = (share - 1024) // 2  # a block takes 1 KiB for itself
        stages = (share - beside - BARRIER_BYTES) // replace(config, num_stages=1).shared_bytes
        return replace(config, num_stages=max(1, min(config.num_stages, stages)))


H200 = Card(HOPPER, 132, 227 * 1024)


@cache
def card(device: torch.device) -> Card:
    """`device`'s numbers; an H200's without CUDA, so that its tiles can be tried on any machine."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    capability = (properties.major, properties.minor)
    return Card(capability, properties.multi_processor_count, shared, properties.name)


def tiles_for(
    num_tokens: int, out_features: int, in_features: int, card: Card
) -> LinearConfig | None:
    """The own kernel's tiles of 16-bit products on `card`; None where the library is faster.

    Splits: programs for most multiprocessors, each with K enough to fill its pipeline. Stages:
    on Hopper all that fit; elsewhere deep where a multiprocessor has a tile or two, for where many
    follow one another their loads overlap anyway. Measured on an H200 at 1, 8, 32 and 128 rows, N
    from 2048 to 128256.
    """
    if card.capability < MIN_CAPABILITY or in_features % VECTOR:
        return None
    is_hopper = card.capability == HOPPER
    if num_tokens > MAX_ROWS and is_hopper:
        return _hopper_tiles_for_many(num_tokens, out_features, in_features, card)
    if num_tokens > MAX_ROWS:
        return _tiles_for_many(num_tokens, out_features, card)
    tiles = triton.cdiv(out_features, BLOCK_N)
    filled = tiles / card.multiprocessors
    splits = _splits(tiles, in_features, card)
    stages = MOST_STAGES if is_hopper else 5 if filled <= 2 else 4 if filled <= 8 else 3
    block_m = next(rows for rows in ROW_BLOCKS if num_tokens <= rows)
    config = LinearConfig(block_m, BLOCK_N, BLOCK_K, NUM_WARPS, stages, splits)
    return card.fitted(config, tiles * splits)


def _splits(tiles: int, in_features: int, card: Card) -> int:
    filled = tiles / card.multiprocessors
    splits = 1 if filled >= FILLED else 2 if filled >= 0.36 else 4
    while splits > 1 and (in_features % (splits * BLOCK_K) or in_features < splits * MIN_SPLIT_K):
        splits //= 2
    return splits


def _hopper_tiles_for_many(
    num_tokens: int, out_features: int, in_features: int, card: Card
) -> LinearConfig | None:
    """Above MAX_ROWS rows: tiles that each have a multiprocessor, or wide ones of which it has one
    or two; otherwise the library."""
    block_m = ROW_BLOCKS[-1]
    if num_tokens > block_m:
        return None
    tiles = triton.cdiv(out_features, BLOCK_N)
    splits = _splits(tiles, in_features, card)
    if FILLED <= tiles * splits / card.multiprocessors <= 1:
        config = LinearConfig(block_m, BLOCK_N, BLOCK_K, NUM_WARPS, MOST_STAGES, splits)
        return card.fitted(config, tiles * splits)
    tiles = triton.cdiv(out_features, 2 * BLOCK_N)
    if 1 <= tiles / card.multiprocessors <= 2:
        config = LinearConfig(block_m, 2 * BLOCK_N, BLOCK_K // 2, NUM_WARPS, MOST_STAGES)
        return card.fitted(config, tiles)
    return None


def _tiles_for_many(num_tokens: int, out_features: int, card: Card) -> LinearConfig | None:
    """Above MAX_ROWS rows: the library, but for products whose wide tiles give each multiprocessor
    one or two. There both take the same time alone (N = 28672, 128 rows: 66 us), and beside the
    own kernel's end the next kernel comes up."""
    config = LinearConfig(ROW_BLOCKS[-1], 128, 64, 8, 5)
    tiles = triton.cdiv(out_features, config.block_n)
    is_own = num_tokens <= config.block_m and 1 <= tiles / card.multiprocessors <= 2
    return config if is_own and config.shared_bytes <= card.shared_bytes else None


@dataclass(frozen=True)
class Product:
    """x [rows, in_features] by W [out_features, in_features]; `rows` is one of ROW_BUCKETS, for
    all numbers of rows that it is the bucket of."""

    rows: int
    out_features: int
    in_features: int
    dtype: torch.dtype


def row_bucket(num_tokens: int) -> int | None:
    """None above the last bucket: there the library computes."""
    return next((rows for rows in ROW_BUCKETS if num_tokens <= rows), None)


@dataclass
class LinearTable:
    """What was chosen for every card and product that was asked for: a configuration, or None for
    the library.

    A choice never changes, though better ones be measured later: rows have its bits, and
    workspaces were planned for its splits. `lock` is held while choices are measured.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    _choices: dict[tuple[Card, Product], LinearConfig | None] = field(default_factory=dict)

    def choice(self, card: Card, product: Product) -> LinearConfig | None:
        """By the rule where nothing was measured before it was first asked for."""
        with self.lock:
            if not self.holds(card, product):
                size = (product.out_features, product.in_features)
                self._choices[card, product] = tiles_for(product.rows, *size, card)
            return self._choices[card, product]

    def holds(self, card: Card, product: Product) -> bool:
        return (card, product) in self._choices

    def settle(self, card: Card, choices: Mapping[Product, LinearConfig | None]) -> None:
        """Take `choices` for products that it does not hold."""
        with self.lock:
            for product, choice in choices.items():
                self._choices.setdefault((card, product), choice)


LINEAR_TABLE = LinearTable()


@cache
def linear_config(
    num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> LinearConfig | None:
    """The own kernel's configuration for x [num_tokens, in_features] and W [out_features,
    in_features], or None for the library. Without CUDA as on an H200."""
    rows = row_bucket(num_tokens)
    if rows is None or dtype not in (torch.float16, torch.bfloat16):
        return None
    product = Product(rows, out_features, in_features, dtype)
    return LINEAR_TABLE.choice(card(device), product)


def linear_splits(
    num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> int:
    """How many partials to give `linear` to write where what reads them can sum them; 1: none."""
    config = linear_config(num_tokens, out_features, in_features, dtype, device)
    return 1 if config is None else config.splits
