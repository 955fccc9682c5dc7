"""Requests that wait or run, moved on step by step, and the outputs that nobody has fetched yet.

The host stays one step behind the device: a step launches what is known, then reads what the
step before it drew. Knows no prompts' text and takes no lock: one caller at a time.
"""

import time
from collections.abc import Callable

from engine.adapter_registry import AdapterRegistry
from engine.errors import EngineError
from engine.model_runner import InFlight, ModelRunner
from engine.request import Request, Sequence, derived_seed
from engine.scheduler import Scheduler
from engine.tokenizer import IncrementalDetokenizer


class StepLoop:
    """Ties the scheduler's plans to the runner's launches. `seed` is for requests without one."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, adapters: AdapterRegistry, seed: int
    ) -> None:
        self.requests: dict[str, Request] = {}  # the unfinished ones
        self._scheduler, self._runner, self._adapters = scheduler, runner, adapters
        self._seed = seed
        self._in_flight: list[InFlight] = []
        self._advanced: dict[Request, None] = {}  # of add_request, not yet taken; in order
        self._abandoned: list[Request] = []
        self._stepping = False
        self._ordinal = 0

    @property
    def busy(self) -> bool:
        return bool(self.requests or self._in_flight or self._advanced)

    def admit(
        self, request: Request, detokenizer: Callable[[], IncrementalDetokenizer] | None
    ) -> None:
        """Queue a request that was checked."""
        if self._scheduler.idle:
            self._ordinal = 0  # a used engine draws like a fresh one
        if request.params.seed is None:
            request.seed = derived_seed(self._seed, self._ordinal)
        self._ordinal += 1
        if request.adapter is not None:
            self._adapters.add_request(request.adapter)
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            text = detokenizer() if detokenizer is not None else None
            request.sequences.append(Sequence(request, index, text))
            self._scheduler.add(request.sequences[-1])

    def step(self) -> None:
        """Plan, launch, then read the results of the launches before."""
        self._stepping = True
        try:
            self._step()
        finally:
            self._stepping = False
            self._end_abandoned()

    def take_advanced(self) -> list[Request]:
        """The requests of `add_request` that advanced since the last call."""
        advanced, self._advanced = list(self._advanced), {}
        return advanced

    def end(self, request: Request, error: EngineError | None = None) -> None:
        """End whatever of `request` is unfinished: aborted, or broken by `error`."""
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish("abort")
                self._scheduler.release(sequence)
        self._forget_if_finished(request)
        self._note(request)

    def abandon(self, request: Request) -> None:
        """Abort a request whose outputs nobody waits for.

        The garbage collector may call this in the middle of a step: then it ends after that.
        """
        self._abandoned.append(request)
        if not self._stepping:
            self._end_abandoned()

    def _step(self) -> None:
        plan = self._scheduler.plan(self._collect)
        for sequence, refusal in plan.refused:
            self.end(sequence.request, refusal)
        owed = len(self._in_flight)
        try:
            self._in_flight += self._runner.launch(plan)
        except BaseException:
            self._requeue()
            raise
        self._collect(owed)
        if self._scheduler.idle:
            self._collect()  # rows of ended sequences: nobody waits for them

    def _collect(self, count: int | None = None) -> None:
        """Read the oldest `count` launches in flight, or all."""
        count = len(self._in_flight) if count is None else count
        flights, self._in_flight = self._in_flight[:count], self._in_flight[count:]
        for flight in flights:
            results = flight.readback.wait()
            now = time.perf_counter()
            for row, sequence in enumerate(flight.sequences):
                if sequence.finished:
                    continue  # ended while this step was already under way
                request = sequence.request
                top = None
                if request.params.logprobs:
                    top = results.top(row, request.params.logprobs)
                sequence.append(results.token_ids[row], results.logprobs[row], top)
                self._scheduler.key_pages(sequence)
                request.metrics.first_token_time = request.metrics.first_token_time or now
                self._note(request)
                if sequence.finished:
                    self._scheduler.release(sequence)
                    self._forget_if_finished(request)

    def _requeue(self) -> None:
        """A launch failed: what runs is computed again, from the tokens that are known."""
        self._collect()
        for sequence in reversed(self._scheduler.running.copy()):
            self._scheduler.release(sequence)
            sequence.launched = len(sequence.output_ids)
            self._scheduler.waiting.appendleft(sequence)

    def _end_abandoned(self) -> None:
        while self._abandoned:
            request = self._abandoned.pop()
            if not request.finished:
                self.end(request)

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished and self.requests.pop(request.request_id, None) is not None:
            request.metrics.finished_time = time.perf_counter()
            if request.adapter is not None:
                self._adapters.remove_request(request.adapter)

    def _note(self, request: Request) -> None:
        if request.for_step:
            self._advanced[request] = None
