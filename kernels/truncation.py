"""Where top-k, top-p and min-p cut a row of scaled logits, found without a sort.

Each filter keeps the entries at or above a threshold, so the three together keep those at or
above the largest one. They compose as Hugging Face's processors do: top-k first, top-p over the
renormalised rest, then min-p relative to the largest probability (which the two never drop).

    top-k    the largest t with  #{z >= t} >= k
    top-p    the largest t with  sum(exp(z) for z >= t) >= p * sum(exp(z) for z kept by top-k)
    min-p    max(z) + log(min_p)

Entries equal to a threshold are all kept, so ties can keep more than k. The kernel bisects the
floats: their bits, read as ordered integers, are exact to the last one, so the first two
thresholds cut exactly where a sort would (up to the rounding of the sum of exp). It counts over
the whole row until few enough candidates are in question to hold them in registers.
"""

import math

import torch
import triton
import triton.language as tl

# How many candidates the bisection finishes in registers: a power of two.
CANDIDATES = 4096

# The most negative finite float, as an ordered integer.
_LOWEST = tl.constexpr(-0x7F800000)
# Probes placed by value before they fall back to the midpoint of the ordered integers, which
# bounds the search: between small and large floats the integers waste probes around zero.
_PROBES_BY_VALUE = tl.constexpr(32)


def truncation_threshold_torch(
    scaled: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> float:
    """The smallest value that `scaled` [V] (float32, no NaN, not all -inf) keeps.

    `top_k` 0, `top_p` 1 and `min_p` 0 keep all but -inf.
    """
    kept = scaled[scaled > -math.inf]
    top = kept.max()
    threshold = kept.min()
    if 0 < top_k < kept.numel():
        threshold = torch.topk(kept, top_k).values[-1]
        kept = kept[kept >= threshold]
    if top_p < 1.0:
        total = torch.exp(kept.double() - top).sum()
        # What lies below this weighs less than 1 - p together: only the rest is sorted.
        floor = top + torch.log((1.0 - top_p) * total / kept.numel())
        values = torch.sort(kept[kept >= floor], descending=True).values
        mass = torch.cumsum(torch.exp(values.double() - top), 0)
        boundary = torch.searchsorted(mass, top_p * total)
        threshold = values[boundary.clamp_max(values.numel() - 1)]
    if min_p > 0.0:
        threshold = torch.maximum(threshold, top + math.log(min_p))
    return float(threshold)


@triton.jit
def float_to_ordered(value):
    """float32 bits as int32 of the same order (-0.0 just below 0.0)."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_to_float(ordered):
    """Inverse of `float_to_ordered`."""
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _place_probe(low, high, top, width, step):
    """A point strictly between `low` and `high`: first widening below `top`, then halving."""
    by_value = tl.where(
        low == _LOWEST,
        top - width,
        0.5 * ordered_to_float(low) + 0.5 * ordered_to_float(high),
    )
    probe = float_to_ordered(by_value)
    inside = (step < _PROBES_BY_VALUE) & (probe > low) & (probe < high)
    return tl.where(inside, probe, (low & high) + ((low ^ high) >> 1))


@triton.jit
def _widen(width):
    return width * tl.where(width < 128.0, 2.0, tl.where(width < 1e30, 1024.0, 1.0))


@triton.jit
def _measure_row(row, threshold, top, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Number and weight of the row's entries at or above `threshold`."""
    counts = tl.zeros([BLOCK], tl.int32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf"))
        kept = scaled >= threshold
        counts += kept.to(tl.int32)
        weights += tl.where(kept, tl.exp(scaled - top), 0.0)
    return tl.sum(counts), tl.sum(weights)


@triton.jit
def _collect_between(
    row,
    candidates,
    low,
    high,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The row's entries in [low, high), at most CANDIDATES, through `candidates`; rest -inf."""
    found = 0
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf"))
        inside = (scaled >= low) & (scaled < high)
        number = tl.sum(inside.to(tl.int32))
        if number > 0:
            slots = found + tl.cumsum(inside.to(tl.int32)) - 1
            tl.store(candidates + slots, scaled, mask=inside & (slots < CANDIDATES))
            found += number
    tl.debug_barrier()  # what other threads have stored is read below
    slots = tl.arange(0, CANDIDATES)
    return tl.load(candidates + slots, mask=slots < found, other=-float("inf"))


@triton.jit
def truncation_threshold(
    row,
    candidates,
    top,
    total_count,
    total_weight,
    top_k,
    top_p,
    min_p,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`truncation_threshold_torch` of the VOCAB float32 at `row`, by one program.

    `top` is their largest (finite), `total_count` how many are above -inf and `total_weight`
    the sum of exp(z - top). `candidates` is a workspace of CANDIDATES float32.
    """
    low = tl.full([], _LOWEST, tl.int32)
    low_count, low_weight = total_count, total_weight
    for filter_index in range(2):
        by_count = filter_index == 0
        wanted = (by_count & (top_k > 0) & (top_k < total_count)) | (
            (filter_index == 1) & (top_p < 1.0)
        )
        if wanted:
            needed_count = tl.where(by_count, top_k, 0)
            needed_weight = tl.where(by_count, 0.0, top_p * low_weight)
            # Always: `low` keeps enough, `high` does not.
            high = float_to_ordered(top) + 1
            high_count, high_weight = 0, 0.0
            step, width = 0, 4.0
            while (low_count - high_count > CANDIDATES) & (low + 1 < high):
                probe = _place_probe(low, high, top, width, step)
                count, weight = _measure_row(row, ordered_to_float(probe), top, VOCAB, BLOCK)
                enough = (count >= needed_count) & (weight >= needed_weight)
                low = tl.where(enough, probe, low)
                low_count = tl.where(enough, count, low_count)
                low_weight = tl.where(enough, weight, low_weight)
                high = tl.where(enough, high, probe)
                high_count = tl.where(enough, high_count, count)
                high_weight = tl.where(enough, high_weight, weight)
                width = _widen(width)
                step += 1
            # One entry left in question: it is the boundary, and kept.
            if (low_count - high_count > 1) & (low + 1 < high):
                values = _collect_between(
                    row,
                    candidates,
                    ordered_to_float(low),
                    ordered_to_float(high),
                    VOCAB,
                    CANDIDATES,
                    BLOCK,
                )
                weights = tl.exp(values - top)
                above_count, above_weight = high_count, high_weight
                while (low_count - high_count > 1) & (low + 1 < high):
                    probe = _place_probe(low, high, top, width, step)
                    kept = values >= ordered_to_float(probe)
                    count = above_count + tl.sum(kept.to(tl.int32))
                    weight = above_weight + tl.sum(tl.where(kept, weights, 0.0))
                    enough = (count >= needed_count) & (weight >= needed_weight)
                    low = tl.where(enough, probe, low)
                    low_count = tl.where(enough, count, low_count)
                    low_weight = tl.where(enough, weight, low_weight)
                    high = tl.where(enough, high, probe)
                    high_count = tl.where(enough, high_count, count)
                    width = _widen(width)
                    step += 1
    threshold = ordered_to_float(low)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    return threshold
