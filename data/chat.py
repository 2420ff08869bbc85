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
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.tokenizer import Tokenizer
from errors import UserError

Message = dict[str, Any]
# Random numbers that no text contains. Digits, because templates may change letters (`upper`), but not digits.
BREAK, BORDER = (str(10**20 + secrets.randbelow(10**20)) for _ in range(2))


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

    def __init__(self, tokenizer: Tokenizer, system: str | None = None):
        template = tokenizer.chat_template
        if template is None:
            raise UserError(
                f"{tokenizer.folder} has no chat template, so the model only continues text: use an Instruct or Chat "
                f"model, fine-tune it on conversations, or put a chat_template.jinja in its folder."
            )
        self._template, self.tokenizer = template, tokenizer
        added = {i: token.content for i, token in tokenizer.added_tokens.items()}
        self._special = {added[i] for i, token in tokenizer.added_tokens.items() if token.special}
        # Some models have turn markers that are not marked as special. Runs of spaces are tokens, too, and no markers.
        self._control = self._special | {token for token in added.values() if token.strip() and token in template}
        self._system = [] if system is None else [{"role": "system", "content": system}]

        answer = "It is fine."
        example = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
        text = "".join(self.render(example, answer_follows=False))
        ends = tokenizer.encode_special(text.rpartition(answer)[2].lstrip(), BREAK).ids[:1]
        self.end_of_turn = next((i for i in ends if added.get(i) in self._control), None)
        """The token that the template writes after an answer. Not every model lists it as EOS."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the conversation, up to where the model's answer begins."""
        return self.tokenizer.encode_special("".join(self.render(messages)), BREAK).ids

    def encode_learned(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The ids of the complete conversation; which of them the model learns, bool; the messages it cannot learn.

        It learns what is inside `{% generation %}` blocks. In a template without them, an answer is what rendering adds
        when the answer follows the generation prompt. If the template changes earlier text when the conversation
        continues (as Qwen3's does), that answer cannot be learned.
        """
        parts, unknown = self.render(messages, answer_follows=False), []
        text, ends = "".join(parts), [*itertools.accumulate(map(len, parts))]
        spans = [*zip(ends[::2], ends[1::2], strict=False)]  # of the characters that are learned
        if "endgeneration" not in self._template:
            for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
                [before], [after] = self.render(messages[:i]), self.render(messages[: i + 1], answer_follows=False)
                if text.startswith(after) and after.startswith(before):
                    spans.append((len(before), len(after)))
                else:
                    unknown.append(i + 1)
        encoding = self.tokenizer.encode_special(text, BREAK)
        begins, ends = np.array(encoding.offsets).reshape(-1, 2).T
        learned = np.zeros(len(begins), bool)
        for start, end in spans:
            learned |= (ends > start) & (begins < end)
        return np.array(encoding.ids), learned, unknown

    def render(self, messages: Sequence[Message], *, answer_follows: bool = True) -> list[str]:
        """The text of the conversation in parts; every second part is inside a `{% generation %}` block.

        `break_tokens` has broken the special tokens of the messages. The model's own text may contain tokens that are
        not special, such as </think>; those stay tokens.
        """
        broken = []
        for message in (*self._system, *messages):
            tokens = self._special if message["role"] == "assistant" else self._control
            broken.append({**message, "content": break_tokens(message["content"], tokens)})
        try:
            template, given = compile_template(self._template), self.tokenizer.special_tokens
            return template.render(messages=broken, add_generation_prompt=answer_follows, **given).split(BORDER)
        except Exception as error:  # whatever the template raises
            raise UserError(
                f"the model's chat template does not support this conversation ({type(error).__name__}: {error}); "
                f"leave out --system, or use another version of the model."
            ) from error


@functools.cache
def compile_template(source: str) -> jinja2.Template:
    """A chat template in Jinja's sandbox, with the settings and functions that transformers gives to it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    environment.filters["learned"] = lambda text: BORDER + text + BORDER
    environment.globals.update(tools=None, documents=None, raise_exception=refuse)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # `{% generation %}` marks the model's own text for training.
    source = re.sub(r"(\{%[-+]?\s*)generation\b", r"\1filter learned", source)
    return environment.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration\b", r"\1endfilter", source))


def refuse(message: str) -> None:
    """`raise_exception` of templates: it does not support this conversation."""
    raise jinja2.TemplateError(message)
