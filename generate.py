"""Generate text with a trained model: `python generate.py [RUN] --prompt "def "`. See `python generate.py --help`."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

from errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from generation.settings import Settings


def main() -> None:
    """Parse the command line, find the checkpoint, read the prompts; then import torch, which is slow, and generate."""
    with exit_on_user_error():  # around the imports too: they take time, in which Ctrl-C may come
        from pathlib import Path

        import tyro

        from checkpoints.find import find_checkpoint, newest_run
        from generation.prompts import read_prompts
        from generation.settings import Settings, recommended_sampling
        from generation.terminal import read_line

        settings = tyro.cli(Settings, prog="generate.py")
        checkpoint = find_checkpoint(newest_run(Path("runs")) if settings.run is None else settings.run)
        if settings.chat and (recommended := recommended_sampling(checkpoint)) is not None:
            settings = tyro.cli(Settings, prog="generate.py", default=Settings(sampling=recommended))
            values = ", ".join(f"{name} {value:g}" for name, value in vars(settings.sampling).items())
            log(f"sampling (generation_config.json, then flags): {values}")
        prompts = None if responds_to_lines(settings) else read_prompts(settings.prompt, settings.prompt_file)
        if settings.chat and prompts == [""]:
            raise UserError("there is no message to answer; give one with --prompt, or on standard input.")
        from generation.session import run  # imports torch

        # The same bytes on every system: Windows has other defaults for the encoding and line ends.
        sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="\n")
        run(settings, checkpoint, prompts, write, log, read_line)


def responds_to_lines(settings: Settings) -> bool:
    """Whether to respond to lines as they are typed, instead of to prompts that are known from the start."""
    typed = not settings.prompt and settings.prompt_file is None and sys.stdin is not None and sys.stdin.isatty()
    return settings.interactive or (settings.chat and typed)


def write(text: str) -> None:
    """Write to standard output and flush, to a terminal without control characters.

    Exits quietly if the reader has closed the pipe (`| head`).
    """
    from generation.terminal import printable

    try:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes standard output again at exit and would print an error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno in (errno.EPIPE, errno.EINVAL):  # EINVAL on Windows
            sys.exit(0)
        raise UserError(f"cannot write to standard output ({error.strerror}); redirect it elsewhere.") from None


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
