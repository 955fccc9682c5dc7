"""The protocol that every backend of capture and replay keeps."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor


class StepGraph(Protocol):
    """One recorded step over buffers of fixed address; holds nothing until `capture` returns."""

    @property
    def bytes(self) -> int:
        """Memory that the capture took, beside the buffers it was given."""
        ...

    def capture(self, fn: Callable[[], None], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Record `fn`, once. CaptureError names an operation that a graph cannot hold, or the one
        of `buffers` that was written unseen, by another thread say.

        The tape runs `fn` while it records, a CUDA graph only records it: callers stage a dummy
        batch whose effects do not matter. After a failure the graph holds nothing.
        """
        ...

    def replay(self) -> None:
        """Run what was recorded on what the buffers hold now, without the Python of `fn`."""
        ...

    def close(self) -> None:
        """Release the recording. A later replay is a CaptureError."""
        ...
