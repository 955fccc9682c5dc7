"""Requests that wait or run, moved on step by step, and the outputs that nobody has fetched yet.

The host stays one step behind the device: a step launches what is known, then reads what the
step before it drew. Knows no prompts' text and takes no lock: one caller at a time.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from engine.adapter_registry import AdapterRegistry
from engine.errors import EngineError
from engine.model_runner import InFlight, ModelRunner
from engine.request import Request, Sequence, derived_seed
from engine.scheduler import Scheduler, StepPlan
from engine.tokenizer import IncrementalDetokenizer
from memory.readback import StepResults


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
        self._isolating = False  # whether sequences start one by one, after a step failed

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
                if error is None:
                    sequence.finish("abort")
                else:
                    sequence.finish_reason = "abort"  # its text may be what broke
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
        plan = None
        try:
            plan = self._scheduler.plan(self._collect, admit_at_most=1 if self._isolating else None)
            for sequence, refusal in plan.refused:
                self.end(sequence.request, refusal)
            owed = len(self._in_flight)
            self._in_flight += self._runner.launch(plan)
            self._isolating = self._isolating and bool(plan.admitted)
            self._collect(owed)
            if self._scheduler.idle:
                self._collect()  # rows of ended sequences: nobody waits for them
        except BaseException as error:
            self._recover(plan, error)
            if plan is None or not _is_a_requests_fault(error):
                raise

    def _collect(self, count: int | None = None) -> None:
        """Read the oldest `count` launches in flight, or all."""
        for _ in range(len(self._in_flight) if count is None else count):
            flight = self._in_flight[0]
            results = flight.readback.wait()
            del self._in_flight[0]
            now = time.perf_counter()
            for row, sequence in enumerate(flight.sequences):
                if not sequence.finished:  # else it ended while this step was already under way
                    self._take(sequence, results, row, now)

    def _take(self, sequence: Sequence, results: StepResults, row: int, now: float) -> None:
        """One drawn token. What its text breaks ends this request alone."""
        request = sequence.request
        count = request.params.logprobs
        top = results.top(row, count) if count else None
        try:
            sequence.append(results.token_ids[row], results.logprobs[row], top)
        except Exception as error:
            self.end(request, _broken(request, error))
            return
        self._scheduler.key_pages(sequence)
        request.metrics.first_token_time = request.metrics.first_token_time or now
        self._note(request)
        if sequence.finished:
            self._scheduler.release(sequence)
            self._forget_if_finished(request)

    def _recover(self, plan: StepPlan | None, error: BaseException) -> None:
        """A step broke off: what runs is computed again, from the tokens that are known.

        What was under way is drawn again, from the same seeds and positions. From then on
        sequences start one at a time, so that one with which a step fails again is found, and
        ends alone.
        """
        for flight in self._in_flight:
            with suppress(Exception):
                flight.readback.wait()  # its buffer is free again
        self._in_flight.clear()
        if plan is not None and self._isolating and _is_a_requests_fault(error):
            for sequence in plan.suspects:
                self.end(sequence.request, _broken(sequence.request, error))
        self._scheduler.restart()
        self._isolating = True

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


def _is_a_requests_fault(error: BaseException) -> bool:
    """Else it is the engine's own, such as a CaptureError, or an interrupt: the caller's to see."""
    return isinstance(error, Exception) and not isinstance(error, EngineError)


def _broken(request: Request, error: BaseException) -> EngineError:
    broken = EngineError(f"request {request.request_id} broke: {error!r}")
    broken.__cause__ = error
    return broken
