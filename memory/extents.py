"""First-fit allocation of byte extents in one block of memory whose address never changes.

Knows offsets only, not what lies at them.
"""

ALIGNMENT_BYTES = 128


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment of every extent and of every block in it."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class ExtentAllocator:
    """Hands out extents of `capacity_bytes`; free extents that touch are merged."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)]  # (offset, size), by offset
        self._taken: dict[int, int] = {}

    def copy(self) -> "ExtentAllocator":
        """The same state, to try things on."""
        trial = ExtentAllocator(self.capacity_bytes)
        trial._free, trial._taken = list(self._free), dict(self._taken)
        return trial

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a new extent, or None where no free extent is large enough."""
        size = aligned(max(size_bytes, 1))
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                rest = [(offset + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                self._taken[offset] = size
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give back the extent at `offset`."""
        size = self._taken.pop(offset)
        extents = sorted([*self._free, (offset, size)])
        merged: list[tuple[int, int]] = []
        for start, length in extents:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
