"""How a checkpoint writes a conversation as token ids: its chat template, its special tokens, and what ends an answer.

Special tokens are tokens where the template writes them, and plain text where a person or the model does: nobody can
end a turn or forge another one by typing `<|im_end|>`.
"""

import functools
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.tokenizer import Tokenizer
from errors import UserError

Message = dict[str, Any]
# A random number that no text contains. Digits, because templates may change letters (`upper`), but not digits.
BREAK = str(10**20 + secrets.randbelow(10**20))


def break_tokens(text: str, tokens: Iterable[str]) -> str:
    """Insert a mark into each of the tokens that the text contains, so that they are plain text to the tokenizer.

    The mark follows a token's first character. Tokens of one character cannot be broken and are left as they are.
    """
    patterns = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return re.sub("|".join(patterns), lambda match: match[0] + BREAK, text) if patterns else text


class ChatFormat:
    """A checkpoint's chat template with its tokenizer, and a system prompt that precedes every conversation.

    Raises `UserError` for a checkpoint without a template, and for one that fails or refuses the system prompt.
    """

    def __init__(self, checkpoint: Path, tokenizer: Tokenizer, system: str | None = None):
        template = tokenizer.chat_template
        if template is None:
            raise UserError(
                f"{checkpoint} has no chat template, so the model only continues text: use --interactive or --prompt "
                f"without --chat, or a model trained for conversations (often named Instruct or Chat)."
            )
        self._template, self.tokenizer = template, tokenizer
        added = tokenizer.added_tokens
        # Some models have turn markers that are not marked as special. Runs of spaces are tokens, too, and no markers.
        in_template = {i for i, token in added.items() if token.content.strip() and token.content in template}
        self._special = {i for i, token in added.items() if token.special}
        self._control = self._special | in_template
        self._system = [] if system is None else [{"role": "system", "content": system}]

        answer = "It is fine."
        example = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
        text = self.render(example, answer_follows=False)
        end = tokenizer.encode_special(text.rpartition(answer)[2].lstrip(), BREAK)
        self.end_of_turn = end[0] if end and end[0] in self._control else None
        """The token that the template writes after an answer. Not every model lists it as EOS."""

    def render(self, messages: Sequence[Message], *, answer_follows: bool = True) -> str:
        """The conversation as text, in which `break_tokens` has broken the special tokens of the messages.

        The model's own text may contain tokens that are not special, such as </think>; those stay tokens.
        """
        broken = []
        for message in (*self._system, *messages):
            ids = self._special if message["role"] == "assistant" else self._control
            contents = [self.tokenizer.added_tokens[i].content for i in sorted(ids)]
            broken.append({**message, "content": break_tokens(message["content"], contents)})
        try:
            return render_template(self._template, broken, self.tokenizer.special_tokens, answer_follows)
        except Exception as error:  # whatever the template raises
            raise UserError(
                f"the model's chat template does not support this conversation ({type(error).__name__}: {error}); "
                f"leave out --system, or use another version of the model."
            ) from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the conversation, up to where the model's answer begins."""
        return self.tokenizer.encode_special(self.render(messages), BREAK)


def render_template(source: str, messages: Sequence[Message], variables: dict, add_generation_prompt: bool) -> str:
    """The conversation as text. `variables` are more names for the template, such as bos_token."""
    arguments = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    return compile_template(source).render(messages=messages, **arguments)


@functools.cache
def compile_template(source: str) -> jinja2.Template:
    """A chat template in Jinja's sandbox, with the settings and functions that transformers gives to it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    # `{% generation %}` marks the model's own text for training. It is a block with a scope of its own.
    return environment.from_string(re.sub(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})", r"\1with", source))


def to_json(value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    """JSON as it is. Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    """`raise_exception` of templates: it does not support this conversation."""
    raise jinja2.TemplateError(message)
