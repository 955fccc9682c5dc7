"""What the adapter masks and the batch are while graphs are captured."""

from collections.abc import Iterator
from contextlib import contextmanager

from memory.adapter_store import AdapterStore
from memory.request_tables import RequestTables
from memory.step_buffers import StepBuffers


class CaptureState:
    """Stages dummy batches, with a synthetic adapter on every row or with every mask zeroed."""

    def __init__(self, tables: RequestTables, adapters: AdapterStore) -> None:
        self._tables = tables
        self._adapters = adapters
        self._enabled = 0

    def stage(self, buffers: StepBuffers) -> None:
        """A batch of nothing but padding rows."""
        buffers.row_request.fill_(self._tables.dummy)
        buffers.adapter_enabled.fill_(self._enabled)

    @contextmanager
    def synthetic(self) -> Iterator[None]:
        """Padding rows run an adapter of the largest rank, so that kernels warm up with work."""
        has_slots = self._adapters.tables.max_loras > 0
        dummy_slot = self._tables.adapter_slots[self._tables.dummy :]
        with self._adapters.synthetic():
            self._enabled = int(has_slots)
            dummy_slot.fill_(0 if has_slots else -1)
            try:
                yield
            finally:
                self._enabled = 0
                dummy_slot.fill_(-1)

    @contextmanager
    def zeroed(self) -> Iterator[None]:
        """No adapter is enabled and every rank is zero: what a graph is recorded with."""
        with self._adapters.zeroed():
            self._enabled = 0
            yield
