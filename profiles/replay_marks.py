"""Time between the replays of engine steps by the GPU's own clock: no profiler slows the host."""

from collections.abc import Callable
from itertools import pairwise
from statistics import mean, median

import torch

from engine import Engine
from profiles.swapped_methods import SwappedMethods


class ReplayMarks(SwappedMethods):
    """Records an event before and after each replay of an engine's graphs until its `with` ends.

    What lies between two replays is what the GPU waits for the host, the copies that a step makes
    and the two events themselves: an upper bound of its idle time.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for captured in engine.runner.graphs._captured.values():
            self.swap(captured.graph, "replay", self._marked)

    def _marked(self, replay: Callable[[], None]) -> Callable[[], None]:
        def marked() -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            replay()
            after.record()
            self._marks.append((before, after))

        return marked

    def between_replays(self) -> dict[str, float]:
        """Of what ran inside `with`, once it is complete: µs a step and between two replays."""
        marks = self._marks
        if len(marks) < 2:
            raise SystemExit(f"marks of {len(marks)} replays, not of several")
        between = [end.elapsed_time(start) * 1e3 for (_, end), (start, _) in pairwise(marks)]
        step_us = marks[0][0].elapsed_time(marks[-1][0]) * 1e3 / len(between)
        return {
            "replays": len(marks),
            "step_us": round(step_us, 2),
            "between_us": round(mean(between), 2),
            "between_share": round(mean(between) / step_us, 5),
            "median_between_us": round(median(between), 2),
            "longest_between_us": round(max(between), 2),
        }
