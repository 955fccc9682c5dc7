"""Writes a request's state into the device tables when it gets a slot, and pages as they come.

Launched between replays, in stream order: no step that is under way sees half of it.
"""

import struct
from collections.abc import Mapping
from collections.abc import Sequence as Items

import torch

from engine.request import Sequence
from kernels import sampling_tables as columns
from memory.request_tables import RequestTables
from memory.staging import StagingRing

# A seed (two: first, and the record even, so that they line up as int64), slot, position, adapter
# slot, one unused, then the integer and the float columns.
_RECORD = 6 + 2 * columns.NUM_COLUMNS


class RequestAdmission:
    """`max_pages` bounds how many block-table entries a request has."""

    def __init__(self, tables: RequestTables, device: torch.device) -> None:
        self._tables = tables
        slots, max_pages = tables.block_tables.shape
        capacity = max(slots * _RECORD, 2 * slots * max_pages, 2 * tables.token_state.shape[1])
        self._upload = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._staging = StagingRing(capacity, device)

    @property
    def copies(self) -> int:
        return self._staging.copies

    def admit(self, sequences: Items[Sequence]) -> None:
        """Fill the slots of sequences that are about to run their prefill."""
        if not sequences:
            return
        tables = self._tables
        records = [value for sequence in sequences for value in _record(sequence)]
        self._staging.upload(records, self._upload)
        rows = self._upload[: len(records)].view(len(sequences), _RECORD)
        slots = rows[:, 2].long()
        tables.seeds.index_copy_(0, slots, rows[:, :2].view(torch.int64)[:, 0])
        tables.positions.index_copy_(0, slots, rows[:, 3])
        tables.adapter_slots.index_copy_(0, slots, rows[:, 4])
        ints, floats = rows[:, 6:].split(columns.NUM_COLUMNS, dim=1)
        tables.sampling_ints.index_copy_(0, slots, ints)
        tables.sampling_floats.index_copy_(0, slots, floats.view(torch.float32))
        for sequence in sequences:
            self._fill_vocabulary_rows(sequence)

    def write_pages(self, page_writes: Mapping[tuple[int, int], int]) -> None:
        """Set block-table entries: `(slot, page index) → page`."""
        if not page_writes:
            return
        block_tables = self._tables.block_tables
        width = block_tables.shape[1]
        places = [slot * width + index for slot, index in page_writes]
        count = len(places)
        self._staging.upload([*places, *page_writes.values()], self._upload)
        at, pages = self._upload[: 2 * count].split(count)
        block_tables.view(-1).index_copy_(0, at.long(), pages)

    def _fill_vocabulary_rows(self, sequence: Sequence) -> None:
        """The tables over the vocabulary, only for requests whose flags say they are read."""
        request, tables = sequence.request, self._tables
        assert sequence.slot is not None
        if request.params.needs_token_state:
            row = tables.token_state[sequence.slot]
            row.zero_()
            self._scatter(_token_state(sequence), row)
        if request.params.logit_bias:
            row = tables.logit_bias[sequence.slot]
            row.zero_()
            biases = {t: _float_bits(float(b)) for t, b in request.params.logit_bias.items()}
            self._scatter(biases, row.view(torch.int32))

    def _scatter(self, values: Mapping[int, int], row: torch.Tensor) -> None:
        self._staging.upload([*values.keys(), *values.values()], self._upload)
        at, what = self._upload[: 2 * len(values)].split(len(values))
        row.index_copy_(0, at.long(), what)


def _record(sequence: Sequence) -> list[int]:
    request, params = sequence.request, sequence.request.params
    flags = columns.USES_TOKEN_STATE if params.needs_token_state else 0
    flags |= columns.USES_LOGIT_BIAS if params.logit_bias else 0
    ints = [0] * columns.NUM_COLUMNS
    ints[columns.TOP_K] = max(params.top_k, 0)
    ints[columns.SAMPLE_INDEX] = sequence.index
    ints[columns.FIRST_STOP_POSITION] = request.first_stop_position
    ints[columns.FLAGS] = flags
    ints[columns.NUM_LOGPROBS] = -1 if params.logprobs is None else params.logprobs
    floats = [0.0] * columns.NUM_COLUMNS
    floats[columns.TEMPERATURE] = params.temperature
    floats[columns.TOP_P] = params.top_p
    floats[columns.MIN_P] = params.min_p
    floats[columns.REPETITION] = params.repetition_penalty
    floats[columns.PRESENCE] = params.presence_penalty
    floats[columns.FREQUENCY] = params.frequency_penalty
    adapter = request.adapter
    slot = adapter.slot if adapter is not None and adapter.slot is not None else -1
    assert sequence.slot is not None
    seed = struct.unpack("<ii", struct.pack("<q", request.seed))
    last_position = sequence.prefill_tokens - 1
    state = [*seed, sequence.slot, last_position, slot, 0]
    return [*state, *ints, *map(_float_bits, floats)]


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _token_state(sequence: Sequence) -> dict[int, int]:
    request = sequence.request
    state = dict.fromkeys(request.prompt_ids, columns.IN_PROMPT)
    for token in request.stop_ids:
        state[token] = state.get(token, 0) | columns.IS_STOP
    for token in sequence.output_ids:
        state[token] = state.get(token, 0) + (1 << columns.COUNT_SHIFT)
    return state
