"""Host time by part, measured from outside: the engine holds no clock and pays for none.

`watch` puts a timed call in the place of a method until the clock is closed. A part's time leaves
out the parts that ran within it, so parts add up to no more than the whole.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from profiles.swapped_methods import SwappedMethods


class HostClock(SwappedMethods):
    """Sums of seconds and counts of calls by part."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._inner: list[float] = []  # of each open part, the time of those within it

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Time `owner.method`, of one object or of all objects of a class, as `part`."""

        def timed_of(original: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                self._inner.append(0.0)
                try:
                    return original(*args, **kwargs)
                finally:
                    took = time.perf_counter() - start
                    self.seconds[part] += took - self._inner.pop()
                    self.calls[part] += 1
                    if self._inner:
                        self._inner[-1] += took

            return timed

        self.swap(owner, method, timed_of)

    def observe(self, owner: Any, method: str, see: Callable[..., None]) -> None:
        """Call `see` with the arguments of `owner.method` before each call of it."""

        def seen_of(original: Callable[..., Any]) -> Callable[..., Any]:
            def seen(*args: Any, **kwargs: Any) -> Any:
                see(*args, **kwargs)
                return original(*args, **kwargs)

            return seen

        self.swap(owner, method, seen_of)

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()
