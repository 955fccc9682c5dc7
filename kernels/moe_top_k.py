"""The k largest of a row's logits and their probabilities, in the registers of one program.

Knows a tile of logits, not where they come from. The order is that of the logits, falling, ties
to the lower expert; NaN counts as -inf there, so ids are distinct and in range always. A row's
bits depend on its logits alone, whatever layout the compiler gives the tile.
"""

import torch
import triton
import triton.language as tl

MAX_EXPERTS = 256

_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-(2**31))  # below every logit's integer
_ONE = tl.constexpr(2.0**40)  # fixed point: terms of the softmax's sum lie in [0, 1]
_NAN_TERM = tl.constexpr(2.0**12)  # more than MAX_EXPERTS terms of 1


@triton.jit
def store_top_k(
    logits,
    rows,
    written,
    live,
    topk_weights,
    topk_ids,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Softmax of a tile of logits and its k largest, ties to the lower expert."""
    experts = tl.arange(0, BLOCK_E)
    exists = (experts < NUM_EXPERTS)[None, :]
    ordered = tl.where(exists & (logits == logits), logits, -_INF)
    largest = tl.max(ordered, axis=1)  # [BLOCK_M]
    # The sum is over integers: whatever order the compiler sums in, the same bits.
    terms = tl.exp(logits - largest[:, None])
    terms = tl.where(terms == terms, terms, _NAN_TERM)
    terms = tl.where(exists, terms, 0.0) * _ONE
    total = tl.sum(terms.to(tl.int64), axis=1).to(tl.float32) / _ONE
    total = tl.where(total >= _NAN_TERM, float("nan"), total)
    # Floats as integers of the same order: a warp finds the largest of 32-bit integers, or the
    # smallest expert that has it, in one instruction.
    bits = ordered.to(tl.int32, bitcast=True)
    keys = tl.where(exists, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _LOWEST)
    column = tl.arange(0, BLOCK_TOP_K)[None, :]
    weights = tl.zeros([BLOCK_M, BLOCK_TOP_K], tl.float32)
    ids = tl.full([BLOCK_M, BLOCK_TOP_K], -1, tl.int32)
    kept = tl.zeros([BLOCK_M], tl.float32)
    for j in range(TOP_K):
        best = tl.max(keys, axis=1)  # [BLOCK_M]
        expert = tl.min(tl.where(keys == best[:, None], experts[None, :], BLOCK_E), axis=1)
        keys = tl.where(experts[None, :] == expert[:, None], _LOWEST, keys)
        logit = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        term = tl.exp(logit - largest)
        kept += term
        weights = tl.where(column == j, term[:, None], weights)
        ids = tl.where(column == j, expert[:, None], ids)
    if RENORMALIZE:
        total = tl.where(total == total, kept, total)
    weights = tl.where(live[:, None], weights / total[:, None], 0.0)
    ids = tl.where(live[:, None], ids, -1)
    places = rows[:, None] * TOP_K + column
    mask = written[:, None] & (column < TOP_K)
    tl.store(topk_weights + places, weights, mask=mask)
    tl.store(topk_ids + places, ids, mask=mask)


def top_k_torch(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [T, top_k] of float32 logits [T, E], as `store_top_k` stores them."""
    ordered = torch.where(logits.isnan(), -torch.inf, logits)
    ids = ordered.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    probabilities = logits.softmax(dim=1)
    lost = probabilities.isnan().any(dim=1, keepdim=True)
    kept = ordered.gather(1, ids)
    weights = kept.softmax(dim=1) if renormalize else probabilities.gather(1, ids)
    return torch.where(lost, torch.nan, weights), ids
