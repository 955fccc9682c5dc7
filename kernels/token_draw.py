"""The token drawn from a row of scaled logits: the Gumbel argmax over what truncation keeps.

argmax(z + gumbel) is a draw from softmax(z) (Maddison, Tarlow, Minka: "A* Sampling", 2014), and
over a subset a draw from the renormalised subset, so nothing is normalised. The lowest id wins
ties.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.logit_adjustment import adjust_logits
from kernels.random import gumbel_block, gumbel_row_torch, gumbel_torch
from kernels.sampling_tables import (
    K_LEAST_TEMPERATURE,
    K_MIN_P,
    K_SAMPLE_INDEX,
    K_TEMPERATURE,
    K_TOP_K,
    K_TOP_P,
)
from kernels.truncation import truncation_threshold, truncation_threshold_torch

LARGEST_SCORE = torch.finfo(torch.float32).max  # scaled logits are clamped to it
_LARGEST = tl.constexpr(LARGEST_SCORE)


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
def best_of_chunk(
    logits,  # [VOCAB], a row
    first_id,  # of the chunk
    floats,  # the request's row of sampling_floats
    ints,  # of sampling_ints
    seed,  # of seeds
    token_state,  # of token_state
    logit_bias,  # of logit_bias
    position,  # of the token to be chosen
    scratch,  # float32 [VOCAB], takes the scaled logits of a row that truncates
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """(best, token, weight, count) of ids first_id .. first_id + CHUNK - 1, PART at a time.

    best: the largest adjusted logit, with its noise where the row draws and does not truncate;
    token: its id. Where it truncates, weight is the sum of exp(score - best), count of how many.
    """
    temperature = tl.load(floats + K_TEMPERATURE)
    draws = temperature >= K_LEAST_TEMPERATURE
    cuts = draws & truncates(floats, ints, VOCAB)
    lanes = tl.arange(0, PART)
    # The same lane by lane.
    lane_best = tl.full([PART], -float("inf"), tl.float32)
    lane_token = first_id + lanes
    lane_weight, lane_count = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
    for start in range(first_id, tl.minimum(first_id + CHUNK, VOCAB), PART):
        ids = start + lanes
        inside = ids < VOCAB
        scores = adjust_logits(
            tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32),
            ids,
            inside,
            floats,
            ints,
            token_state,
            logit_bias,
            position,
        )
        if draws:
            scores = tl.minimum(tl.div_rn(scores, temperature), _LARGEST)
            if cuts:
                tl.store(scratch + ids, scores, mask=inside)
                shift = tl.maximum(tl.maximum(lane_best, scores), -_LARGEST)
                lane_weight = lane_weight * tl.exp(lane_best - shift) + tl.exp(scores - shift)
                lane_count += (scores > -float("inf")).to(tl.float32)
            else:
                sample_index = tl.load(ints + K_SAMPLE_INDEX)
                scores += gumbel_block(tl.load(seed), start, position, sample_index, PART)
        lane_token = tl.where(scores > lane_best, ids, lane_token)
        lane_best = tl.maximum(lane_best, scores)
    best = tl.max(lane_best)
    token = tl.min(tl.where(lane_best == best, lane_token, VOCAB))
    weight, count = 0.0, 0.0
    if cuts:
        scale = tl.exp(tl.maximum(lane_best, -_LARGEST) - tl.maximum(best, -_LARGEST))
        weight, count = tl.sum(lane_weight * scale), tl.sum(lane_count)
    return best, token, weight, count


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
