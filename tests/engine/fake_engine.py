"""The scheduler under a made-up device: what the engine does around it, without a model.

The device executes launches in order, as a stream does: block tables, positions and KV contents
are kept by page, so that a row that would read another's page, or an unwritten one, is seen. As
in the engine, results are read one step after their launch. Every plan is checked.
"""

from collections import Counter
from collections.abc import Mapping

import torch

from engine.adapter_registry import Adapter, AdapterRegistry
from engine.errors import EngineError
from engine.outputs import RequestMetrics
from engine.request import Request, Sequence
from engine.sampling_params import SamplingParams
from engine.scheduler import PrefillChunk, Scheduler, StepPlan
from memory.adapter_store import AdapterStore
from memory.lora_targets import Target
from memory.packed_adapter import pack_adapter
from memory.page_pool import DUMMY_PAGE, PagePool
from tests.memory.tiny_dims import TinyDims, random_adapter

STOP, WORD = 1, 2
DIMS = TinyDims(num_layers=1)


def make_registry(max_loras: int, names: Mapping[str, bool]) -> AdapterRegistry:
    """Adapters of rank 1 by name; the value says which are pinned."""
    weights = random_adapter(DIMS, 1, [Target.Q_PROJ], layers=[0])
    packed = pack_adapter(weights, torch.float32, pinned=False)
    arena = packed.bytes * max_loras
    store = AdapterStore(DIMS, max_loras, 1, arena, torch.float32, torch.device("cpu"))
    registry = AdapterRegistry(store, max_cpu_loras=64)
    for name, pinned in names.items():
        registry.register(name, packed, pinned)
    return registry


class FakeEngine:
    """`num_pages` are beside the dummy."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        max_batch_size: int = 4,
        prefill_chunk_tokens: int = 16,
        max_loras: int = 2,
        adapters: Mapping[str, bool] | None = None,
    ) -> None:
        self.pages = PagePool(num_pages + 1, page_size)
        self.registry = make_registry(max_loras, adapters or {})
        self.scheduler = Scheduler(self.pages, self.registry, max_batch_size, prefill_chunk_tokens)
        self.max_batch_size = max_batch_size
        self.requests: list[Request] = []
        self.errors: dict[str, EngineError] = {}
        self.history: list[tuple] = []
        self.admissions: list[str] = []
        self._stops: dict[str, int] = {}
        self._block_tables: list[dict[int, int]] = [{} for _ in range(max_batch_size)]
        self._positions = [0] * max_batch_size
        self._kv: dict[tuple[int, int], tuple] = {}
        self._in_flight: list[list[Sequence]] = []

    def add(
        self,
        prompt_tokens: int,
        max_tokens: int,
        adapter: str | None = None,
        n: int = 1,
        stop_after: int | None = None,
    ) -> Request:
        """Queue a request; its sequences draw a stop token after `stop_after` tokens."""
        request = Request(
            request_id=str(len(self.requests)),
            prompt=None,
            prompt_ids=[WORD] * prompt_tokens,
            params=SamplingParams(max_tokens=max_tokens, n=n),
            adapter=self.registry.find(adapter) if adapter else None,
            seed=0,
            stop_ids=frozenset([STOP]),
            metrics=RequestMetrics(arrival_time=0.0),
        )
        self.scheduler.check_fits(prompt_tokens + max_tokens - 1, request.request_id)
        if request.adapter:
            self.registry.add_request(request.adapter)
        self._stops[request.request_id] = stop_after or max_tokens + 1
        self.requests.append(request)
        for index in range(n):
            request.sequences.append(Sequence(request, index, None))
            self.scheduler.add(request.sequences[-1])
        return request

    def step(self) -> StepPlan:
        """Plan, launch, read the step before."""
        plan = self.scheduler.plan(lambda: self._collect(len(self._in_flight)))
        for sequence, error in plan.refused:
            self.errors[sequence.request.request_id] = error
            self.end(sequence.request)
        self._check_plan(plan)
        owed = len(self._in_flight)
        self._launch(plan)
        self._collect(owed)
        if self.scheduler.idle:
            self._collect(len(self._in_flight))
        return plan

    def run(self, most_steps: int = 5000) -> int:
        """Step to the end; how many steps that took. Everything must then be free again."""
        steps = 0
        while not self.scheduler.idle or self._in_flight:
            self.step()
            steps += 1
            assert steps <= most_steps, "requests starve"
        assert all(request.finished for request in self.requests)
        assert self.pages.used_pages == 0
        assert len(self.scheduler._free_slots) == self.max_batch_size
        assert all(adapter.running == 0 for adapter in self._adapters())
        return steps

    def end(self, request: Request) -> None:
        """Abort what is unfinished of `request`."""
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish("abort")
                self.scheduler.release(sequence)
                self._forget(request)

    def _adapters(self) -> list[Adapter]:
        return list(self.registry._adapters)

    def _forget(self, request: Request) -> None:
        if request.finished and request.adapter:
            self.registry.remove_request(request.adapter)

    def _collect(self, count: int) -> None:
        flights, self._in_flight = self._in_flight[:count], self._in_flight[count:]
        for sequence in (sequence for flight in flights for sequence in flight):
            if sequence.finished:
                continue
            stop = len(sequence.output_ids) + 1 == self._stops[sequence.request.request_id]
            sequence.append(STOP if stop else WORD, 0.0, None)
            self.scheduler.key_pages(sequence)
            if sequence.finished:
                self.scheduler.release(sequence)
                self._forget(sequence.request)

    def _launch(self, plan: StepPlan) -> None:
        for sequence in plan.admitted:
            self._positions[sequence.slot] = sequence.prefill_tokens - 1
        for (slot, index), page in plan.page_writes.items():
            self._block_tables[slot][index] = page
        for chunk in plan.prefill:
            for position in range(chunk.start, chunk.start + chunk.count):
                self._write(chunk.sequence, position)
            self._attend(chunk.sequence, chunk.start + chunk.count)
        for sequence in plan.decode:
            position = self._positions[sequence.slot]
            assert position == sequence.next_position - 1, "the device is elsewhere"
            self._write(sequence, position)
            self._attend(sequence, position + 1)
        drawn = [chunk.sequence for chunk in plan.prefill if chunk.draws]
        for sequence in drawn + plan.decode:
            self._positions[sequence.slot] += 1
        self._in_flight += [flight for flight in (drawn, plan.decode) if flight]

    def _place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.pages.page_size)
        page = self._block_tables[sequence.slot][index]
        assert page == sequence.pages[index] != DUMMY_PAGE, "the page is not the sequence's own"
        return page, offset

    def _write(self, sequence: Sequence, position: int) -> None:
        self._kv[self._place(sequence, position)] = (sequence, position)

    def _attend(self, sequence: Sequence, length: int) -> None:
        for position in range(length):
            assert self._kv[self._place(sequence, position)] == (sequence, position)

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        running = scheduler.running
        assert len(running) <= self.max_batch_size
        slots = [sequence.slot for sequence in running] + scheduler._free_slots
        assert sorted(slots) == list(range(self.max_batch_size))
        held = [page for sequence in running for page in sequence.pages]
        assert sorted(held + self.pages._free) == list(range(1, self.pages.num_pages))
        assert set(map(id, plan.decode)) <= set(map(id, running))
        assert len(set(map(id, plan.decode))) == len(plan.decode)
        assert all(count <= 1 for count in Counter(c.sequence for c in plan.prefill).values())
        assert all(chunk.count > 0 for chunk in plan.prefill)
        assert sum(chunk.count for chunk in plan.prefill) <= scheduler.prefill_chunk_tokens
        by_slot = {sequence.slot: sequence for sequence in running}
        for (slot, index), page in plan.page_writes.items():
            pages = by_slot[slot].pages
            assert page == (pages[index] if index < len(pages) else DUMMY_PAGE)
        for sequence in running:
            keyed = zip(sequence.pages, sequence.page_keys, strict=False)
            assert all(self.pages.key(page) == key for page, key in keyed)
            assert len(sequence.page_keys) <= len(sequence.pages)
            assert sequence.launched <= sequence.request.params.max_tokens
            assert sequence.launched <= len(sequence.output_ids) + 2
        uses = Counter(s.request.adapter for s in running if s.request.adapter)
        for adapter in self._adapters():
            assert adapter.running == uses[adapter]
            assert adapter.slot is not None or not uses[adapter]
        assert all(s.slot is None and not s.pages for s in scheduler.waiting)
        self.admissions += [sequence.request.request_id for sequence in plan.admitted]
        self.history.append(_summary(plan))


def _summary(plan: StepPlan) -> tuple:
    """A plan by names and numbers, to compare two histories."""

    def name(sequence: Sequence) -> tuple[str, int, int | None]:
        return sequence.request.request_id, sequence.index, sequence.slot

    def chunk(chunk: PrefillChunk) -> tuple:
        return (*name(chunk.sequence), chunk.start, chunk.count)

    return (
        [name(sequence) for sequence in plan.admitted],
        [chunk(c) for c in plan.prefill],
        [name(sequence) for sequence in plan.decode],
        list(plan.page_writes.items()),
        [sequence.request.request_id for sequence, _ in plan.refused],
    )
