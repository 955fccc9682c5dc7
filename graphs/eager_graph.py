"""The backend `"off"`: replay calls the step. Records nothing and refuses nothing."""

from collections.abc import Callable, Mapping

from torch import Tensor

from graphs.errors import CaptureError


class EagerStepGraph:
    """The same bucket-padded step over the same static buffers, run eagerly."""

    bytes = 0

    def __init__(self) -> None:
        self._fn: Callable[[], None] | None = None

    def capture(self, fn: Callable[[], None], buffers: Mapping[str, Tensor] | None = None) -> None:
        assert self._fn is None, "a graph is captured once"
        self._fn = fn

    def replay(self) -> None:
        if self._fn is None:
            raise CaptureError("replay of a graph that holds no step")
        self._fn()

    def close(self) -> None:
        self._fn = None
