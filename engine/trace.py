"""nvtx ranges around the engine's phases: off by default, and then no more than a lookup."""

from contextlib import AbstractContextManager, nullcontext

_NOTHING: AbstractContextManager[None] = nullcontext()


class Trace:
    """`range("replay")` is a context manager; nvtx is imported only where it is on."""

    def __init__(self, enabled: bool) -> None:
        self._annotate = None
        if enabled:
            import nvtx

            self._annotate = nvtx.annotate

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named span of host time, shown by nsys above what it launched."""
        if self._annotate is None:
            return _NOTHING
        return self._annotate(name, domain="encore")
