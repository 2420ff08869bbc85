"""What all benchmarks share: checked command-line values, and results that are printed and kept."""

import argparse
import json
import re
from pathlib import Path

from errors import UserError
from files import replace_text

PARTS = ("forward", "backward", "both")


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


def check_out(path: Path | None) -> None:
    """Raise `UserError` before anything is measured where the results could not be written afterwards."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UserError(f"--out {path} cannot be written; give a file in a folder that exists.")


def write(results: dict, path: Path | None) -> None:
    """Print results as one line of JSON, and write the same line to `path`."""
    print(json.dumps(results))
    if path is not None:
        write_atomically(path, results)


def write_atomically(path: Path, results: dict) -> None:
    """Write results to a file as one line of JSON; after a kill it has either the old results or the new ones."""
    replace_text(path, json.dumps(results) + "\n")
