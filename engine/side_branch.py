"""A second stream for work that a step can do beside the main one, in a graph as in eager runs.

A kernel that is too small to fill a GPU costs its whole time when it stands in line, and next to
nothing beside a large one. What runs on the branch may write only to memory that the main stream
does not touch before it joins.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideBranch:
    """`with side.forked():` launches beside what the current stream does next; `join()` makes the
    current stream wait for it. On the CPU both do nothing: everything runs in order.

    Captured, the two become edges of the graph. A fork sees all that was launched before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def forked(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
