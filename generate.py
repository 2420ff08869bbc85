"""Generate text with a trained model: `python generate.py RUN "hello"`. See `python generate.py --help`."""

import sys

if __name__ == "__main__":  # installs the error handler, then imports itself: it handles the slow imports, too
    from errors import exit_on_user_error

    with exit_on_user_error():
        from generate import main

        sys.exit(main())

import shlex

from checkpoints.find import find_adapter, find_checkpoint, newest_run, tokenizer_directory
from data.tokenizer import load_tokenizer
from errors import UserError, fit_stdout, log
from flags import parse_flags
from generation.settings import Settings, read_prompts, recommended_sampling, use_recommended


def main() -> None:
    """Parse the command line, open the tokenizer, read the prompts; then import torch, which is slow, and generate."""
    if {"-h", "--help"} & {*sys.argv}:
        fit_stdout()
    settings, unknown = parse_flags(Settings, prog="generate.py", return_unknown_args=True)
    if unknown and not any(word.startswith("-") for word in unknown):
        texts = [settings.text, *unknown]
        if any(" " in text for text in texts):  # they were in quotes
            raise UserError("for several texts repeat --prompt TEXT.")
        raise UserError(f"put a text of several words in quotes: {shlex.quote(' '.join(texts))}")
    if unknown:
        parse_flags(Settings, prog="generate.py")  # raises what is wrong
    checkpoint = find_checkpoint(newest_run() if settings.run is None else settings.run)
    recommended = None if settings.merge else recommended_sampling(checkpoint, settings.adapter)
    follow = use_recommended(recommended, settings.chat)
    if follow:
        settings = parse_flags(Settings, prog="generate.py", default=Settings(sampling=recommended))
    sys.stdout.reconfigure(newline="\n")  # the same bytes on Windows
    tokenizer = load_tokenizer(tokenizer_directory(*find_adapter(checkpoint, settings.adapter)))
    if settings.chat and tokenizer.chat_template is None:
        teach = f"python train.py --init-from {shlex.quote(str(checkpoint))} --data python-chat --learning-rate 1e-3"
        raise UserError(f"{checkpoint} has no chat template, so it only continues text; teach it to talk: {teach}")
    prompts = [] if settings.merge else read_prompts(settings)
    if settings.chat and prompts == [""]:
        raise UserError("there is no message to answer; give one after the run, or on standard input.")
    if not settings.merge:
        values = ", ".join(f"{name} {value:g}" for name, value in vars(settings.sampling).items())
        source = "the model's generation_config.json" if follow else "the defaults"
        log(f"sampling (the flags, else {source}): {values}")
    from generation import cli  # imports torch

    cli.run(settings, checkpoint, tokenizer, prompts)
