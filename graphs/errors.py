"""Errors of capture and replay. `engine.errors` re-exports them with the rest."""

from memory.errors import EngineError


class CaptureError(EngineError, RuntimeError):
    """An operation that a graph cannot hold, or a replay whose buffers are not those captured."""
