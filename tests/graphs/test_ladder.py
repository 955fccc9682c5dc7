"""Batch sizes and the choice among them."""

import pytest

from graphs.errors import CaptureError
from graphs.graph_key import GraphKey
from graphs.ladder import Ladder
from memory.errors import EngineError


def test_the_default_ladder_ends_at_the_largest_batch():
    assert Ladder.up_to(1).sizes == (1,)
    assert Ladder.up_to(3).sizes == (1, 2, 3)
    assert Ladder.up_to(8).sizes == (1, 2, 4, 8)
    assert Ladder.up_to(36).sizes == (1, 2, 4, 8, 16, 24, 32, 36)
    for largest in range(1, 600):
        sizes = Ladder.up_to(largest).sizes
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))


def test_bucket_for():
    ladder = Ladder.of([8, 4, 1, 4], 10)
    assert ladder.sizes == (1, 4, 8)
    assert [ladder.bucket_for(rows) for rows in range(1, 10)] == [1, 4, 4, 4, 8, 8, 8, 8, None]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [([], "empty"), ([0], "0"), ([4, 11], "11"), ([2.0], "2.0"), ([True], "True"), (["4"], "'4'")],
)
def test_bad_sizes_are_named_with_what_is_accepted(sizes, found):
    with pytest.raises(EngineError, match=f"graph_batch_sizes.*{found}.*from 1 to .*=10"):
        Ladder.of(sizes, 10)


def test_keys_are_values():
    assert {GraphKey(4): 1}[GraphKey(4, lora=True)] == 1
    assert GraphKey(4) != GraphKey(4, lora=False)
    assert issubclass(CaptureError, EngineError)
