"""Generate text with a trained model: `python generate.py RUN "hello"`. See `python generate.py --help`."""

import shlex
import sys

from errors import UserError, exit_on_user_error, log


def main() -> None:
    """Parse the command line, open the tokenizer, read the prompts; then import torch, which is slow, and generate."""
    # Imported here, so that Ctrl-C at any time ends in one line.
    import dataclasses

    from checkpoints.find import find_checkpoint, find_files, newest_run
    from data.chat import ChatFormat
    from data.tokenizer import load_tokenizer
    from flags import parse_flags
    from generation.settings import Settings, read_prompts, recommended_sampling

    settings = parse_flags(Settings, prog="generate.py")
    try:
        checkpoint = find_checkpoint(newest_run() if settings.run is None else settings.run)
    except UserError as error:
        if settings.text or settings.run is None:
            raise
        text = shlex.quote(settings.run)
        raise UserError(f"{error} If it is a text, a run stands before it: python generate.py RUN {text}") from None
    if settings.merge is not None:
        from generation.load import merge  # imports torch

        merge(checkpoint, settings.adapter, settings.merge)
        chat = " --chat" if load_tokenizer(settings.merge).chat_template is not None else ""
        log(f"written: {settings.merge}; try it: python generate.py {shlex.quote(str(settings.merge))}{chat}")
        return
    prompts = read_prompts(settings)
    has_messages = [isinstance(prompt, list) for prompt in prompts or ()]
    chat = settings.chat or any(has_messages)
    if chat and not settings.chat and not all(has_messages):
        fix = "give --chat, which answers prompts too, or two files"
        raise UserError(f"some lines have messages, others a prompt; {fix}.")
    recommended = recommended_sampling(checkpoint, settings.adapter, chat)
    source = "the defaults"
    if recommended is not None:
        settings = parse_flags(Settings, prog="generate.py", default=Settings(sampling=recommended))
        source = "the model's generation_config.json"
    settings = dataclasses.replace(settings, chat=chat)
    sys.stdout.reconfigure(newline="\n")  # the same bytes on Windows
    tokenizer = load_tokenizer(find_files(checkpoint, settings.adapter).tokenizer)
    if chat:
        ChatFormat(tokenizer)  # an error before torch is imported
        if prompts == [""]:
            raise UserError("there is no message to answer; give one after the run, or on standard input.")
    elif tokenizer.chat_template is not None:
        log("this model has a chat template: with --chat it answers, without it continues a text")
    values = ", ".join(f"{name} {value:g}" for name, value in vars(settings.sampling).items())
    log(f"sampling (the flags, else {source}): {values}")
    from generation import cli  # imports torch

    cli.run(settings, checkpoint, tokenizer, prompts)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
