"""The batch sizes that are captured, and which of them serves a given number of rows."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from memory.errors import EngineError


@dataclass(frozen=True)
class Ladder:
    """Ascending batch sizes, no two equal."""

    sizes: tuple[int, ...]

    @classmethod
    def up_to(cls, max_batch_size: int) -> "Ladder":
        """1, 2, 4, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the largest always.

        Small batches are common and pad badly; large ones lose little by a coarse step.
        """
        steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch_size, 32)]
        return cls((*(size for size in steps if size < max_batch_size), max_batch_size))

    @classmethod
    def of(cls, sizes: Iterable[int], max_batch_size: int) -> "Ladder":
        """The user's own sizes, in any order. A largest below `max_batch_size` is allowed."""
        chosen = list(sizes)
        accepted = f"accepted: one or more whole numbers from 1 to max_batch_size={max_batch_size}"
        if not chosen:
            raise EngineError(f"graph_batch_sizes is empty; {accepted}")
        for size in chosen:
            if type(size) is not int or not 1 <= size <= max_batch_size:
                raise EngineError(f"graph_batch_sizes holds {size!r}; {accepted}")
        return cls(tuple(sorted(set(chosen))))

    def bucket_for(self, rows: int) -> int | None:
        """The smallest captured size that holds `rows`; None above the largest."""
        position = bisect_left(self.sizes, rows)
        return self.sizes[position] if position < len(self.sizes) else None
