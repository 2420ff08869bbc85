"""Text from a trained model: `python generate.py [RUN] --prompt "def "`. See `python generate.py --help`."""

import errno
import os
import sys
from pathlib import Path

import tyro

from errors import UserError, exit_on_user_error
from generation.prompts import read_prompts
from generation.settings import Settings
from model.find_checkpoint import find_checkpoint, newest_run


def main() -> None:
    """Read the command line, find what it names, and only then import what takes seconds, and generate."""
    with exit_on_user_error():
        settings = tyro.cli(Settings, prog="generate.py")
        checkpoint = find_checkpoint(newest_run(Path("runs")) if settings.run is None else settings.run)
        prompts = read_prompts(settings.prompt, settings.prompt_file)
        from generation.session import run  # imports torch

        # The same bytes on every system: Windows would write its own encoding and line ends.
        sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="\n")
        run(settings, checkpoint, prompts, write, note)


def write(text: str) -> None:
    """Write to standard output at once; ends the program quietly when its reader has gone (`| head`)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes standard output once more as it ends, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno in (errno.EPIPE, errno.EINVAL):  # Windows says EINVAL
            sys.exit(0)
        raise UserError(f"standard output cannot be written ({error.strerror}); send the text elsewhere.") from None


def note(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
