"""Runs a batch: chooses its graph, stages the inputs, checks the guards, replays, counts."""

from collections.abc import Callable, Mapping
from typing import Generic

import torch

from graphs.graph_capturer import CapturedStep
from graphs.graph_key import GraphKey
from graphs.graph_stats import GraphStats
from graphs.ladder import Ladder
from graphs.static_buffers import B


class GraphRunner(Generic[B]):
    """Owns the captured steps from here on.

    `step` and `buffers` are those of the capture: a batch above the largest captured size runs
    eagerly through them. With `debug` every replay compares every tensor to the capture; without,
    only the generation of the buffers.
    """

    def __init__(
        self,
        captured: Mapping[GraphKey, CapturedStep[B]],
        step: Callable[[B, GraphKey], None],
        buffers: Callable[[int], B],
        stats: GraphStats,
        *,
        debug: bool = False,
    ) -> None:
        self.stats = stats
        self._captured = dict(captured)
        self._ladder = Ladder(tuple(sorted({key.batch_size for key in captured})))
        self._step = step
        self._buffers = buffers
        self._debug = debug

    @torch.inference_mode()
    def run(self, rows: int, stage: Callable[[B], None], lora: bool = True) -> B:
        """One step for `rows` rows; returns the buffers that hold its outputs.

        `stage` copies the batch into the buffers, padding rows included. `lora`: whether any of
        the rows has an adapter, and so which of two graphs runs where both are captured. The
        outputs stay until the next step: another batch size may share their memory.
        """
        assert rows > 0, "a step has at least one row"
        bucket = self._ladder.bucket_for(rows)
        if bucket is None:
            return self._run_eagerly(GraphKey(rows, lora), stage)
        captured = self._captured[GraphKey(bucket, lora)]
        captured.guard.check_generation()
        stage(captured.buffers)
        if self._debug:
            captured.guard.check()
        captured.graph.replay()
        self.stats.replays[captured.key] = self.stats.replays.get(captured.key, 0) + 1
        self.stats.padded_rows += bucket - rows
        return captured.buffers

    def buffers_for(self, rows: int) -> B:
        """The static buffers that a step of `rows` rows runs on."""
        return self._buffers(self._ladder.bucket_for(rows) or rows)

    def close(self) -> None:
        for captured in self._captured.values():
            captured.graph.close()

    def _run_eagerly(self, key: GraphKey, stage: Callable[[B], None]) -> B:
        buffers = self._buffers(key.batch_size)
        stage(buffers)
        self._step(buffers, key)
        self.stats.eager_fallbacks += 1
        return buffers
