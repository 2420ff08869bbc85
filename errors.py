"""How a program ends: errors that a user can fix are one line and exit status 2, and never a traceback."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn, TextIO

MAX_MESSAGE = 2000  # characters


class UserError(Exception):
    """Something that the user can fix. The message is one line: what is wrong, where, and what to do.

    It may quote names and values from files of others: line breaks and other control characters are shown as escapes,
    `\\n`, and the middle of a message that is too long to read is left out.
    """

    def __str__(self) -> str:
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shorten(super().__str__()))
        return shorten(shown)


def shorten(message: str) -> str:
    """The beginning and the end of a message that is too long to read."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} [...] {message[-half:]}"


class OptionalOutput:
    """A text stream that drops what cannot be written: the program continues when nobody reads what it prints."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            discard_output(self._stream)
            closed_by_reader = error.errno in (errno.EPIPE, errno.EINVAL)  # EINVAL on Windows
            if not closed_by_reader and self is sys.stdout:
                note = f"note: standard output cannot be written ({error.strerror}); continuing without it"
                print(note, file=sys.stderr)


def open_streams() -> None:
    """Make standard output and standard error write UTF-8 on every system, and never fail."""
    replace_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):  # not where a caller has put another kind of stream in its place
            stream.reconfigure(encoding="utf-8", errors="replace")
        setattr(sys, name, OptionalOutput(stream))


def replace_closed_streams() -> None:
    """Put the null device in the place of a stream that was closed before the program started: Python has None there.

    Without it, what is meant for standard error would be printed to standard output.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the program runs


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError`, or what the system says about a file, into one line and exit status 2; Ctrl-C into 130.

    A pipe that its reader has closed is no error, nor is a stream that is closed from the start.
    """
    replace_closed_streams()
    try:
        try:
            yield
        except SystemExit as error:  # such as after --help
            sys.stdout.flush()
            if error.code:
                let_main_process_speak()
            raise
        sys.stdout.flush()  # not at the exit of the interpreter, where a full disk would be a traceback
    except UserError as error:
        end(f"error: {error}", 2)
    except BrokenPipeError:  # the reader closed it (`| head`); without this Python reports it again on exit
        discard_output(sys.stdout)
    except OSError as error:  # such as a name that is too long, a folder that may not be read, or a full disk
        name = "" if error.filename is None else str(error.filename)
        where = f"{name if len(name) < 200 else name[:200] + '...'}: " if name else ""
        end(f"error: {where}{error.strerror or error}.", 2)
    except KeyboardInterrupt:
        end("stopped.", 130)


def is_main_process() -> bool:
    """Whether this is the one that prints and writes, of the processes of one training run."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def let_main_process_speak() -> None:
    """Before the end of a process that is not the main one, wait to be stopped because the main one failed as well."""
    if not is_main_process():
        time.sleep(3)


def end(message: str, status: int) -> NoReturn:
    """Print the message to standard error and exit. Output that still cannot be written is dropped without a word."""
    let_main_process_speak()
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard_output(stream)
    sys.exit(status)


def discard_output(stream: TextIO) -> None:
    """Let the null device take what the stream has buffered and all that follows."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
