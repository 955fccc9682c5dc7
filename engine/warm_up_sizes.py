"""How many rows the steps of a warm-up have, so that serving compiles no kernel.

Launchers choose block shapes by the number of rows, or of a mixture's pairs of rows and experts.
A size from each range in which all choices of a kernel stay the same is enough: those ranges end
at the numbers below, which are the kernels' own, or are an octave wide.
"""

from engine.expert_delta import MAX_PAIRWISE
from kernels.linear_config import ROW_BLOCKS
from kernels.lora_segments import ROW_REGIMES
from kernels.moe_gemm_config import PAIRS_AN_EXPERT
from kernels.moe_lora_shrink import SPLIT_PAIRS
from memory.model_dims import MoEDims

FEW_PAIRS = SPLIT_PAIRS[-1]  # up to here kernels split sums, in ranges of any width


def prefill_sizes(moe: MoEDims | None, most: int) -> list[int]:
    """Tokens of the chunks to run, up to `most`, ascending."""
    sizes = {most, *ROW_REGIMES, ROW_REGIMES[-1] + 1, *ROW_BLOCKS, *_mixture_sizes(moe, most)}
    return sorted(size for size in sizes if size <= most)


def eager_batch_sizes(moe: MoEDims | None, largest: int, most: int) -> list[int]:
    """Rows of the decode steps to run above the `largest` that is captured, ascending."""
    sizes = {largest + 1, most, *_octaves(most), *_mixture_sizes(moe, most)}
    return sorted(size for size in sizes if largest < size <= most)


def _mixture_sizes(moe: MoEDims | None, most: int) -> set[int]:
    if moe is None:
        return set()
    pairs = {MAX_PAIRWISE, *_octaves(most * moe.top_k)}
    pairs |= {count * moe.num_experts for count in PAIRS_AN_EXPERT}
    few = range(1, FEW_PAIRS // moe.top_k + 2)
    return {*few, *_octaves(most), *(count // moe.top_k for count in pairs)} - {0}


def _octaves(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]
