"""What turns a row's raw logits into log-probabilities: a shift and the logarithm of a sum.

    logprob = (logit - shift) - log_sum     log_sum = log(sum(exp(logits - shift)))

The shift is the row's largest logit, 0 where that is infinite; a NaN in the row makes log_sum
NaN. The two are kept apart and come off in this order: their sum would be rounded as a number of
the logits' size, which is more than the whole logprob of a likely token.
"""

import math

import torch
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def finite_or_zero(value):
    """What to subtract for a largest value of `value`."""
    return tl.where(tl.abs(value) == float("inf"), 0.0, value)


@triton.jit
def sum_exp(values, largest):
    """sum(exp(values - shift)), for a largest value of `largest`."""
    # exp itself would also keep what is too small for a normal float, at twice the instructions.
    return tl.sum(tl.exp2((values - finite_or_zero(largest)) * _LOG2_E))


def log_normalizer_torch(logits: torch.Tensor) -> torch.Tensor:
    """(shift, log_sum) of each row of float32 `logits` [B, V]; float32 [B, 2]."""
    largest = logits.masked_fill(logits.isnan(), -math.inf).amax(dim=1)
    shift = largest.masked_fill(largest.isinf(), 0.0)
    log_sum = torch.log(torch.exp(logits - shift[:, None]).sum(dim=1))
    return torch.stack((shift, log_sum), dim=1)
