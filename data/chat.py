"""How a checkpoint writes a conversation as token ids: its chat template, its special tokens, and what ends an answer.

Special tokens are tokens where the template writes them, and plain text where a person or the model does: nobody can
end a turn or forge another one by typing `<|im_end|>`.
"""

import functools
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding

from data.tokenizer import Tokenizer
from errors import UserError

Message = dict[str, Any]
# Random numbers that no text contains. Digits, because templates may change letters (`upper`), but not digits.
BREAK, BORDER = (str(10**20 + secrets.randbelow(10**20)) for _ in range(2))
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


def break_tokens(text: str, tokens: Iterable[str]) -> str:
    """Insert a mark into each of the tokens that the text contains, so that they are plain text to the tokenizer.

    The mark follows a token's first character. Tokens of one character cannot be broken and are left as they are.
    """
    patterns = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return re.sub("|".join(patterns), lambda match: match[0] + BREAK, text) if patterns else text


def learned_tokens(encoding: Encoding, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Whether each token has a character of the spans, bool (tokens,)."""
    begins, ends = np.array(encoding.offsets).reshape(-1, 2).T
    return np.any([(ends > start) & (begins < end) for start, end in spans] or [begins < 0], axis=0)


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
        return "".join(self._render_parts(messages, answer_follows))

    def render_learned(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]], list[int]]:
        """The conversation as `render` gives it, the spans of its characters that the model learns to write, and the
        numbers of answers whose span is unknown.

        The spans are the blocks `{% generation %}` of the template. Without them, an answer is what the template adds
        to the messages before it and the beginning of an answer. Its span is unknown if the template writes these
        otherwise where the conversation continues.
        """
        parts = self._render_parts(messages, answer_follows=False)
        if GENERATION.search(self._template):
            ends = [*itertools.accumulate(map(len, parts))]
            return "".join(parts), [*zip(ends[::2], ends[1::2], strict=False)], []
        text, spans, unknown = "".join(parts), [], []
        for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            before, after = self.render(messages[:i]), self.render(messages[: i + 1], answer_follows=False)
            if text.startswith(after) and after.startswith(before):
                spans.append((len(before), len(after)))
            else:
                unknown.append(i + 1)
        return text, spans, unknown

    def _render_parts(self, messages: Sequence[Message], answer_follows: bool) -> list[str]:
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


def render_template(
    source: str, messages: Sequence[Message], variables: dict, add_generation_prompt: bool
) -> list[str]:
    """The conversation as parts of a text; every second one is the content of a block `{% generation %}`.

    `variables` are more names for the template, such as bos_token.
    """
    arguments = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    return compile_template(source).render(messages=messages, **arguments).split(BORDER)


@functools.cache
def compile_template(source: str) -> jinja2.Template:
    """A chat template in Jinja's sandbox, with the settings and functions that transformers gives to it."""
    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, a block with a scope of its own around the model's own text. It writes `BORDER` around it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja names it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_between_borders"), [], [], body).set_lineno(line)

    def _between_borders(self, caller: jinja2.runtime.Macro) -> str:
        return BORDER + caller() + BORDER


def to_json(value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    """JSON as it is. Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    """`raise_exception` of templates: it does not support this conversation."""
    raise jinja2.TemplateError(message)
