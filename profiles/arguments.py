"""Lists on a benchmark's command line."""

import argparse
from collections.abc import Callable, Iterable


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """ "a,b" as ["a", "b"], each of which is known; argparse says which is not."""
    accepted = tuple(known)

    def parse(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in accepted:
                raise argparse.ArgumentTypeError(f"{name!r}: known are {', '.join(accepted)}")
        return given

    return parse


def integers(text: str) -> list[int]:
    """ "1,8" as [1, 8]; argparse says what is wrong with others."""
    try:
        values = [int(number) for number in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 1, separated by commas")
    return values


def positive(text: str) -> int:
    """One whole number from 1."""
    values = integers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one whole number from 1")
    return values[0]
