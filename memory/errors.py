"""Errors of the memory layer. `engine.errors` re-exports them with the rest."""


class EngineError(Exception):
    """Base of every error that the engine raises at the user's boundary."""


class CapacityError(EngineError, RuntimeError):
    """Memory or slots that cannot be had."""
