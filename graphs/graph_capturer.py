"""Captures a step of every key, once, before serving. Knows no model: only its callables.

Order, and why:
  largest batch first    smaller graphs then fit into the memory the largest took from the pool
  one pool, one stream   the graphs share that memory, since two never replay at once
  warm-up first          kernels compile, tune and allocate outside of capture, with a synthetic
                         adapter enabled so that LoRA kernels have work to tune on
  masks zeroed           the LoRA path is recorded but does nothing until masks say so
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal

import torch

from graphs.capture_masks import CaptureMasks
from graphs.cuda_graph import CudaStepGraph
from graphs.eager_graph import EagerStepGraph
from graphs.graph_key import GraphKey
from graphs.graph_stats import GraphStats
from graphs.replay_guard import BufferGeneration, ReplayGuard
from graphs.static_buffers import B
from graphs.step_graph import StepGraph
from graphs.tape_graph import TapeStepGraph

Backend = Literal["cuda", "tape", "off"]


@dataclass(frozen=True)
class CapturedStep(Generic[B]):
    """A graph with the buffers it reads and writes."""

    key: GraphKey
    buffers: B
    graph: StepGraph
    guard: ReplayGuard
    seconds: float  # warm-up included


def _no_tensors() -> Mapping[str, torch.Tensor]:
    return {}


class GraphCapturer(Generic[B]):
    """`capture` is called once; `stats` then goes on to the runner.

    step            the decode step over the buffers of one batch size; the key says whether it
                    records the LoRA path
    buffers         the static buffers of a batch size, allocated by their owner
    masks           see CaptureMasks
    prepare         stages a dummy batch; called before every run of the step
    shared_tensors  by name, what every batch size uses (tables, caches), for the guards
    generation      bumped by whoever reallocates buffers
    poison          tape only: scratch to overwrite before each replay; None poisons nothing
    warmups         runs of the step before each capture
    progress        called after each capture
    """

    def __init__(
        self,
        backend: Backend,
        step: Callable[[B, GraphKey], None],
        buffers: Callable[[int], B],
        masks: CaptureMasks,
        *,
        prepare: Callable[[B], None] | None = None,
        shared_tensors: Callable[[], Mapping[str, torch.Tensor]] = _no_tensors,
        generation: BufferGeneration | None = None,
        poison: Callable[[B], Sequence[torch.Tensor]] | None = None,
        warmups: int = 2,
        progress: Callable[[CapturedStep[B]], None] | None = None,
    ) -> None:
        self.stats = GraphStats()
        self._backend = backend
        self._step = step
        self._buffers = buffers
        self._masks = masks
        self._prepare = prepare
        self._shared_tensors = shared_tensors
        self._generation = generation or BufferGeneration()
        self._poison = poison
        self._warmups = warmups
        self._progress = progress
        if backend == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, keys: Iterable[GraphKey]) -> dict[GraphKey, CapturedStep[B]]:
        """One captured step per key. If one fails, those before it are closed again."""
        captured: dict[GraphKey, CapturedStep[B]] = {}
        try:
            with self._side_stream():
                for key in sorted(set(keys), reverse=True):
                    step = self._capture_one(key)
                    captured[step.key] = step
                    if self._progress is not None:
                        self._progress(step)
        except BaseException:
            for step in captured.values():
                step.graph.close()
            self.stats = GraphStats()
            raise
        return captured

    def _capture_one(self, key: GraphKey) -> CapturedStep[B]:
        start = time.perf_counter()
        buffers = self._buffers(key.batch_size)
        with self._masks.synthetic():
            for _ in range(self._warmups):
                self._stage(buffers)
                self._step(buffers, key)
        guard = ReplayGuard(lambda: self._named_tensors(buffers), self._generation)
        graph = self._new_graph(buffers)
        with self._masks.zeroed():
            self._stage(buffers)
            graph.capture(lambda: self._step(buffers, key), self._named_tensors(buffers))
        try:
            guard.check()  # a step that rebinds its own buffers shows here
            guard.check_generation()
        except BaseException:
            graph.close()
            raise
        seconds = time.perf_counter() - start
        self.stats.captured.append(key)
        self.stats.capture_seconds += seconds
        self.stats.capture_bytes += graph.bytes
        return CapturedStep(key, buffers, graph, guard, seconds)

    def _stage(self, buffers: B) -> None:
        if self._prepare is not None:
            self._prepare(buffers)

    def _named_tensors(self, buffers: B) -> dict[str, torch.Tensor]:
        own, shared = buffers.tensors(), self._shared_tensors()
        assert own.keys().isdisjoint(shared), f"named twice: {sorted(own.keys() & shared.keys())}"
        return {**own, **shared}

    def _new_graph(self, buffers: B) -> StepGraph:
        if self._backend == "cuda":
            return CudaStepGraph(self._pool, self._stream)
        if self._backend == "tape":
            return TapeStepGraph(None if self._poison is None else self._poison(buffers))
        return EagerStepGraph()

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Warm-up and capture run on the capture stream, in order with the caller's."""
        if self._backend != "cuda":
            yield
            return
        gc.collect()  # what is dead must not hold memory that the graphs could have
        torch.cuda.empty_cache()
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)
