"""Which KV pages are free and which request holds which: bookkeeping on the host only.

Page 0 is the dummy page: rows of padding write there, and the block-table entries of pages that
were taken back point at it. It is never handed out.
"""

import hashlib
from collections.abc import Sequence

DUMMY_PAGE = 0


def root_key(adapter_version: int) -> bytes:
    """The key that the first page of a request chains from; version 0 is the base model."""
    return b"adapter version %d" % adapter_version


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """What a full page holds: the adapter version and the whole token prefix up to its end.

    `parent` is the key of the page before it, or the root. Equal keys mean equal KV contents, so
    pages of other adapters, or of an adapter's earlier version, are never taken for each other.
    """
    data = parent + b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.blake2b(data, digest_size=16).digest()


class PagePool:
    """A free list over `num_pages` pages of `page_size` tokens."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1, "the pool needs a page beside the dummy"
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))  # popped from the end: 1, 2, …
        self._taken: set[int] = set()
        self._keys: dict[int, bytes] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return len(self._taken)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back, the last first, so that equal histories hand out equal pages."""
        for page in reversed(pages):
            assert page in self._taken, f"page {page} is not taken"
            self._taken.remove(page)
            self._keys.pop(page, None)
            self._free.append(page)

    def key(self, page: int) -> bytes | None:
        """What `page` is known to hold, or None while it is not full."""
        return self._keys.get(page)

    def set_key(self, page: int, key: bytes) -> None:
        """Record what a page holds once its last token is written."""
        self._keys[page] = key
