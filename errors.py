"""How a program ends when something is wrong.

Everything that a user hands in is read inside `reading`, in code that takes files to be good: whatever is raised there
becomes one line and exit status 2. `--traceback` on any command line shows where it was raised.
"""

import contextlib
import functools
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

# A text of others may contain escape sequences, which move the cursor, rename the window or hide text. All control
# characters but tab and newline are shown as their Unicode pictures; C1 has none.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal; they take no place in a line
COMMAND = re.compile(r"python (-m|\S+\.py) .*")
VERBATIM = ("{", "  |")  # a JSON object and a model's text begin like this


def printable(text: str) -> str:
    """The text with its control characters made visible, except tab and newline."""
    return text.translate(PICTURES)


def fit_terminal(text: str, stream: TextIO) -> str:
    """The text, for a terminal with long lines broken between words, but not inside a command, which people copy."""
    if not stream.isatty():
        return text
    import shutil  # these two only here, as Ctrl-C in an import is a traceback
    import textwrap

    options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    columns, lines = shutil.get_terminal_size().columns, text.split("\n")
    for i, line in enumerate(lines):
        if len(COLOURS.sub("", line)) > columns and not line.startswith(VERBATIM):
            unbroken = COMMAND.sub(lambda command: command[0].replace(" ", "\xa0"), line)  # no-break spaces
            lines[i] = textwrap.fill(unbroken, columns, **options).replace("\xa0", " ")
    return "\n".join(lines)


def fit_stdout(clean: Callable[[str], str] = str) -> None:
    """From now on, pass what is printed to standard output through `clean` and `fit_terminal`."""
    write = sys.stdout.write
    sys.stdout.write = lambda text: write(fit_terminal(clean(text), sys.stdout))


class UserError(Exception):
    """Something that the user can fix. The message is one line: what is wrong, where, and what to do."""

    def __str__(self) -> str:
        """The message with control characters as escapes, as it may quote files of others."""
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())


@contextlib.contextmanager
def reading(path: Path | str, fix: str = "download or save it again") -> Iterator[None]:
    """Read `path` in this block: any exception becomes a `UserError` with the path, the reason and the fix."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # a panic in Rust
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


def usable_cores() -> int:
    """The CPU cores that this process may use: `taskset`, Slurm and cpusets may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_main_process() -> bool:
    """Whether this is the one that prints and writes, of the processes of one training run."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError`, or what the system says about a file, into one line and exit status 2; Ctrl-C into 130; and a
    pipe that its reader has closed (`| head`) into 141, that of SIGPIPE. Standard output and error become UTF-8.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, so that the next file to be opened would get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    signal.signal(signal.SIGINT, interrupt)
    show_traceback = "--traceback" in sys.argv
    if show_traceback:
        sys.argv.remove("--traceback")
    try:
        for text in (__file__, *sys.argv[1:]):
            if text != text.encode("utf-8", "replace").decode():
                raise UserError(f"{text} is not UTF-8; give texts and names of files in UTF-8.")
        try:
            yield
        finally:
            print(end="", flush=True)  # not at the exit of the interpreter, where a full disk would be a traceback
    except SystemExit as error:  # such as after a wrong flag
        wait_for_main_process(error.code)
        raise
    except BrokenPipeError:  # nobody wants the rest
        end("", 141)
    except (UserError, OSError) as error:
        if show_traceback:
            sys.excepthook(*sys.exc_info())
        if isinstance(error, OSError) and error.filename is not None:
            error = f"{error.filename}: {error.strerror}."
        end(f"error: {error}", 2)
    except ModuleNotFoundError as error:
        end(f"error: this needs the package {error.name}: pip install {error.name}", 2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the process has ended
        end("stopped.", 130)


def end(message: str, status: int) -> NoReturn:
    """Print the message to standard error and exit."""
    wait_for_main_process(status)
    for stream, text in ((sys.stdout, ""), (sys.stderr, message and fit_terminal(message, sys.stderr) + "\n")):
        try:
            print(text, end="", file=stream, flush=True)
        except OSError:  # Python would report it again on exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(status)  # at Python's own exit, a process group that has lost a process may abort
    sys.exit(status)


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; in an import or in Numba's compiler, which may lose it, end the process."""
    while frame is not None:
        if "<frozen importlib" in frame.f_code.co_filename or "llvmlite" in frame.f_code.co_filename:
            os.write(2, b"stopped.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def wait_for_main_process(status: int) -> None:
    """Let the main process print its error first: when another process ends, all are stopped."""
    if status and not is_main_process():
        time.sleep(3)


def run_main(module: str) -> NoReturn:
    """Run a module's `main` with the flags of `python -m MODULE`. Call it above slow imports: Ctrl-C is a line, too."""
    with exit_on_user_error():
        from flags import call_with_flags

        main = importlib.import_module(module).main
        sys.exit(call_with_flags(main, prog=f"python -m {module.removesuffix('.__main__')}"))
