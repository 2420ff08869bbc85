"""Where prompts come from (flags, a file, standard input) and the token ids that they become. Imports no torch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from errors import UserError

if TYPE_CHECKING:  # its libraries would make `--help` wait
    from data.tokenizer import Tokenizer


def read_prompts(prompts: Sequence[str], prompt_file: Path | None) -> list[str]:
    """The prompts of the command line and the file, else standard input as one, else one empty prompt."""
    prompts = [*prompts, *(lines_of(prompt_file) if prompt_file is not None else ())]
    return prompts or [standard_input()]


def check_unicode(flag: str, text: str) -> None:
    """Raise `UserError` for bytes that were no UTF-8 on the command line: Python hands them on as half surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{flag} {text!r} is not UTF-8 text at character {error.start}; convert it, or put it in a UTF-8 file."
        ) from None


def lines_of(path: Path) -> list[str]:
    """The lines of a file that are not blank. Only line breaks end one: U+2028 and form feeds belong to a prompt."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error}"
        raise UserError(f"--prompt-file {path} cannot be read ({reason}); give a UTF-8 text file.") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise UserError(f"--prompt-file {path} holds no prompt; write one in each line.")
    return lines


def standard_input() -> str:
    """All of standard input, less the one line break that `echo` and editors add; empty where a person would type."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    # Said before the wait: a program started with an open pipe that nobody writes to would seem to hang.
    print("reading the prompt from standard input", file=sys.stderr, flush=True)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 ({error}); convert it, or use --prompt.") from None
    return text.removesuffix("\n").removesuffix("\r")


def prompt_ids(tokenizer: "Tokenizer", prompt: str) -> list[int]:
    """The ids of a prompt as the model met the start of a document in training: BOS first, if its tokenizer adds one.

    An empty prompt becomes BOS alone, or EOS for a tokenizer without: there the end of one text begins the next.
    """
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]
