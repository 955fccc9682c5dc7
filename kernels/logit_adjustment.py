"""What a request asks of its logits before any temperature: bias, penalties, banned stops.

    z = logits + logit_bias
    z = z / repetition where z > 0 else z * repetition     tokens of the prompt or the output
    z = z - frequency * count - presence * (count > 0)     count: occurrences in the output
    z = -inf                                               stop tokens before their first position
    z = -inf where z is NaN

in float32 and in this order. The repetition penalty is that of Keskar and others, "CTRL: A
Conditional Transformer Language Model for Controllable Generation" (2019), as Hugging Face's
processor computes it. Tables that the request's flags leave out are not read.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.sampling_tables import (
    COUNT_SHIFT,
    FIRST_STOP_POSITION,
    FLAGS,
    FREQUENCY,
    IN_PROMPT,
    IS_STOP,
    K_COUNT_SHIFT,
    K_FIRST_STOP_POSITION,
    K_FLAGS,
    K_FREQUENCY,
    K_IN_PROMPT,
    K_IS_STOP,
    K_PRESENCE,
    K_REPETITION,
    K_USES_LOGIT_BIAS,
    K_USES_TOKEN_STATE,
    PRESENCE,
    REPETITION,
    USES_LOGIT_BIAS,
    USES_TOKEN_STATE,
)


@triton.jit
def adjust_logits(
    logits,  # float32 block
    ids,  # its token ids
    inside,  # which of them exist
    floats,  # the request's row of sampling_floats
    ints,  # of sampling_ints
    token_state,  # of token_state
    logit_bias,  # of logit_bias
    next_position,  # of the token to be chosen
):
    """The adjusted block, without NaN."""
    flags = tl.load(ints + K_FLAGS)
    if (flags & K_USES_LOGIT_BIAS) != 0:
        logits += tl.load(logit_bias + ids, mask=inside, other=0.0)
    if (flags & K_USES_TOKEN_STATE) != 0:
        state = tl.load(token_state + ids, mask=inside, other=0)
        count = state >> K_COUNT_SHIFT
        repetition = tl.load(floats + K_REPETITION)
        repeated = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where((count > 0) | ((state & K_IN_PROMPT) != 0), repeated, logits)
        logits -= tl.load(floats + K_FREQUENCY) * count.to(tl.float32)
        logits = tl.where(count > 0, logits - tl.load(floats + K_PRESENCE), logits)
        banned = next_position < tl.load(ints + K_FIRST_STOP_POSITION)
        logits = tl.where(banned & ((state & K_IS_STOP) != 0), -float("inf"), logits)
    return tl.where(logits == logits, logits, -float("inf"))


def adjust_logits_torch(
    logits: torch.Tensor,
    floats: list[float],
    ints: list[int],
    token_state: torch.Tensor,
    logit_bias: torch.Tensor,
    next_position: int,
) -> torch.Tensor:
    """The adjusted row [V] of float32 `logits`, without NaN; the other arguments are its own."""
    if ints[FLAGS] & USES_LOGIT_BIAS:
        logits = logits + logit_bias
    if ints[FLAGS] & USES_TOKEN_STATE:
        count = token_state >> COUNT_SHIFT
        occurs = (count > 0) | (token_state & IN_PROMPT > 0)
        repetition = floats[REPETITION]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(occurs, repeated, logits)
        logits = logits - floats[FREQUENCY] * count - floats[PRESENCE] * (count > 0)
        if next_position < ints[FIRST_STOP_POSITION]:
            logits = logits.masked_fill(token_state & IS_STOP > 0, -math.inf)
    return logits.masked_fill(logits.isnan(), -math.inf)
