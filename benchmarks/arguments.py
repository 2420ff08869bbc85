"""Checked command-line values of the benchmarks."""

import argparse
import re


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def pattern(text: str) -> str:
    """A regular expression, for argparse."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid pattern ({error})") from None
    return text
