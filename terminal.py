"""Lines on a terminal: those that are wider than it end between words, but not inside a command, which people copy."""

import re
import sys
from collections.abc import Callable
from typing import TextIO

COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")  # they have no width
COMMAND = re.compile(r"python (-m|\S+\.py) .*")
NEVER_WRAPPED = ("{", "  |")  # how a line of JSON and a line of a model's text begin


def fit_terminal(text: str, stream: TextIO) -> str:
    """The text, for a terminal with its long lines broken."""
    if not stream.isatty():
        return text
    import shutil  # imported here, as before `exit_on_user_error` Ctrl-C in an import is a traceback
    import textwrap

    options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    columns, lines = shutil.get_terminal_size().columns, text.split("\n")
    for i, line in enumerate(lines):
        if len(COLOUR_CODES.sub("", line)) > columns and not line.startswith(NEVER_WRAPPED):
            unbroken = COMMAND.sub(lambda command: command[0].replace(" ", "\xa0"), line)  # no-break spaces
            lines[i] = textwrap.fill(unbroken, columns, **options).replace("\xa0", " ")
    return "\n".join(lines)


def fit_stdout(clean: Callable[[str], str] = str) -> None:
    """From now on, pass what is printed to standard output through `clean` and `fit_terminal`."""
    write = sys.stdout.write
    sys.stdout.write = lambda text: write(fit_terminal(clean(text), sys.stdout))
