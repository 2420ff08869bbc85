"""Reads prompts and encodes them to token ids. Imports no torch."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from errors import UserError, reading
from generation.settings import Settings

if TYPE_CHECKING:  # importing the tokenizer libraries would slow down `--help`
    from data.tokenizer import Tokenizer


def read_prompts(settings: Settings) -> list[str]:
    """The prompts of the command line, else standard input as one; none for a conversation in a terminal."""
    prompts = [*settings.prompt] if settings.text is None else [settings.text, *settings.prompt]
    if settings.jsonl and not prompts:
        with reading("standard input", 'give a JSON text, or an object with "prompt", in each line'):
            rows = [json.loads(line) for line in sys.stdin.buffer if line.strip()]
            return [(row if isinstance(row, str) else row["prompt"]).encode().decode() for row in rows]
    in_conversation = settings.chat and sys.stdin.isatty()
    return prompts if prompts or in_conversation else [read_standard_input()]


def read_standard_input() -> str:
    """All of standard input, minus the one line break that `echo` and editors append. Empty if it is a terminal."""
    if sys.stdin.isatty():
        hint = "give one after the run, or talk with a chat model with --chat"
        print(f"no prompt: the model starts a text of its own; {hint}", file=sys.stderr, flush=True)
        return ""
    # Printed first: if standard input is a pipe that nobody writes to, the program would seem to hang.
    print("reading the prompt from standard input", file=sys.stderr, flush=True)
    with reading("standard input", "convert it to UTF-8"):
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")


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
