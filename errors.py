"""What a program says when something is unusual, and how it ends when something is wrong.

Everything that a user hands in is read inside `reading`. The block may assume that the file is valid: any exception in
it becomes one line and exit status 2. `--traceback` on any command line shows where it was raised.
"""

import contextlib
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from terminal import fit_terminal

# A text of others may contain escape sequences, which move the cursor, rename the window or hide text. Control
# characters are shown as their Unicode pictures; those of C1, and bytes of an argument that are not UTF-8, have none.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys((*range(0x80, 0xA0), *range(0xDC80, 0xDD00)), 0xFFFD)

TOGETHER = dict.fromkeys(("starlette", "uvicorn"), "starlette uvicorn")  # a missing package -> what to install
TOGETHER |= dict.fromkeys(("pandas", "scipy"), "pandas scipy") | {"google": "protobuf", "google.protobuf": "protobuf"}


def printable(text: str) -> str:
    """The text with its control characters made visible, except tab and newline."""
    return text.translate(PICTURES)


class UserError(Exception):
    """Something that the user can fix. The message is one line: what is wrong, where, and what to do."""

    def __str__(self) -> str:
        """The message on one line and without control characters, as it may quote files of others."""
        return printable(super().__str__()).replace("\n", "␊")


@contextlib.contextmanager
def reading(path: Path | str, fix: str = "download or save it again") -> Iterator[None]:
    """Read `path` in this block: any exception becomes a `UserError` with the path, the reason and the fix."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        is_rust_panic = type(error).__name__ == "PanicException"  # it is no Exception, and no module exports it
        has_no_memory = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)  # of torch
        if has_no_memory or (not isinstance(error, Exception) and not is_rust_panic):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"no {reason}"
        raise UserError(f"{path} cannot be read ({reason}); {fix}.") from error


def log(text: str) -> None:
    """Print a line to standard error, if this is the main process."""
    if is_main_process():
        print(fit_terminal(printable(text), sys.stderr), file=sys.stderr)


note = functools.cache(log)  # once


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def is_main_process() -> bool:
    """Whether this is the one that prints and writes, of the processes of one training run."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Run a program in this block. It ends with one line and the status 2 for an error that the user can fix, 130 for
    Ctrl-C, and 141, as by SIGPIPE, when the reader of its output has closed the pipe (`| head`)."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    signal.signal(signal.SIGINT, interrupt)
    os.environ["MPLBACKEND"] = "agg"  # figures are only saved, and a backend that is not there would fail
    show_traceback = "--traceback" in sys.argv
    if show_traceback:
        sys.argv.remove("--traceback")
    try:
        for argument in (__file__, *sys.argv[1:]):
            if argument != argument.encode("utf-8", "replace").decode():
                raise UserError(f"{argument} is not UTF-8; give texts and names of files in UTF-8.")
        try:
            yield
        finally:
            sys.stdout.flush()  # here, as a full disk is a traceback when the interpreter flushes
    except BrokenPipeError:
        exit_with("", 141)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda *_: None)  # until the process has ended
        exit_with("stopped.", 130)
    except ModuleNotFoundError as error:
        names = TOGETHER.get(error.name, error.name)
        required = "\n" + Path(__file__).with_name("requirements.txt").read_text("utf-8")
        names = "-r requirements.txt" if f"\n{names.replace('_', '-')}>" in required else names
        exit_with(f"error: this needs the package {error.name}: pip install {names}", 2)
    except (UserError, OSError) as error:
        if show_traceback:
            sys.excepthook(*sys.exc_info())
        if isinstance(error, OSError) and error.filename is not None:
            error = UserError(f"{error.filename}: {error.strerror}.")
        exit_with(f"error: {error}", 2)


def open_closed_streams() -> None:
    """Open what a caller has closed on the null device: the next file to be opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)  # as standard streams are


def exit_with(message: str, status: int) -> NoReturn:
    if not is_main_process():
        time.sleep(3)  # the main one prints first: when a process has ended, torchrun stops all
    print_or_discard("", sys.stdout)
    if message:
        print_or_discard(fit_terminal(message, sys.stderr) + "\n", sys.stderr)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(status)  # at Python's own exit, a process group that has lost a process may abort
    sys.exit(status)


def print_or_discard(text: str, stream: TextIO) -> None:
    """Print the text and flush. What nobody takes is discarded, as Python would complain about it again on exit."""
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt` for Ctrl-C. Imports and Numba's compiler can swallow that, so in them exit at once."""
    while frame is not None:
        if "<frozen importlib" in frame.f_code.co_filename or "llvmlite" in frame.f_code.co_filename:
            os.write(2, b"stopped.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """`interrupt`, for a program that ends then: later signals to stop would break off how it ends."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: None)  # with SIG_IGN, Python complains of one that has arrived already
    interrupt(number, frame)


def run_main(module: str, program: str = "") -> NoReturn:
    """Run a module's `main`, whose parameters are the flags of the command line; one that reads it itself is run in
    `exit_on_user_error`. Either is called above slow imports, so that Ctrl-C is one line in them, too."""
    with exit_on_user_error():
        from flags import call_with_flags

        main = importlib.import_module(module).main
        sys.exit(call_with_flags(main, prog=program or f"python -m {module.removesuffix('.__main__')}"))
