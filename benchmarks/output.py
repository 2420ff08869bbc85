"""What all benchmarks share: checked command-line values, and results printed and written to a file."""

import argparse
import json
import re
from pathlib import Path

from errors import UserError


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
    line = json.dumps(results)
    print(line)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")
