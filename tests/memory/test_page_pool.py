"""KV pages: who holds which, in what order, and what a full page is known to hold."""

import pytest

from memory.page_pool import DUMMY_PAGE, PagePool, page_key, root_key


def test_pages_are_handed_out_once_and_never_the_dummy():
    pool = PagePool(6, 16)
    assert (pool.free_pages, pool.used_pages) == (5, 0)
    pages = pool.allocate(2) + pool.allocate(3)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert DUMMY_PAGE not in pages
    assert (pool.free_pages, pool.used_pages) == (0, 5)


def test_all_or_nothing():
    pool = PagePool(4, 16)
    assert pool.allocate(4) is None
    assert pool.free_pages == 3
    assert pool.allocate(0) == []


def test_equal_histories_hand_out_equal_pages():
    def history() -> list[list[int]]:
        pool = PagePool(9, 16)
        first, second = pool.allocate(3), pool.allocate(2)
        pool.free(first)
        third = pool.allocate(4)
        pool.free(second)
        return [first, second, third, pool.allocate(3)]

    assert history() == history()


def test_what_is_freed_last_is_handed_out_first_in_the_same_order():
    pool = PagePool(9, 16)
    pages = pool.allocate(4)
    pool.free(pages)
    assert pool.allocate(4) == pages


def test_the_dummy_is_not_anyones_to_free():
    pool = PagePool(4, 16)
    with pytest.raises(AssertionError):
        pool.free([DUMMY_PAGE])


def test_no_page_is_freed_twice():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError):
        pool.free(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (4096, 256)])
def test_pages_for(tokens, pages):
    assert PagePool(4, 16).pages_for(tokens) == pages


def test_keys_tell_adapter_versions_and_prefixes_apart():
    tokens = list(range(16))
    contents = [  # pages of tokens, by adapter version
        (0, [tokens]),
        (1, [tokens]),
        (2, [tokens]),
        (11, [tokens]),
        (0, [tokens, tokens]),
        (1, [tokens, tokens]),
        (0, [tokens[::-1]]),
        (0, [tokens[::-1], tokens]),  # the same page after another prefix
        (0, [[*tokens[:-1], 2**31 - 1]]),
    ]

    def key(version: int, pages: list[list[int]]) -> bytes:
        result = root_key(version)
        for page in pages:
            result = page_key(result, page)
        return result

    keys = [key(*content) for content in contents]
    assert len(set(keys)) == len(contents)
    assert keys == [key(*content) for content in contents]


def test_a_key_goes_with_its_page():
    pool = PagePool(4, 2)
    page, other = pool.allocate(2)
    assert pool.key(page) is None
    pool.set_key(page, page_key(root_key(0), [5, 6]))
    assert pool.key(page) == page_key(root_key(0), [5, 6])
    assert pool.key(other) is None
    pool.free([page])
    assert pool.allocate(1) == [page]
    assert pool.key(page) is None
