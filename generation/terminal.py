"""A session in the terminal: reads lines, hands them on, and prints text that cannot change the terminal's state.

Imports no torch.
"""

import contextlib
import sys
from collections.abc import Callable

from errors import UserError
from generation.prompts import MAX_FILE, check_unicode

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


def read_line() -> str:
    """One line that the user types, with the editing keys and the history of readline where Python has it.

    Raises EOFError at the end of the input.
    """
    if sys.stdin is None:  # it was closed before the program started
        raise EOFError
    return read_typed_line() if sys.stdin.isatty() else read_piped_line()


def read_typed_line() -> str:
    """A line from a terminal."""
    with contextlib.suppress(ImportError):  # Windows, whose console edits lines itself
        import readline  # noqa: F401
    prompt = "> "
    if not sys.stdout.isatty():  # standard output is for the model's text
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        line = input(prompt)
    except UnicodeDecodeError as error:
        raise UserError(f"this line is not UTF-8 ({error}); type it again.") from None
    check_unicode("the line", line)
    return line


def read_piped_line() -> str:
    """A line from a file, a pipe, or a device, which may never end."""
    content = sys.stdin.buffer.readline(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        print(f"error: a line is longer than {MAX_FILE >> 20} MiB; no more is read", file=sys.stderr, flush=True)
        content = b""
    if not content:
        raise EOFError
    try:
        return content.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"this line is not UTF-8 ({error}); convert it.") from None


def hold_session(
    respond: Callable[[str], object],
    reset: Callable[[], object],
    read: Callable[[], str],
    log: Callable[[str], object],
) -> None:
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
            log("stopped" if responding else "\nCtrl-D leaves (on Windows: Ctrl-Z, then Enter); /help lists more")
