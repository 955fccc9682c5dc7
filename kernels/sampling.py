"""The next token of each row: penalties, truncation and a draw, without a sort or a host read.

Knows nothing of text, stop strings or adapters. Parameters belong to the request, not to the
row, and are read by request slot from tables whose columns are named here.

A row's token is the argmax of its scaled logits plus Gumbel noise, which is a draw from their
softmax (Gumbel 1954; Maddison, Tarlow, Minka: "A* Sampling", 2014). The noise comes from a
counter generator (`kernels.random`), so a token depends on the request alone.

Two launches. The first, over (rows, chunks of the vocabulary), leaves each chunk's partial
results: of a greedy row that nothing adjusts they are those of its logits. The second, over rows,
combines them in order, and where a row truncates cuts its scaled logits (`kernels.truncation`)
and draws from what is kept. Untruncated rows are read once from memory; nothing a row computes
depends on another row or on the batch.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.log_normalizer import finite_or_zero, log_normalizer_torch, sum_exp
from kernels.logit_adjustment import adjust_logits_torch
from kernels.op import define_op
from kernels.sampling_tables import (
    COUNT_UNIT,
    FLAGS,
    K_COUNT_UNIT,
    K_FLAGS,
    K_LEAST_TEMPERATURE,
    K_NUM_COLUMNS,
    K_TEMPERATURE,
    K_USES_TOKEN_STATE,
    LEAST_TEMPERATURE,
    MIN_P,
    NUM_COLUMNS,
    SAMPLE_INDEX,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    USES_TOKEN_STATE,
)
from kernels.token_draw import (
    LARGEST_SCORE,
    best_of_chunk,
    draw_token_torch,
    draw_truncated,
    truncates,
)
from kernels.truncation import CANDIDATES

# Elements of the vocabulary per program of the first launch, and per iteration of the second. A
# chunk is held in registers, sixteen elements a lane: fewer would not pay for its reductions.
CHUNK = 2048
BLOCK = 8192
# Elements of a chunk that are adjusted and drawn from at once, which takes more registers. Four a
# lane are what one draw of the generator gives it, so nothing moves between lanes.
PART = 512
_CHUNK_WARPS = 4

# What a chunk leaves behind: the largest raw logit and the sum of exp below it; the largest
# score and its token; for rows that truncate, the weight and number of their entries.
_RAW_MAX, _RAW_SUM = tl.constexpr(0), tl.constexpr(1)
_BEST, _TOKEN = tl.constexpr(2), tl.constexpr(3)
_WEIGHT, _COUNT = tl.constexpr(4), tl.constexpr(5)
_NUM_PARTIALS = 6
_CANDIDATES_AT = tl.constexpr(_NUM_PARTIALS)


def sampling_partials_shape(batch_size: int, vocab_size: int) -> tuple[int, int]:
    """Shape of `sample`'s float32 workspace `partials`."""
    return batch_size, _NUM_PARTIALS * triton.cdiv(vocab_size, CHUNK) + CANDIDATES


@triton.jit
def _sample_chunks_kernel(
    logits,
    logits_stride,
    row_request,
    sampling_floats,
    sampling_ints,
    seeds,
    token_state,
    logit_bias,
    positions,
    scratch,
    partials,
    partials_stride,
    dummy_request,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * logits_stride
    first_id = chunk * CHUNK
    ids = first_id + tl.arange(0, CHUNK)
    # Even of a dummy's row: the load does not wait for another one, which says whose row it is.
    raw = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
    request = tl.load(row_request + row).to(tl.int64)
    if request == dummy_request:
        return
    floats = sampling_floats + request * K_NUM_COLUMNS
    ints = sampling_ints + request * K_NUM_COLUMNS
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    left = partials + row * partials_stride + chunk
    temperature, flags = tl.load(floats + K_TEMPERATURE), tl.load(ints + K_FLAGS)

    values = tl.where(raw == raw, raw, -float("inf"))  # a NaN reaches the sum alone
    raw_max = tl.max(values)
    tl.store(left + _RAW_MAX * chunks, raw_max)
    tl.store(left + _RAW_SUM * chunks, sum_exp(raw, raw_max))
    if (temperature < K_LEAST_TEMPERATURE) & (flags == 0):
        best, token = raw_max, tl.min(tl.where(values == raw_max, ids, VOCAB))
    else:
        best, token, weight, count = best_of_chunk(
            logits,
            first_id,
            floats,
            ints,
            seeds + request,
            token_state + request * VOCAB,
            logit_bias + request * VOCAB,
            tl.load(positions + request) + 1,
            scratch + row * VOCAB,
            VOCAB,
            CHUNK,
            PART,
        )
        tl.store(left + _WEIGHT * chunks, weight)
        tl.store(left + _COUNT * chunks, count)
    tl.store(left + _BEST * chunks, best)
    tl.store(left + _TOKEN * chunks, token.to(tl.float32))


@triton.jit
def _sample_rows_kernel(
    row_request,
    sampling_floats,
    sampling_ints,
    seeds,
    token_state,
    last_token,
    positions,
    scratch,
    partials,
    partials_stride,
    sampled,
    normalizer,
    dummy_request,
    chunks,
    VOCAB: tl.constexpr,
    SLOTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(row_request + row).to(tl.int64)
    if request == dummy_request:
        tl.store(sampled + row, 0)
        tl.store(normalizer + 2 * row, 0.0)
        tl.store(normalizer + 2 * row + 1, 0.0)
        return
    floats = sampling_floats + request * K_NUM_COLUMNS
    ints = sampling_ints + request * K_NUM_COLUMNS
    partials += row * partials_stride
    slots = tl.arange(0, SLOTS)
    have = slots < chunks

    raw_max = tl.load(partials + _RAW_MAX * chunks + slots, mask=have, other=-float("inf"))
    raw_sum = tl.load(partials + _RAW_SUM * chunks + slots, mask=have, other=0.0)
    shift = finite_or_zero(tl.max(raw_max))
    scale = tl.where(
        raw_max == -float("inf"), 1.0, tl.exp(tl.minimum(finite_or_zero(raw_max) - shift, 0.0))
    )
    tl.store(normalizer + 2 * row, shift)
    tl.store(normalizer + 2 * row + 1, tl.log(tl.sum(raw_sum * scale)))

    best = tl.load(partials + _BEST * chunks + slots, mask=have, other=-float("inf"))
    top, lane = tl.max(best, axis=0, return_indices=True)
    token = tl.load(partials + _TOKEN * chunks + lane).to(tl.int32)
    position = tl.load(positions + request) + 1
    sampled_by_noise = tl.load(floats + K_TEMPERATURE) >= K_LEAST_TEMPERATURE
    if sampled_by_noise & truncates(floats, ints, VOCAB) & (top > -float("inf")):
        weight = tl.load(partials + _WEIGHT * chunks + slots, mask=have, other=0.0)
        weight = tl.where(best > -float("inf"), weight * tl.exp(best - top), 0.0)
        count = tl.load(partials + _COUNT * chunks + slots, mask=have, other=0.0)
        token = draw_truncated(
            scratch + row * VOCAB,
            partials + _CANDIDATES_AT * chunks,
            top,
            tl.sum(count.to(tl.int32)),
            tl.sum(weight),
            floats,
            ints,
            tl.load(seeds + request),
            position,
            VOCAB,
            CANDIDATES,
            BLOCK,
        )
    tl.store(sampled + row, token)
    tl.store(last_token + request, token)
    tl.store(positions + request, position)
    if (tl.load(ints + K_FLAGS) & K_USES_TOKEN_STATE) != 0:
        state = token_state + request * VOCAB + token
        tl.store(state, tl.load(state) + K_COUNT_UNIT)


def sample_triton(
    logits: torch.Tensor,
    row_request: torch.Tensor,
    sampling_floats: torch.Tensor,
    sampling_ints: torch.Tensor,
    seeds: torch.Tensor,
    token_state: torch.Tensor,
    logit_bias: torch.Tensor,
    last_token: torch.Tensor,
    positions: torch.Tensor,
    scratch: torch.Tensor,
    partials: torch.Tensor,
    sampled: torch.Tensor,
    normalizer: torch.Tensor,
) -> None:
    """Choose and record the next token of every row.

    logits: [B, V], any float dtype, any row stride. row_request: int32 [B], a request slot below
    R; rows of the dummy (R - 1) get token 0 and normalizer 0, and touch no table.
    sampling_floats, sampling_ints, token_state, logit_bias (float32 [R, V]): see
    `kernels.sampling_tables`. seeds: int64 [R]. last_token, positions: int32 [R], the newest
    token and its position. scratch: float32 [B, V] and partials: float32
    `sampling_partials_shape(B, V)`, workspaces. sampled: int32 [B]. normalizer: float32 [B, 2],
    shift and log_sum of the raw logits (`kernels.log_normalizer`).

    Per row, at position = positions[request] + 1:

        z       = the adjusted logits (`kernels.logit_adjustment`)
        token   = argmax z                                          temperature 0
                = argmax over kept(z / temperature) of z / temperature + gumbel
        kept    = top-k, top-p, min-p (`kernels.truncation`); ties at a threshold are all kept
        gumbel  = `kernels.random`, of (seed, sample index, position, token id)

    The lowest id wins ties; so a row of NaN or -inf alone gets token 0. In place: last_token =
    token, positions += 1, token's count in token_state += 1 if the request uses it; at most one
    row per request. Reads B·V logits and the tables in use once, the logits of rows that are not
    plainly greedy twice, then from cache; rows that truncate move some five times 4·V bytes more,
    mostly from L2. Raises AssertionError on other shapes, dtypes
    or strides.
    """
    batch_size, vocab = logits.shape
    requests = seeds.shape[0]
    chunks = triton.cdiv(vocab, CHUNK)
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    assert logits.dtype.is_floating_point, f"logits are {logits.dtype}"
    assert vocab <= 1 << 24, f"token ids pass through float32: vocabulary {vocab} is too large"
    for name, tensor, dtype, shape in (
        ("row_request", row_request, torch.int32, (batch_size,)),
        ("sampling_floats", sampling_floats, torch.float32, (requests, NUM_COLUMNS)),
        ("sampling_ints", sampling_ints, torch.int32, (requests, NUM_COLUMNS)),
        ("seeds", seeds, torch.int64, (requests,)),
        ("token_state", token_state, torch.int32, (requests, vocab)),
        ("logit_bias", logit_bias, torch.float32, (requests, vocab)),
        ("last_token", last_token, torch.int32, (requests,)),
        ("positions", positions, torch.int32, (requests,)),
        ("scratch", scratch, torch.float32, (batch_size, vocab)),
        ("partials", partials, torch.float32, sampling_partials_shape(batch_size, vocab)),
        ("sampled", sampled, torch.int32, (batch_size,)),
        ("normalizer", normalizer, torch.float32, (batch_size, 2)),
    ):
        assert tensor.dtype == dtype, f"{name} is {dtype}, not {tensor.dtype}"
        assert tensor.shape == shape, f"{name} is {list(shape)}, not {list(tensor.shape)}"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    _sample_chunks_kernel[(batch_size, chunks)](
        logits,
        logits.stride(0),
        row_request,
        sampling_floats,
        sampling_ints,
        seeds,
        token_state,
        logit_bias,
        positions,
        scratch,
        partials,
        partials.stride(0),
        requests - 1,
        VOCAB=vocab,
        CHUNK=CHUNK,
        PART=min(PART, CHUNK),
        num_warps=_CHUNK_WARPS,
        **dependent_launch(logits.device),
    )
    _sample_rows_kernel[(batch_size,)](
        row_request,
        sampling_floats,
        sampling_ints,
        seeds,
        token_state,
        last_token,
        positions,
        scratch,
        partials,
        partials.stride(0),
        sampled,
        normalizer,
        requests - 1,
        chunks,
        VOCAB=vocab,
        SLOTS=triton.next_power_of_2(chunks),
        CANDIDATES=CANDIDATES,
        BLOCK=BLOCK,
        num_warps=32,
        **dependent_launch(logits.device),
    )


def sample_torch(
    logits: torch.Tensor,
    row_request: torch.Tensor,
    sampling_floats: torch.Tensor,
    sampling_ints: torch.Tensor,
    seeds: torch.Tensor,
    token_state: torch.Tensor,
    logit_bias: torch.Tensor,
    last_token: torch.Tensor,
    positions: torch.Tensor,
    scratch: torch.Tensor,
    partials: torch.Tensor,
    sampled: torch.Tensor,
    normalizer: torch.Tensor,
) -> None:
    """Twin of `sample_triton`; draws noise for kept tokens only, and leaves workspaces alone."""
    rows = logits.float()
    normalizer.copy_(log_normalizer_torch(rows))
    for row, request in enumerate(row_request.tolist()):
        if request == len(seeds) - 1:
            sampled[row], normalizer[row] = 0, 0.0
            continue
        floats, ints = sampling_floats[request].tolist(), sampling_ints[request].tolist()
        next_position = int(positions[request]) + 1
        adjusted = adjust_logits_torch(
            rows[row], floats, ints, token_state[request], logit_bias[request], next_position
        )
        if floats[TEMPERATURE] < LEAST_TEMPERATURE:
            token = int(adjusted.argmax())
        else:
            token = draw_token_torch(
                (adjusted / floats[TEMPERATURE]).clamp_max(LARGEST_SCORE),
                ints[TOP_K],
                floats[TOP_P],
                floats[MIN_P],
                int(seeds[request]),
                next_position,
                ints[SAMPLE_INDEX],
            )
        sampled[row] = token
        last_token[request] = token
        positions[request] = next_position
        if ints[FLAGS] & USES_TOKEN_STATE:
            token_state[request, token] += COUNT_UNIT


sample = define_op(
    sample_triton,
    sample_torch,
    mutates=(
        "token_state",
        "last_token",
        "positions",
        "scratch",
        "partials",
        "sampled",
        "normalizer",
    ),
)
