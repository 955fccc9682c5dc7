"""Which sequences run in the next step: admission, pages, prefill chunks, decode rows, preemption.

Decides from requests and steps alone, never from clocks or from what the device has finished,
so equal histories give equal batches. Knows no tensors.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.adapter_registry import Adapter, AdapterRegistry
from engine.errors import CapacityError, EngineError
from engine.request import Sequence
from memory.page_pool import DUMMY_PAGE, PagePool, page_key, root_key

RESERVE_TOKENS = 256  # pages are taken this far ahead, so that few steps touch block tables
MAX_OVERTAKEN = 8  # how often others may pass a sequence that waits for an adapter slot


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start:start+count` of a sequence; the last chunk of a prompt draws a token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def draws(self) -> bool:
        return self.start + self.count == self.sequence.prefill_tokens


@dataclass
class StepPlan:
    """What to launch. `page_writes` maps (slot, page index) to a page, for the block tables;
    `refused` sequences can never run."""

    admitted: list[Sequence] = field(default_factory=list)
    refused: list[tuple[Sequence, EngineError]] = field(default_factory=list)
    page_writes: dict[tuple[int, int], int] = field(default_factory=dict)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)

    @property
    def suspects(self) -> list[Sequence]:
        """Who is to blame first, should this step fail: the newest."""
        return self.admitted or [chunk.sequence for chunk in self.prefill] or self.decode


class Scheduler:
    """Continuous batching over request slots and KV pages, first come first served."""

    def __init__(
        self,
        pages: PagePool,
        adapters: AdapterRegistry,
        max_batch_size: int,
        prefill_chunk_tokens: int,
    ) -> None:
        self.pages = pages
        self.adapters = adapters
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._pages_wanted = False  # whether the head of the queue waits for pages

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check_fits(self, tokens: int, request_id: str) -> None:
        """Raise CapacityError where a request could not run even alone."""
        needed, total = self.pages.pages_for(tokens), self.pages.num_pages - 1
        if needed > total:
            raise CapacityError(
                f"request {request_id}: prompt and max_tokens need {needed} KV pages and the "
                f"cache has {total} of {self.pages.page_size} tokens: raise kv_cache_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self, drain: Callable[[], None], admit_at_most: int | None = None) -> StepPlan:
        """The next step. `drain` reads what the device still owes: called before a preemption,
        which must know every token, and only then. At most `admit_at_most` sequences start."""
        plan = StepPlan()
        self._reserve_for_decode(plan, drain)
        plan.decode = [s for s in self.running if s.prefilled and not s.all_launched]
        self._admit(plan, admit_at_most)
        self._chunk_prefill(plan)
        for sequence in plan.decode:
            sequence.launched += 1
        for chunk in plan.prefill:
            chunk.sequence.computed += chunk.count
            chunk.sequence.launched += chunk.draws
        return plan

    def release(self, sequence: Sequence) -> None:
        """A sequence ended, waiting or running: its slot and pages are free.

        A step in flight may still write to them; what is launched on them later comes after it.
        """
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._give_back(sequence)

    def restart(self) -> None:
        """Send back all that run, in their order: what was launched for them is lost."""
        for sequence in reversed(self.running.copy()):
            self._send_back(sequence)

    def key_pages(self, sequence: Sequence) -> None:
        """Name the pages that known tokens have filled, for reuse of equal prefixes."""
        size, keys = self.pages.page_size, sequence.page_keys
        written = sequence.num_tokens - 1  # the newest token has no KV yet
        full_pages = min(written // size, len(sequence.pages))
        if len(keys) == full_pages:
            return
        tokens = sequence.token_ids
        for full in range(len(keys), full_pages):
            parent = keys[-1] if keys else root_key(sequence.request.adapter_version)
            keys.append(page_key(parent, tokens[full * size : (full + 1) * size]))
            self.pages.set_key(sequence.pages[full], keys[-1])

    def _reserve_for_decode(self, plan: StepPlan, drain: Callable[[], None]) -> None:
        index, drained = 0, False
        while index < len(self.running):
            sequence = self.running[index]
            if not sequence.prefilled or sequence.all_launched or self._reserve(sequence, plan):
                index += 1
            elif not drained:
                drain()  # may end sequences, and so free pages and move rows
                index, drained = 0, True
            else:
                self._preempt(self.running[-1])
        if drained:  # some that were given pages above may have ended, or given way
            held = {sequence.slot for sequence in self.running}
            plan.page_writes = {at: p for at, p in plan.page_writes.items() if at[0] in held}

    def _reserve(self, sequence: Sequence, plan: StepPlan) -> bool:
        held, position = len(sequence.pages), sequence.next_position
        needed = self.pages.pages_for(position + 1) - held
        if needed <= 0:
            return True
        reserve = 1 if self._pages_wanted else RESERVE_TOKENS
        ahead = min(position + reserve, sequence.most_tokens_fed)
        wanted = self.pages.pages_for(ahead) - held
        pages = self.pages.allocate(wanted) or self.pages.allocate(needed)
        if pages is None:
            self._reclaim(plan)
            pages = self.pages.allocate(needed)
        if pages is None:
            return False
        self._give_pages(sequence, pages, plan)
        return True

    def _give_pages(self, sequence: Sequence, pages: list[int], plan: StepPlan) -> None:
        assert sequence.slot is not None
        for index, page in enumerate(pages, start=len(sequence.pages)):
            plan.page_writes[sequence.slot, index] = page
        sequence.pages += pages

    def _reclaim(self, plan: StepPlan) -> None:
        """Take back pages that were reserved ahead and that the next step does not write."""
        for sequence in reversed(self.running):
            assert sequence.slot is not None
            written = max(sequence.next_position + 1, sequence.prefill_tokens)
            keep = self.pages.pages_for(written)
            for index in range(keep, len(sequence.pages)):
                plan.page_writes[sequence.slot, index] = DUMMY_PAGE
            self.pages.free(sequence.pages[keep:])
            del sequence.pages[keep:]

    def _preempt(self, sequence: Sequence) -> None:
        self._send_back(sequence)
        sequence.request.metrics.preemptions += 1
        self.preemptions += 1

    def _send_back(self, sequence: Sequence) -> None:
        """To the head of the queue: its KV is computed again later, from the tokens known."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.launched = len(sequence.output_ids)
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        self.pages.free(sequence.pages)
        sequence.slot, sequence.pages, sequence.page_keys = None, [], []
        if sequence.request.adapter:
            self.adapters.release(sequence.request.adapter)

    def _admit(self, plan: StepPlan, at_most: int | None) -> None:
        self._pages_wanted = False
        blocked: list[Sequence] = []  # those that wait for an adapter slot, and may be passed
        absent: set[Adapter] = set()  # theirs: what found no room finds none later in this step
        held = False  # one of them was passed too often: only the base model passes now
        for sequence in list(self.waiting):
            if not self._free_slots or len(plan.admitted) == at_most:
                break
            adapter = sequence.request.adapter
            if adapter:
                if held:
                    continue
                try:
                    acquired = adapter not in absent and self.adapters.acquire(adapter)
                except Exception as error:  # whatever it is, it ends this adapter's request alone
                    broken = EngineError(f"adapter {adapter.name!r} cannot be placed: {error!r}")
                    plan.refused.append((sequence, broken))
                    continue
                if not acquired:
                    if adapter not in absent and not self.adapters.may_yet_fit(adapter):
                        message = f"adapter {adapter.name!r} finds no room beside the pinned ones"
                        plan.refused.append((sequence, CapacityError(message)))
                        continue
                    absent.add(adapter)
                    blocked.append(sequence)
                    held = sequence.overtaken >= MAX_OVERTAKEN
                    continue
            needed = self.pages.pages_for(sequence.num_tokens)
            self._pages_wanted = not self._have_room_for(needed, plan)
            if self._pages_wanted:
                if adapter:
                    self.adapters.release(adapter)  # it stays resident while nothing else needs it
                break
            if adapter:
                for other in blocked:
                    other.overtaken += 1
                held = any(other.overtaken >= MAX_OVERTAKEN for other in blocked)
            self._start(sequence, needed, plan)

    def _have_room_for(self, num_pages: int, plan: StepPlan) -> bool:
        """Whether `num_pages` are free and one more for each sequence that runs already."""
        if not self.running:
            return num_pages <= self.pages.free_pages
        needed = num_pages + len(self.running)
        if needed > self.pages.free_pages:
            self._reclaim(plan)
        return needed <= self.pages.free_pages

    def _start(self, sequence: Sequence, num_pages: int, plan: StepPlan) -> None:
        pages = self.pages.allocate(num_pages)
        assert pages is not None, "admission counted the free pages"
        self.waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.prefill_tokens = sequence.num_tokens
        sequence.computed = sequence.overtaken = 0
        self._give_pages(sequence, pages, plan)
        self.running.append(sequence)
        plan.admitted.append(sequence)

    def _chunk_prefill(self, plan: StepPlan) -> None:
        room = self.prefill_chunk_tokens
        for sequence in self.running:
            count = min(sequence.prefill_tokens - sequence.computed, room)
            if count:
                plan.prefill.append(PrefillChunk(sequence, sequence.computed, count))
                room -= count
