"""Reads lines from the terminal, and writes text that cannot change its state. Imports no torch."""

import contextlib
import sys

from errors import printable


def write(text: str) -> None:
    """Write to standard output and flush, to a terminal without control characters."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def log(line: str) -> None:
    """Print a line to standard error."""
    print(printable(line), file=sys.stderr, flush=True)


def read_line() -> str:
    """One line that the user types, with the editing keys and the history of readline where Python has it.

    Raises EOFError at the end of the input.
    """
    with contextlib.suppress(ImportError):  # Windows, whose console edits lines itself
        import readline  # noqa: F401
    if sys.stdin.errors != "replace":  # the first time
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # standard output is for the text
    return input()
