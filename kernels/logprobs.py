"""Log-probabilities of given tokens, and each row's most likely tokens where asked for.

They are of the model's own distribution: natural logarithm of the softmax of raw logits, before
temperature, penalties or bias. Knows nothing of how the tokens were chosen.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.log_normalizer import finite_or_zero, log_normalizer_torch
from kernels.op import define_op
from kernels.truncation import float_to_ordered, ordered_to_float

# Columns of the outputs: the most that a row may ask for.
MAX_LOGPROBS = 20
BLOCK = 8192

_MAX_LOGPROBS = tl.constexpr(MAX_LOGPROBS)
_LANES = tl.constexpr(32)  # a power of two that holds them
# Keys of no token, below and above all others.
_NO_KEY, _LAST_KEY = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
_ID_MASK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _values_to_keys(values, ids):
    """int64 keys ordered by value, of equal values by falling id; NaN counts as -inf."""
    values = tl.where(values == values, values, -float("inf")) + 0.0  # -0.0 equals 0.0
    return (float_to_ordered(values).to(tl.int64) << 32) | (ids ^ _ID_MASK).to(tl.int64)


@triton.jit
def _normalize_row(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(shift, log_sum) of the row, as `kernels.log_normalizer` has them."""
    # Lane by lane: the largest value seen, and the sum of exp below it.
    lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        block = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(lane_max, tl.where(block == block, block, -float("inf")))
        shift = finite_or_zero(larger)
        lane_sum = lane_sum * tl.exp(tl.minimum(finite_or_zero(lane_max) - shift, 0.0)) + tl.exp(
            block - shift
        )
        lane_max = larger
    shift = finite_or_zero(tl.max(lane_max))
    scale = tl.exp(tl.minimum(finite_or_zero(lane_max) - shift, 0.0))
    return shift, tl.log(tl.sum(lane_sum * scale))


@triton.jit
def _find_top_keys(row, wanted, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The row's `wanted` largest keys, in any order, in the first lanes of [_LANES]."""
    lanes = tl.arange(0, BLOCK)
    lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + lanes
        values = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
        lane_max = tl.maximum(lane_max, tl.where(values == values, values, -float("inf")))
    bound = -float("inf")
    found = 0
    while found < wanted:
        bound, best_lane = tl.max(lane_max, axis=0, return_indices=True)
        lane_max = tl.where(lanes == best_lane, -float("inf"), lane_max)
        found += 1
    bound_key = float_to_ordered(bound + 0.0).to(tl.int64) << 32
    columns = tl.arange(0, _LANES)
    top = tl.where(columns < wanted, _NO_KEY, _LAST_KEY)
    least, least_column = tl.min(top, axis=0, return_indices=True)
    for start in range(0, VOCAB, BLOCK):
        ids = start + lanes
        values = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
        keys = tl.where(ids < VOCAB, _values_to_keys(values, ids), _NO_KEY)
        best = tl.max(keys)
        while (best >= bound_key) & (best > least):
            top = tl.where(columns == least_column, best, top)
            least, least_column = tl.min(top, axis=0, return_indices=True)
            keys = tl.where(keys == best, _NO_KEY, keys)
            best = tl.max(keys)
    return top


@triton.jit
def _logprobs_kernel(
    logits,  # [B, V]
    targets,  # [B]
    num_logprobs,  # [B]
    normalizer,  # [B, 2] or None
    target_logprob,  # [B] out
    top_values,  # [B, MAX_LOGPROBS] out
    top_ids,  # [B, MAX_LOGPROBS] out
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    if normalizer is None:
        shift, log_sum = _normalize_row(logits, VOCAB, BLOCK)
    else:
        shift, log_sum = tl.load(normalizer + 2 * row), tl.load(normalizer + 2 * row + 1)
    target = tl.load(targets + row)
    exists = (target >= 0) & (target < VOCAB)
    target_value = tl.load(logits + target, mask=exists, other=-float("inf")).to(tl.float32)
    tl.store(target_logprob + row, target_value - shift - log_sum)

    wanted = tl.minimum(tl.minimum(tl.load(num_logprobs + row), _MAX_LOGPROBS), VOCAB)
    columns = tl.arange(0, _LANES)
    out = row * _MAX_LOGPROBS + columns
    rest = (columns >= wanted) & (columns < _MAX_LOGPROBS)
    tl.store(top_values + out, tl.full([_LANES], -float("inf"), tl.float32), mask=rest)
    tl.store(top_ids + out, tl.full([_LANES], -1, tl.int32), mask=rest)
    if wanted > 0:
        keys = _find_top_keys(logits, wanted, VOCAB, BLOCK)
        keys = tl.where(columns < wanted, keys, _NO_KEY)
        rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
        values = ordered_to_float((keys >> 32).to(tl.int32)) - shift - log_sum
        ids = (keys & _ID_MASK).to(tl.int32) ^ _ID_MASK
        out = row * _MAX_LOGPROBS + rank
        tl.store(top_values + out, values, mask=columns < wanted)
        tl.store(top_ids + out, ids, mask=columns < wanted)


def logprobs_triton(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_logprobs: torch.Tensor,
    normalizer: torch.Tensor | None,
    target_logprob: torch.Tensor,
    top_values: torch.Tensor,
    top_ids: torch.Tensor,
) -> None:
    """`logits[b] - log(sum(exp(logits[b])))` of each row's target, and of its largest entries.

    logits: [B, V], any float dtype, any row stride. targets, num_logprobs: int32 [B]. normalizer:
    float32 [B, 2], the rows' shift and log_sum (`kernels.log_normalizer`) where they are known,
    as `sample` leaves them; None: the rows are summed here.
    target_logprob: float32 [B], written; -inf where the target is no token of the vocabulary.
    top_values, top_ids: float32 and int32 [B, 20], written: the num_logprobs[b] largest, the
    lower id first where values are equal; -inf and -1 in what is left (all of it where
    num_logprobs is 0 or -1). NaN counts as -inf in this order and makes the row's values NaN.

    One program a row. With a normalizer it reads the target's logit alone, without one the row;
    where the largest are wanted it reads the row twice, the second time from L2: the k-th largest
    of some thousand strided slices' maxima bounds the k-th largest of all, so few entries beyond
    the k are ever compared with each other. Raises AssertionError on other shapes, dtypes or
    strides.
    """
    batch_size, vocab = logits.shape
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    assert logits.dtype.is_floating_point, f"logits are {logits.dtype}"
    for name, tensor, dtype, shape in (
        ("targets", targets, torch.int32, (batch_size,)),
        ("num_logprobs", num_logprobs, torch.int32, (batch_size,)),
        ("normalizer", normalizer, torch.float32, (batch_size, 2)),
        ("target_logprob", target_logprob, torch.float32, (batch_size,)),
        ("top_values", top_values, torch.float32, (batch_size, MAX_LOGPROBS)),
        ("top_ids", top_ids, torch.int32, (batch_size, MAX_LOGPROBS)),
    ):
        if tensor is None:
            continue
        assert tensor.dtype == dtype, f"{name} is {dtype}, not {tensor.dtype}"
        assert tensor.shape == shape, f"{name} is {list(shape)}, not {list(tensor.shape)}"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    _logprobs_kernel[(batch_size,)](
        logits,
        targets,
        num_logprobs,
        normalizer,
        target_logprob,
        top_values,
        top_ids,
        logits.stride(0),
        VOCAB=vocab,
        BLOCK=BLOCK,
        num_warps=32,
        **dependent_launch(logits.device),
    )


def logprobs_torch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_logprobs: torch.Tensor,
    normalizer: torch.Tensor | None,
    target_logprob: torch.Tensor,
    top_values: torch.Tensor,
    top_ids: torch.Tensor,
) -> None:
    """Twin of `logprobs_triton`."""
    vocab = logits.shape[1]
    pairs = log_normalizer_torch(logits.float()) if normalizer is None else normalizer
    exists = (targets >= 0) & (targets < vocab)
    chosen = logits.gather(1, (targets * exists).long().unsqueeze(1)).squeeze(1).float()  # [B]
    chosen = chosen.masked_fill(~exists, -math.inf)
    target_logprob.copy_(chosen - pairs[:, 0] - pairs[:, 1])
    top_values.fill_(-math.inf)
    top_ids.fill_(-1)
    for row, asked in enumerate(num_logprobs.tolist()):
        wanted = min(asked, MAX_LOGPROBS, vocab)
        if wanted > 0:
            values = logits[row].float()
            values = values.masked_fill(values.isnan(), -math.inf)
            least = torch.topk(values, wanted).values[-1]
            ids = torch.nonzero(values >= least).squeeze(1)
            values, order = torch.sort(values[ids], descending=True, stable=True)
            top_values[row, :wanted] = values[:wanted] - pairs[row, 0] - pairs[row, 1]
            top_ids[row, :wanted] = ids[order[:wanted]]


logprobs = define_op(
    logprobs_triton, logprobs_torch, mutates=("target_logprob", "top_values", "top_ids")
)
