"""First-fit allocation of byte extents in one block of memory whose address never changes.

Knows offsets only, not what lies at them.
"""

from collections.abc import Mapping

ALIGNMENT_BYTES = 128


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment of every extent and of every block in it."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class ExtentAllocator:
    """Hands out extents of `capacity_bytes`. What is free is what lies between those taken.

    `taken` maps offsets to sizes. An extent never moves, so one that stays can part the free
    bytes for good: give such extents out from the end. They then part nothing as long as they
    come while the end is free and none of them leaves; otherwise holes remain between them,
    which only extents that are small enough can use.
    """

    def __init__(self, capacity_bytes: int, taken: Mapping[int, int] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken = dict(taken or {})

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def allocate(self, size_bytes: int, from_end: bool = False) -> int | None:
        """The offset of a new extent at the start of the lowest hole that is large enough, or at
        the end of the highest; None where there is none."""
        size = aligned(max(size_bytes, 1))
        holes = [(start, end) for start, end in self._holes() if end - start >= size]
        if not holes:
            return None
        offset = holes[-1][1] - size if from_end else holes[0][0]
        self._taken[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Give back the extent at `offset`."""
        del self._taken[offset]

    def _holes(self) -> list[tuple[int, int]]:
        """`(start, end)` of every free run, by start; both are aligned."""
        whole = self.capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        taken = sorted(self._taken.items())
        starts = [0, *(offset + size for offset, size in taken)]
        ends = [*(offset for offset, _ in taken), whole]
        return [hole for hole in zip(starts, ends, strict=True) if hole[0] < hole[1]]
