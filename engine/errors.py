"""The errors that users see. Each names the thing at fault, what was found, what is accepted."""

from graphs.errors import CaptureError
from memory.errors import CapacityError, EngineError

__all__ = [
    "AdapterError",
    "CapacityError",
    "CaptureError",
    "CheckpointError",
    "EngineError",
    "RequestError",
    "UnknownAdapterError",
]


class RequestError(EngineError, ValueError):
    """A bad prompt, bad parameters, a prompt that is too long, a token id out of range."""


class UnknownAdapterError(EngineError, KeyError):
    """An adapter name that is not loaded."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would print its repr


class AdapterError(EngineError, ValueError):
    """An adapter that cannot be served exactly: it is refused, never served approximately."""


class CheckpointError(EngineError, ValueError):
    """An unsupported or broken checkpoint."""
