"""Values in messages: short, whatever was given."""

import pytest

from engine.errors import RequestError
from engine.prompts import as_token_ids, one_each
from engine.shown import shown


@pytest.mark.parametrize(
    "value", [None, True, -3, 2**64, 0.5, "text", b"x", [1, "a"], {"a": [None]}]
)
def test_short_values_are_whole(value):
    assert shown(value) == repr(value)


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


def test_other_values_are_cut_and_never_raise():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for value in (10**5000, -(10**5000), "x" * 10**6, [0] * 10**6, {10**5000: nested}, nested):
        assert len(shown(value)) < 300
    assert shown(-(10**5000)) == "-<integer of about 5001 digits>"
    assert "_Unprintable" in shown(_Unprintable())
    while nested:  # freed from the outside in, as it is too deep for the interpreter
        nested = nested[0]


def test_prompts_of_such_values_are_refused():
    with pytest.raises(RequestError, match="prompt=<integer of about 5001 digits> is neither"):
        as_token_ids(10**5000, "prompt")
    with pytest.raises(RequestError, match="adapters=<integer of about"):
        one_each("adapters", 10**5000, str, 1)
