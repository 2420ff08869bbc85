"""Reads lines from the terminal, and writes text that cannot change its state. Imports no torch."""

import contextlib
import sys

# A model's text may contain escape sequences, which move the cursor, rename the window or hide text. All control
# characters but tab and newline are shown as their Unicode pictures; C1 has none.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """The text with its control characters made visible, except tab and newline."""
    return text.translate(PICTURES)


def write(text: str) -> None:
    """Write to standard output and flush, to a terminal without control characters."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def log(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def read_line() -> str:
    """One line that the user types, with the editing keys and the history of readline where Python has it.

    Raises EOFError at the end of the input.
    """
    with contextlib.suppress(ImportError):  # Windows, whose console edits lines itself
        import readline  # noqa: F401
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # standard output is for the text
    return input()
