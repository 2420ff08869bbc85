"""Reads prompts (flags, a file, standard input) and encodes them to token ids. Imports no torch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from errors import UserError

if TYPE_CHECKING:  # importing the tokenizer libraries would slow down `--help`
    from data.tokenizer import Tokenizer

MAX_FILE = 2**24  # bytes of a file of prompts
MAX_CHARACTERS = 2**21  # of one prompt; tokenizing takes some 220 bytes of memory for each


def read_prompts(prompts: Sequence[str], prompt_file: Path | None) -> list[str]:
    """The prompts of the command line, then those of the file. Without any: standard input as one prompt."""
    prompts = [*prompts, *(read_prompt_file(prompt_file) if prompt_file is not None else ())]
    prompts = prompts or [read_standard_input()]
    for prompt in prompts:
        check_length("a prompt", prompt)
    return prompts


def check_length(name: str, text: str) -> None:
    """Raise `UserError` for a text that would take gigabytes to tokenize, and that no model here reads."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{name} has {len(text):,} characters, and at most {MAX_CHARACTERS:,} are read; shorten it.")


def check_unicode(flag: str, text: str) -> None:
    """Raise `UserError` if the flag's bytes were not UTF-8: Python replaces such bytes by lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{flag} {text!r} is not UTF-8 text at character {error.start}; convert it, or put it in a UTF-8 file."
        ) from None


def read_prompt_file(path: Path) -> list[str]:
    """The lines of a file that are not blank. Only \\n ends a line: U+2028 and form feeds are part of a prompt."""
    try:
        with path.open("rb") as file:  # perhaps a pipe of the shell
            text = read_text(file, f"--prompt-file {path}").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"--prompt-file {path} cannot be read ({error.strerror}); give a UTF-8 text file.") from None
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise UserError(f"--prompt-file {path} contains no prompt; write one prompt per line.")
    return lines


def read_standard_input() -> str:
    """All of standard input, minus the one line break that `echo` and editors append. Empty if it is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        hint = "give one with --prompt TEXT, type several with --interactive, or talk with a chat model with --chat"
        print(f"no prompt: the model starts a text of its own; {hint}", file=sys.stderr, flush=True)
        return ""
    # Printed first: if standard input is a pipe that nobody writes to, the program would seem to hang.
    print("reading the prompt from standard input", file=sys.stderr, flush=True)
    try:
        return read_text(sys.stdin.buffer, "standard input").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UserError(f"standard input cannot be read ({error.strerror}); use --prompt.") from None


def read_text(file: BinaryIO, name: str) -> str:
    """The text of an open file, perhaps a device that never ends; `UserError` unless it is UTF-8 and short enough."""
    content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise UserError(f"{name} is longer than {MAX_FILE >> 20} MiB; give a shorter text.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error}); convert it to UTF-8.") from None


def encode_prompt(tokenizer: "Tokenizer", prompt: str) -> list[int]:
    """The prompt's token ids, starting as documents start in training: with BOS, if the tokenizer has one.

    An empty prompt becomes BOS alone, or EOS for a tokenizer without BOS: there, the EOS of one document is what
    precedes the next. A space at the end has no id: see `first_tokens`.
    """
    ids = tokenizer.encode(prompt[:-1] if first_tokens(tokenizer, prompt) else prompt)
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def first_tokens(tokenizer: "Tokenizer", prompt: str) -> list[int] | None:
    """The token ids that may follow a prompt: those that begin with a space if the prompt ends with one, else all.

    A word's token begins with the space before it, so in training text a lone space rarely precedes a word.
    """
    return tokenizer.tokens_with_space if prompt.endswith(" ") else None


def check_prompts(prompts: Sequence[Sequence[int]], context: int) -> None:
    """Raise `UserError` for a prompt that leaves no position of the model's context for a new token."""
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) >= context:
            name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise UserError(
                f"{name} has {len(prompt)} tokens, but the model's context is {context} tokens for prompt and "
                f"continuation together; shorten it to at most {context - 1} tokens."
            )
