"""The next token: kernel against twin, twin against Hugging Face's processors and chi-square."""

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import sampling as module
from kernels.logit_adjustment import adjust_logits_torch
from kernels.random import gumbel_row_torch
from kernels.sampling import sample, sample_torch, sample_triton, sampling_partials_shape
from kernels.sampling_tables import (
    COUNT_UNIT,
    FIRST_STOP_POSITION,
    FLAGS,
    FREQUENCY,
    IN_PROMPT,
    IS_STOP,
    MIN_P,
    NUM_COLUMNS,
    PRESENCE,
    REPETITION,
    SAMPLE_INDEX,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    USES_LOGIT_BIAS,
    USES_TOKEN_STATE,
)
from tests.kernels.cross_compile import compile_launches

PENALTIES = {REPETITION: 1.3, PRESENCE: 0.4, FREQUENCY: 0.25}
# Columns of sampling_floats and of sampling_ints that differ from plain sampling. The newest
# token of slot s is at position 11 s: one request has reached its first stop position, one not.
REQUESTS = [
    ({TEMPERATURE: 0.0}, {}),
    ({}, {}),
    ({TEMPERATURE: 1.7}, {SAMPLE_INDEX: 3}),
    ({}, {TOP_K: 5}),
    ({}, {TOP_K: 100_000}),
    ({TOP_P: 0.9}, {}),
    ({MIN_P: 0.05}, {}),
    ({TEMPERATURE: 0.6, TOP_P: 0.8, MIN_P: 0.02}, {TOP_K: 50}),
    ({TEMPERATURE: 0.0} | PENALTIES, {FLAGS: USES_TOKEN_STATE}),
    (PENALTIES, {FLAGS: USES_TOKEN_STATE | USES_LOGIT_BIAS, FIRST_STOP_POSITION: 9 * 11 + 1}),
    (PENALTIES | {TOP_P: 0.7}, {FLAGS: USES_TOKEN_STATE, FIRST_STOP_POSITION: 10 * 11 + 2}),
    ({TOP_P: 0.95}, {FLAGS: USES_LOGIT_BIAS, TOP_K: 400}),
    ({TEMPERATURE: 1e-7, TOP_P: 0.1}, {}),
]


@dataclasses.dataclass
class Tables:
    """The arguments of `sample` but the logits and the rows' requests."""

    sampling_floats: torch.Tensor
    sampling_ints: torch.Tensor
    seeds: torch.Tensor
    token_state: torch.Tensor
    logit_bias: torch.Tensor
    last_token: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def build(cls, requests: list, vocab: int) -> "Tables":
        """One slot per (floats, ints) and the dummy's, whose row is poison."""
        number = len(requests) + 1
        generator = torch.Generator().manual_seed(3)
        floats = torch.full((number, NUM_COLUMNS), torch.nan)
        floats[:-1] = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
        ints = torch.zeros(number, NUM_COLUMNS, dtype=torch.int32)
        for slot, (float_columns, int_columns) in enumerate(requests):
            for column, value in float_columns.items():
                floats[slot, column] = value
            for column, value in int_columns.items():
                ints[slot, column] = value
        state = torch.randint(0, 2, (number, vocab), generator=generator) * IN_PROMPT
        state += (torch.rand(number, vocab, generator=generator) < 0.5) * IS_STOP
        counts = torch.randint(1, 4, (number, vocab), generator=generator)
        state += (torch.rand(number, vocab, generator=generator) < 0.3) * counts * COUNT_UNIT
        bias = torch.randn(number, vocab, generator=generator) * 2
        bias[torch.rand(number, vocab, generator=generator) < 0.2] = -math.inf
        bias[-1] = torch.nan
        seeds = torch.arange(number) * 7_777_777_777 - 10
        return cls(
            floats,
            ints,
            seeds,
            state.int(),
            bias,
            torch.full((number,), -5, dtype=torch.int32),
            torch.arange(number, dtype=torch.int32) * 11,
        )

    def copy_to(self, device) -> "Tables":
        tensors = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Tables(*(tensor.to(device, copy=True) for tensor in tensors))

    def apply(self, op, logits, row_request) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `op` on these tables; returns sampled and normalizer."""
        batch_size, vocab = logits.shape
        device = logits.device
        sampled = torch.full((batch_size,), -9, dtype=torch.int32, device=device)
        normalizer, scratch, partials = (
            torch.full(shape, torch.nan, device=device)
            for shape in (
                (batch_size, 2),
                (batch_size, vocab),
                sampling_partials_shape(batch_size, vocab),
            )
        )
        arguments = [getattr(self, field.name) for field in dataclasses.fields(self)]
        op(logits, row_request, *arguments, scratch, partials, sampled, normalizer)
        return sampled, normalizer


def _logits(batch_size: int, vocab: int, dtype=torch.float32, scale=3.0) -> torch.Tensor:
    """Rows of a wider matrix with NaN between them."""
    generator = torch.Generator().manual_seed(vocab + batch_size)
    wide = torch.full((batch_size, vocab + 8), torch.nan, dtype=dtype)
    wide[:, :vocab] = torch.randn(batch_size, vocab, generator=generator) * scale
    return wide[:, :vocab]


def _scores(tables: Tables, logits: torch.Tensor, request: int) -> torch.Tensor:
    """What the request's token is the argmax of, before truncation, from tables not yet used."""
    floats = tables.sampling_floats[request].tolist()
    ints = tables.sampling_ints[request].tolist()
    position = int(tables.positions[request]) + 1
    state, bias = tables.token_state[request], tables.logit_bias[request]
    scores = adjust_logits_torch(logits.float(), floats, ints, state, bias, position)
    if floats[TEMPERATURE] > 1e-5:
        noise = gumbel_row_torch(
            int(tables.seeds[request]), len(logits), position, ints[SAMPLE_INDEX], logits.device
        )
        scores = scores / floats[TEMPERATURE] + noise
    return scores


def _assert_kernel_matches_twin(tables: Tables, logits, row_request, device) -> None:
    """Equal tokens and tables; a token may differ only from one whose score is as good.

    Logarithms and divisions of the two round apart by some 1e-6 of scores below 30.
    """
    before, on_device = tables.copy_to("cpu"), tables.copy_to(device)
    sampled, normalizer = on_device.apply(sample_triton, logits.to(device), row_request.to(device))
    twin_sampled, twin_normalizer = tables.apply(sample_torch, logits, row_request)
    assert_close(normalizer.cpu(), twin_normalizer, rtol=2e-6, atol=2e-6, equal_nan=True)
    after = on_device.copy_to("cpu")
    for row, request in enumerate(row_request.tolist()):
        token, expected = int(sampled[row]), int(twin_sampled[row])
        if token != expected:
            scores = _scores(before, logits[row], request)
            assert abs(scores[token] - scores[expected]) < 1e-4, (row, token, expected)
            # From here on as if the twin had chosen it too.
            tables.last_token[request] = token
            if tables.sampling_ints[request, FLAGS] & USES_TOKEN_STATE:
                tables.token_state[request, token] += COUNT_UNIT
                tables.token_state[request, expected] -= COUNT_UNIT
    for field in dataclasses.fields(Tables):
        actual, expected = getattr(after, field.name), getattr(tables, field.name)
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num()), field.name


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("vocab", "dtype", "chunk", "block"),
    [(515, torch.float32, 128, 256), (1283, torch.bfloat16, 1024, 8192), (7, torch.float16, 4, 8)],
)
def test_kernel_matches_twin(kernel_device, monkeypatch, vocab, dtype, chunk, block):
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "CANDIDATES", 64)
    tables = Tables.build(REQUESTS, vocab)
    tables.token_state[9] |= IS_STOP  # one position earlier they would all be banned
    dummy = len(REQUESTS)
    order = torch.randperm(dummy, generator=torch.Generator().manual_seed(1)).tolist()
    row_request = torch.tensor([*order[:5], dummy, *order[5:], dummy], dtype=torch.int32)
    _assert_kernel_matches_twin(
        tables, _logits(len(row_request), vocab, dtype), row_request, kernel_device
    )


@pytest.mark.kernel
def test_kernel_draws_what_the_twin_draws_for_many_seeds(kernel_device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    tables = Tables.build([({}, {}), ({TOP_P: 0.9}, {})] * 16, 33)
    row_request = torch.arange(32, dtype=torch.int32)
    logits = _logits(1, 33).expand(32, 33)
    _assert_kernel_matches_twin(tables, logits, row_request, kernel_device)


def _odd_rows(vocab: int) -> torch.Tensor:
    rows = _logits(6, vocab)
    rows[0] = torch.nan
    rows[1] = -math.inf
    rows[2] = 1.5  # all equal: every one is kept
    rows[3, :200] = torch.nan
    rows[4, 77] = math.inf
    rows[5] = rows[5].round()
    return rows


@pytest.mark.kernel
@pytest.mark.parametrize("first", [0, 1])
def test_kernel_matches_twin_on_odd_rows(kernel_device, monkeypatch, first):
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "CANDIDATES", 64)
    choices = [({TEMPERATURE: 0.0}, {}), ({}, {}), ({TOP_P: 0.9}, {TOP_K: 3}), ({MIN_P: 0.3}, {})]
    tables = Tables.build(choices[first::2] * 6, 515)
    row_request = torch.arange(12, dtype=torch.int32)
    logits = _odd_rows(515).repeat_interleave(2, dim=0)
    _assert_kernel_matches_twin(tables, logits, row_request, kernel_device)


@pytest.mark.kernel
def test_row_depends_neither_on_neighbours_nor_on_its_index(kernel_device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 128)
    logits = _logits(4, 515).to(kernel_device)
    requests = torch.tensor([2, 9, 7, 5], dtype=torch.int32, device=kernel_device)
    tables = Tables.build(REQUESTS, 515)
    together = tables.copy_to(kernel_device).apply(sample_triton, logits, requests)
    for row in (2, 3):
        alone = tables.copy_to(kernel_device).apply(
            sample_triton, logits[row : row + 1], requests[row : row + 1]
        )
        for batch, single in zip(together, alone, strict=True):
            assert torch.equal(batch[row], single[0])


@pytest.mark.kernel
def test_a_chunk_in_parts_is_the_chunk_at_once(kernel_device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 128)
    logits = _odd_rows(515).repeat(2, 1)[:9].to(kernel_device)
    requests = torch.arange(9, dtype=torch.int32, device=kernel_device)
    tables, found = Tables.build(REQUESTS, 515), []
    for part in (128, 32, 4):  # 5 chunks: of the last one all but the first parts are outside
        monkeypatch.setattr(module, "PART", part)
        mine = tables.copy_to(kernel_device)
        outputs = mine.apply(sample_triton, logits, requests)
        found.append([t.nan_to_num(7) for t in (*outputs, mine.token_state, mine.positions)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.kernel
def test_greedy_rows_take_the_lowest_id_of_their_best(kernel_device, monkeypatch):
    """Whether the logits are read as they are or adjusted by a table that changes nothing."""
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "PART", 32)
    rows = torch.full((5, 515), -math.inf)
    rows[0, :2] = torch.nan  # as good as -inf, and lower than the others
    rows[1, 130:] = torch.nan
    rows[1, 129] = -5.0
    rows[2, [514, 300, 299, 200]] = 2.5
    rows[3, [0, 127, 128]] = torch.tensor([-0.0, 0.0, 0.0])
    rows[4, [50, 400]] = math.inf
    rows = rows.repeat_interleave(2, dim=0)
    tables = Tables.build(
        [({TEMPERATURE: 0.0}, {FLAGS: n % 2 * USES_LOGIT_BIAS}) for n in range(10)], 515
    )
    tables.logit_bias.zero_()
    requests = torch.arange(10, dtype=torch.int32)
    sampled, _ = tables.copy_to(kernel_device).apply(
        sample_triton, rows.to(kernel_device), requests.to(kernel_device)
    )
    assert sampled.tolist() == [0, 0, 129, 129, 200, 200, 0, 0, 50, 50]
    _assert_kernel_matches_twin(tables, rows, requests, kernel_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile(dtype):
    vocab = 128256
    tables = Tables.build([({}, {})], 1)
    tables.token_state = torch.empty(2, vocab, dtype=torch.int32)
    tables.logit_bias = torch.empty(2, vocab)

    def launch(logits, row_request):
        tables.apply(sample_triton, logits, row_request)

    row_request = torch.zeros(3, dtype=torch.int32)
    assert compile_launches(launch, torch.empty(3, vocab, dtype=dtype), row_request) == 2


def _hugging_face_scores(floats: dict, top_k: int, logits, prompt: torch.Tensor) -> torch.Tensor:
    scores = logits.unsqueeze(0)
    if REPETITION in floats:
        scores = RepetitionPenaltyLogitsProcessor(floats[REPETITION])(prompt.unsqueeze(0), scores)
    scores = TemperatureLogitsWarper(floats[TEMPERATURE])(None, scores)
    for processor, wanted in (
        (TopKLogitsWarper, top_k),
        (TopPLogitsWarper, floats.get(TOP_P)),
        (MinPLogitsWarper, floats.get(MIN_P)),
    ):
        if wanted:
            scores = processor(wanted)(None, scores)
    return scores[0]


@pytest.mark.parametrize(
    ("floats", "top_k"),
    [
        ({TEMPERATURE: 0.7}, 0),
        ({TEMPERATURE: 1.3, TOP_P: 0.8}, 0),
        ({TEMPERATURE: 1.0, REPETITION: 1.5, MIN_P: 0.1}, 0),
        ({TEMPERATURE: 2.0, REPETITION: 1.2, TOP_P: 0.9, MIN_P: 0.03}, 6),
    ],
)
def test_twin_draws_from_hugging_faces_distribution(floats, top_k):
    """Chi-square over seeds, and over positions and sample indices of one seed."""
    vocab, draws = 11, 800
    logits = _logits(1, vocab, scale=1.5)[0]
    prompt = torch.tensor([1, 4, 4, 9])
    expected = torch.softmax(_hugging_face_scores(floats, top_k, logits, prompt).double(), 0)
    tables = Tables.build([(floats, {TOP_K: top_k, FLAGS: USES_TOKEN_STATE})] * draws, vocab)
    tables.token_state.zero_()
    tables.token_state[:, prompt] = IN_PROMPT
    fresh = tables.copy_to("cpu")
    fresh.seeds.fill_(12345)
    fresh.positions[:-1] = torch.arange(draws) // 2
    fresh.sampling_ints[:-1, SAMPLE_INDEX] = torch.arange(draws).int() % 2
    for sample_from in (tables, fresh):
        row_request = torch.arange(draws, dtype=torch.int32)
        sampled, _ = sample_from.apply(sample, logits.expand(draws, vocab), row_request)
        counts = torch.bincount(sampled, minlength=vocab).double()
        possible = expected > 0
        assert counts[~possible].sum() == 0
        mean = expected[possible] * draws
        chi_square = float(((counts[possible] - mean) ** 2 / mean).sum())
        # 4 standard deviations above the mean of the distribution, whose variance is twice it.
        freedom = int(possible.sum()) - 1
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4, (chi_square, freedom)


def test_penalties_and_bias_follow_their_formulas():
    vocab = 6
    logits = torch.tensor([2.0, -2.0, 2.0, 1.0, 0.5, 9.0])
    floats = [0.0] * NUM_COLUMNS
    floats[REPETITION], floats[PRESENCE], floats[FREQUENCY] = 2.0, 0.25, 0.5
    ints = [0] * NUM_COLUMNS
    ints[FLAGS], ints[FIRST_STOP_POSITION] = USES_TOKEN_STATE | USES_LOGIT_BIAS, 8
    state = torch.zeros(vocab, dtype=torch.int32)
    state[0] = IN_PROMPT
    state[1] = COUNT_UNIT
    state[2] = 3 * COUNT_UNIT + IN_PROMPT
    state[5] = IS_STOP
    bias = torch.zeros(vocab)
    bias[4] = 0.75
    adjusted = adjust_logits_torch(logits, floats, ints, state, bias, 7)
    assert adjusted.tolist() == [1.0, -4.75, -0.75, 1.0, 1.25, -math.inf]
    assert adjust_logits_torch(logits, floats, ints, state, bias, 8)[5] == 9.0
    ints[FLAGS] = 0
    assert torch.equal(adjust_logits_torch(logits, floats, ints, state, bias, 7), logits)


def test_twin_records_the_token_and_spares_the_dummy():
    vocab = 40
    tables = Tables.build([({TEMPERATURE: 0.0}, {FLAGS: USES_TOKEN_STATE}), ({}, {})], vocab)
    before = tables.copy_to("cpu")
    logits = _logits(3, vocab)
    sampled, normalizer = tables.apply(sample, logits, torch.tensor([2, 0, 2], dtype=torch.int32))
    token = int(sampled[1])
    assert sampled[[0, 2]].tolist() == [0, 0]
    assert_close(normalizer[1].sum(), torch.logsumexp(logits[1], 0))
    assert normalizer[1, 0] == logits[1].max()
    assert not normalizer[[0, 2]].any()
    before.last_token[0] = token
    before.positions[0] += 1
    before.token_state[0, token] += COUNT_UNIT
    for field in dataclasses.fields(Tables):
        actual, expected = getattr(tables, field.name), getattr(before, field.name)
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num()), field.name


def test_ties_and_rows_without_a_token():
    tables = Tables.build([({TEMPERATURE: 0.0}, {}), ({}, {}), ({TOP_P: 0.5}, {})], 515)
    for request in range(3):
        rows = _odd_rows(515)[:2]
        sampled, _ = tables.apply(sample, rows, torch.full((2,), request, dtype=torch.int32))
        assert sampled.tolist() == [0, 0]
    equal = torch.zeros(1, 515)
    sampled, _ = tables.apply(sample, equal, torch.zeros(1, dtype=torch.int32))
    assert sampled.tolist() == [0]
