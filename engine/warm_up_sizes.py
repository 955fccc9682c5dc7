"""How many rows the steps of a warm-up have, so that serving compiles no kernel.

Launchers choose block shapes by the number of rows, or of a mixture's pairs of rows and experts.
A size from each range in which all choices of a kernel stay the same is enough: those ranges end
at the numbers below, which are the kernels' own, or are an octave wide. How a product is launched
beside x A^T goes by its shape too: there every number of rows is looked at.
"""

from collections.abc import Collection, Iterable

from engine.decoder_weights import Projection
from engine.expert_delta import MAX_PAIRWISE
from kernels.linear_arrangement import (
    arranged,
    product_programs,
    rank_programs,
    splits_in_launch,
)
from kernels.linear_config import ROW_BLOCKS, ROW_BUCKETS, card, linear_config
from kernels.lora_segments import ROW_REGIMES, row_regime
from kernels.lora_shrink import shrink_programs
from kernels.moe_gemm_config import PAIRS_AN_EXPERT
from kernels.moe_gemm_shrink import MAX_SHARED_PAIRS
from kernels.moe_lora_shrink import SPLIT_PAIRS
from memory.model_dims import MoEDims

FEW_PAIRS = SPLIT_PAIRS[-1]  # up to here kernels split sums, in ranges of any width


def prefill_sizes(moe: MoEDims | None, most: int, products: Collection[int] = ()) -> list[int]:
    """Tokens of the chunks to run, up to `most`, ascending; `products` from `product_sizes`."""
    sizes = {most, *ROW_REGIMES, ROW_REGIMES[-1] + 1, *ROW_BUCKETS, *products}
    return sorted(size for size in sizes | _mixture_sizes(moe, most) if size <= most)


def eager_batch_sizes(
    moe: MoEDims | None, largest: int, most: int, products: Collection[int] = ()
) -> list[int]:
    """Rows of the decode steps to run above the `largest` that is captured, ascending."""
    sizes = {largest + 1, most, *_octaves(most), *products}
    return sorted(size for size in sizes | _mixture_sizes(moe, most) if largest < size <= most)


def product_sizes(
    projections: Iterable[Projection], max_loras: int, max_rank: int, most: int
) -> list[int]:
    """Of every way in which a projection is launched together with its x A^T, the largest number
    of rows, up to `most`, that is."""
    if max_loras == 0:
        return []
    weights = {(len(p.slice_sizes), p.weight.shape): p.weight for p in projections}
    largest: dict[object, int] = {}
    for rows in range(1, min(most, ROW_BLOCKS[-1]) + 1):
        for (stack, (out_features, in_features)), weight in weights.items():
            config = linear_config(rows, out_features, in_features, weight.dtype, weight.device)
            if config is None:
                continue
            at = card(weight.device)
            for partials in {1, config.splits}:  # where the result may be left in partials
                shape = (rows, out_features, in_features)
                slots = (stack, max_loras, max_rank)
                splits = splits_in_launch(config, *shape, partials, *slots, at)
                if splits == 0:
                    continue
                products = product_programs(config, out_features, partials)
                for way, shrinks in (
                    ("triton", shrink_programs(rows, *slots, splits)),
                    ("hopper", rank_programs(config, rows, *slots, splits)),
                ):
                    launch = arranged(config, products, shrinks, at)
                    variant = (way, launch.config, launch.shrink_first, row_regime(rows))
                    largest[stack, out_features, in_features, partials, variant] = rows
    return sorted(set(largest.values()))


def _mixture_sizes(moe: MoEDims | None, most: int) -> set[int]:
    if moe is None:
        return set()
    pairs = {MAX_SHARED_PAIRS, MAX_SHARED_PAIRS + moe.top_k, MAX_PAIRWISE}
    pairs |= {*_octaves(most * moe.top_k)}
    pairs |= {count * moe.num_experts for count in PAIRS_AN_EXPERT}
    few = range(1, FEW_PAIRS // moe.top_k + 2)
    return {*few, *_octaves(most), *(count // moe.top_k for count in pairs)} - {0}


def _octaves(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]
