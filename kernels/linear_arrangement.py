"""How the programs of a product, and those of the x A^T in its launch, share a card."""

from dataclasses import dataclass

import triton

from kernels.linear_config import (
    HOPPER,
    MAX_ROWS,
    MIN_SPLIT_K,
    MIN_STAGES,
    WARP_ROWS,
    Card,
    LinearConfig,
)
from kernels.lora_segments import shrink_split_k

SHRINK_ROUNDS = 6  # of shrinking programs in the time of one of the product's, with few rows
MANY_ROWS_SPLITS = 2  # of x A^T above MAX_ROWS rows: as many as a product's mostly

PART_K = 512  # elements of K in a part of x A^T, which a program multiplies beside its own
MOST_PARTS = 32  # all of which what comes next reads
RANK_STAGES = 2  # blocks of A, of which one is under way and one multiplied


@dataclass(frozen=True)
class Arrangement:
    """A launch's programs, whether the shrinking ones come first, and tiles whose stages fit so
    many programs."""

    programs: int
    shrink_first: bool
    config: LinearConfig


def arranged(config: LinearConfig, products: int, shrinks: int, card: Card) -> Arrangement:
    """So many programs of each kind. Those of the product come first, as the longer ones, where
    its last wave leaves room for the shrinking ones, in a few rounds; otherwise those do, so that
    none is left for the end."""
    programs, at_once = products + shrinks, 2 * card.multiprocessors
    shrink_first = shrinks > SHRINK_ROUNDS * (-products % at_once)
    return Arrangement(programs, shrink_first, card.fitted(config, programs))


def product_programs(config: LinearConfig, out_features: int, splits: int) -> int:
    return triton.cdiv(out_features, config.block_n) * splits


def rank_programs(
    config: LinearConfig, num_tokens: int, stack: int, max_loras: int, max_rank: int, splits: int
) -> int:
    """Shrinking programs of a launch on Hopper: ranks of several slots share a tile."""
    ranks = min(num_tokens, max_loras) * max_rank
    return stack * triton.cdiv(ranks, config.block_n) * splits


def splits_in_launch(
    config: LinearConfig | None,
    num_tokens: int,
    out_features: int,
    in_features: int,
    partials: int,
    stack: int,
    max_loras: int,
    max_rank: int,
    card: Card,
) -> int:
    """In how many parts of K x A^T is computed in the launch of its product, which has `partials`;
    0: in a launch of its own, beside that product."""
    if config is None or not config.serves(partials):
        return 0
    if num_tokens <= MAX_ROWS or card.capability != HOPPER:
        return shrink_split_k(num_tokens, in_features)
    splits = max(1, min(MANY_ROWS_SPLITS, in_features // MIN_SPLIT_K))
    products = product_programs(config, out_features, partials)
    # Of all rows that share the tiles: their bits must not depend on how many they are.
    shrinks = rank_programs(config, config.block_m, stack, max_loras, max_rank, splits)
    # Each of few programs has a multiprocessor to itself. One too many would come after them all.
    is_second_round = products <= card.multiprocessors < products + shrinks
    return 0 if is_second_round or shrinks > card.multiprocessors else splits


def ranks_a_tile(config: LinearConfig) -> int:
    """Of x A^T by a product's own programs: as many as their warps multiply at once."""
    return WARP_ROWS * config.num_warps


def bytes_of_ranks(config: LinearConfig) -> int:
    """Of shared memory for blocks of a 16-bit A, beside the stages of x and W."""
    return RANK_STAGES * ranks_a_tile(config) * config.block_k * 2


def fitted_with_ranks(
    config: LinearConfig, out_features: int, partials: int, card: Card
) -> LinearConfig | None:
    """`config` with as many stages as fit beside blocks of A; None where those are too few."""
    programs = product_programs(config, out_features, partials)
    fitted = card.fitted(config, programs, beside=bytes_of_ranks(config))
    return fitted if fitted.num_stages >= MIN_STAGES else None


def rank_tiles(config: LinearConfig, segments: int, stack: int, max_rank: int) -> int:
    """Of x A^T by a product's own programs: ranks of several segments share a tile."""
    return stack * triton.cdiv(segments * max_rank, ranks_a_tile(config))


def parts_in_product(
    config: LinearConfig | None,
    out_features: int,
    in_features: int,
    partials: int,
    stack: int,
    max_loras: int,
    max_rank: int,
    card: Card,
) -> int:
    """In how many parts of K the product's own programs compute x A^T too, on Hopper; 0: not at
    all. A power of two, and a multiple of `partials`, those of the product.

    With few rows it is no quicker than programs of its own, which a launch then has room for. Each
    program takes one part of one tile at most. Of rows that share a configuration the number
    does not count: a row has the same bits among any of them.
    """
    if config is None or card.capability != HOPPER or config.block_m <= MAX_ROWS:
        return 0
    if not config.fits_warp_groups or not config.serves(partials):
        return 0
    if fitted_with_ranks(config, out_features, partials, card) is None:
        return 0
    tiles = rank_tiles(config, min(config.block_m, max_loras), stack, max_rank)
    most = triton.cdiv(out_features, config.block_n) // tiles
    most = min(most, MOST_PARTS // partials)
    wanted = triton.next_power_of_2(triton.cdiv(in_features, PART_K * partials))
    return partials * min(wanted, 1 << most.bit_length() >> 1)
