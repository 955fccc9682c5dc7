"""Extents: first fit, alignment, merging, and a random programme against a byte map."""

import random

import pytest

from memory.extents import ALIGNMENT_BYTES, ExtentAllocator, aligned


def test_sizes_round_up_to_the_alignment():
    assert [aligned(n) for n in (0, 1, 127, 128, 129)] == [0, 128, 128, 128, 256]


def test_first_fit_takes_the_lowest_hole_that_is_large_enough():
    extents = ExtentAllocator(1024)
    offsets = [extents.allocate(n) for n in (128, 128, 256, 128)]
    assert offsets == [0, 128, 256, 512]
    extents.free(0)
    extents.free(256)
    assert extents.allocate(200) == 256
    assert extents.allocate(100) == 0
    assert extents.allocate(1) == 640


def test_nothing_is_taken_where_nothing_fits():
    extents = ExtentAllocator(512)
    assert extents.allocate(513) is None
    assert extents.used_bytes == 0
    assert extents.allocate(512) == 0
    assert extents.allocate(1) is None


def test_neighbours_merge_whatever_the_order_of_freeing():
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1]):
        extents = ExtentAllocator(384)
        offsets = [extents.allocate(128) for _ in range(3)]
        for index in order:
            extents.free(offsets[index])
        assert extents.allocate(384) == 0, order


def test_an_extent_is_freed_once():
    extents = ExtentAllocator(256)
    extents.free(extents.allocate(128))
    with pytest.raises(KeyError):
        extents.free(0)


def test_an_allocator_of_what_is_taken_keeps_clear_of_it_and_leaves_it_alone():
    taken = {128: 256, 640: 128}
    extents = ExtentAllocator(900, taken)
    assert extents.used_bytes == 384
    assert extents.allocate(512) is None
    assert extents.allocate(256) == 384
    assert extents.allocate(128) == 0
    assert extents.allocate(128) == 768  # 900 holds seven whole blocks
    assert extents.allocate(1) is None
    assert taken == {128: 256, 640: 128}


def test_from_the_end_takes_the_end_of_the_highest_hole_that_is_large_enough():
    extents = ExtentAllocator(1024 + 100)
    assert [extents.allocate(n, from_end=True) for n in (100, 256)] == [896, 640]
    assert extents.allocate(128) == 0
    extents.free(896)
    assert extents.allocate(200, from_end=True) == 384
    assert extents.allocate(100, from_end=True) == 896
    assert extents.allocate(256) == 128
    assert extents.allocate(1, from_end=True) is None


@pytest.mark.parametrize("seed", range(5))
def test_random_programme_never_overlaps_and_ends_whole(seed):
    rng = random.Random(seed)
    capacity = 64 * ALIGNMENT_BYTES
    extents, held, owner = ExtentAllocator(capacity), {}, [None] * 64
    for step in range(600):
        if held and rng.random() < 0.45:
            offset = rng.choice(list(held))
            for block in range(offset // 128, (offset + held.pop(offset)) // 128):
                owner[block] = None
            extents.free(offset)
        else:
            size = rng.choice([1, 100, 128, 500, 2000])
            offset = extents.allocate(size, from_end=rng.random() < 0.3)
            blocks = aligned(size) // 128
            free_run = max(
                len(run) for run in "".join(".#"[o is not None] for o in owner).split("#")
            )
            assert (offset is None) == (free_run < blocks)
            if offset is not None:
                assert offset % ALIGNMENT_BYTES == 0
                where = slice(offset // 128, offset // 128 + blocks)
                assert owner[where] == [None] * blocks
                owner[where] = [step] * blocks
                held[offset] = aligned(size)
        assert extents.used_bytes == sum(held.values())
    for offset in held:
        extents.free(offset)
    assert extents.allocate(capacity) == 0
