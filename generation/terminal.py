"""The terminal: lines that are typed, and text that cannot change the terminal's state. Imports no torch."""

import contextlib
import sys
from collections.abc import Callable

from errors import UserError

HELP = """/reset  start a new conversation: the model forgets everything said so far
/help   show this
Ctrl-C  stop the answer; at the prompt: clear the line
Ctrl-D  leave (on Windows: Ctrl-Z, then Enter)
Anything else goes to the model."""

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
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    print("> " if sys.stdin.isatty() else "", end="", file=sys.stderr, flush=True)  # standard output is for the text
    return input()


def prompt_loop(respond: Callable[[str], object], reset: Callable[[], object], read: Callable[[], str], log) -> None:
    """Read lines until the input ends, and hand each to `respond`, unless it is blank or one of the commands of `HELP`.

    Other lines that begin with a slash are text: models have commands of their own, such as /no_think. A
    `UserError` or Ctrl-C ends a response, not the session.
    """
    commands = {"/reset": reset, "/help": lambda: log(HELP)}
    while True:
        responding = False
        try:
            line = read()
            responding = True
            if command := commands.get(line.strip()):
                command()
            elif line.strip():
                respond(line)
        except EOFError:
            log("")  # the next prompt of the shell starts on a line of its own
            return
        except UserError as error:
            log(f"error: {error}")
        except KeyboardInterrupt:
            log("\nstopped" if responding else "\nCtrl-D leaves (on Windows: Ctrl-Z, then Enter); /help lists more")
