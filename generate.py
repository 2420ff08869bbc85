"""Generate text with a trained model: `python generate.py RUN "hello"`. See `python generate.py --help`."""

import sys

if __name__ == "__main__":  # installs the error handler, then imports itself: it handles the slow imports, too
    from errors import exit_on_user_error

    with exit_on_user_error():
        from generate import main

        sys.exit(main())

import shlex

from checkpoints.find import find_checkpoint, newest_run
from errors import UserError, fit_stdout, note
from flags import parse_flags
from generation.settings import Settings, recommended_sampling


def main() -> None:
    """Parse the command line, find the checkpoint; then import torch, which is slow, read the prompt and generate."""
    if {"-h", "--help"} & {*sys.argv}:
        fit_stdout()
    settings, unknown = parse_flags(Settings, prog="generate.py", return_unknown_args=True)
    if unknown and not any(word.startswith("-") for word in unknown):
        raise UserError(f"put a text of several words in quotes: {shlex.quote(' '.join([settings.text, *unknown]))}")
    if unknown:
        parse_flags(Settings, prog="generate.py")  # raises what is wrong
    checkpoint = find_checkpoint(newest_run() if settings.run is None else settings.run)
    recommended = None if settings.merge else recommended_sampling(checkpoint, settings.adapter)
    follow = recommended is not None and (settings.chat or recommended.temperature > 0)  # a text would repeat itself
    if follow:
        settings = parse_flags(Settings, prog="generate.py", default=Settings(sampling=recommended))
    sys.stdout.reconfigure(newline="\n")  # the same bytes on Windows
    from generation import cli  # imports torch

    prompts = [] if settings.merge else cli.read_prompts(settings)
    if settings.chat and prompts == [""]:
        raise UserError("there is no message to answer; give one after the run, or on standard input.")
    if follow:
        values = ", ".join(f"{name} {value:g}" for name, value in vars(settings.sampling).items())
        note(f"sampling (the flags, else the model's generation_config.json): {values}")
    cli.run(settings, checkpoint, prompts)
