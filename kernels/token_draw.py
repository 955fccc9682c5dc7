"""The token drawn from a row of scaled logits: the Gumbel argmax over what truncation keeps.

argmax(z + gumbel) is a draw from softmax(z) (Maddison, Tarlow, Minka: "A* Sampling", 2014), and
over a subset a draw from the renormalised subset, so nothing is normalised. The lowest id wins
ties.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.random import gumbel_block, gumbel_row_torch, gumbel_torch
from kernels.sampling_tables import K_MIN_P, K_SAMPLE_INDEX, K_TOP_K, K_TOP_P
from kernels.truncation import truncation_threshold, truncation_threshold_torch


@triton.jit
def truncates(floats, ints, VOCAB: tl.constexpr):
    """Whether a request's rows of sampling_floats and sampling_ints ask for any filter."""
    top_k = tl.load(ints + K_TOP_K)
    return (
        ((top_k > 0) & (top_k < VOCAB))
        | (tl.load(floats + K_TOP_P) < 1.0)
        | (tl.load(floats + K_MIN_P) > 0.0)
    )


@triton.jit
def draw_truncated(
    row,  # float32 [VOCAB]
    candidates,  # float32 [CANDIDATES], a workspace
    top,  # largest of the row, finite
    total_count,  # entries above -inf
    total_weight,  # sum of exp(row - top)
    floats,  # the request's row of sampling_floats
    ints,  # of sampling_ints
    seed,
    position,  # of the token to be drawn
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token, by one program that reads the row a few times."""
    threshold = truncation_threshold(
        row,
        candidates,
        top,
        total_count,
        total_weight,
        tl.load(ints + K_TOP_K),
        tl.load(floats + K_TOP_P),
        tl.load(floats + K_MIN_P),
        VOCAB,
        CANDIDATES,
        BLOCK,
    )
    sample_index = tl.load(ints + K_SAMPLE_INDEX)
    best, token = -float("inf"), 0
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf"))
        kept = scaled >= threshold
        if tl.sum(kept.to(tl.int32)) > 0:
            noise = gumbel_block(seed, start, position, sample_index, BLOCK)
            scores = tl.where(kept, scaled + noise, -float("inf"))
            block_best, lane = tl.max(scores, axis=0, return_indices=True)
            token = tl.where(block_best > best, start + lane, token)
            best = tl.maximum(best, block_best)
    return token


def draw_token_torch(
    scaled: torch.Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    sample_index: int,
) -> int:
    """The token of the row `scaled` [V] (float32, no NaN); 0 where all is -inf."""
    vocab = len(scaled)
    if not (0 < top_k < vocab or top_p < 1.0 or min_p > 0.0):
        noise = gumbel_row_torch(seed, vocab, position, sample_index, scaled.device)
        return int((scaled + noise).argmax())
    if scaled.max() == -math.inf:
        return 0
    threshold = truncation_threshold_torch(scaled, top_k, top_p, min_p)
    kept = torch.nonzero(scaled >= threshold).squeeze(1)
    noise = gumbel_torch(seed, kept, position, sample_index)
    return int(kept[(scaled[kept] + noise).argmax()])
