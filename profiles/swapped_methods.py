"""Methods of objects or classes, replaced from outside until a `with` block ends."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class SwappedMethods:
    """At the end of its `with` block every owner is as it was, the last swapped first."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def swap(
        self, owner: Any, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """`owner.method`, of one object or of all objects of a class, becomes what `make` makes
        of it."""
        original = getattr(owner, method)
        own = method in vars(owner)
        setattr(owner, method, make(original))
        self._restore.append(
            (lambda: setattr(owner, method, original)) if own else (lambda: delattr(owner, method))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._restore:
            self._restore.pop()()
