"""Lists on a benchmark's command line."""

import argparse


def names(text: str) -> list[str]:
    """ "a,b" as ["a", "b"]."""
    return text.split(",")


def integers(text: str) -> list[int]:
    """ "1,8" as [1, 8]; argparse says what is wrong with others."""
    try:
        values = [int(number) for number in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 1, separated by commas")
    return values
