"""How a checkpoint writes a conversation as token ids: its chat template, its special tokens, and what ends an answer.

Special tokens are tokens where the template writes them, and plain text where a person or the model does: nobody can
end a turn or forge another one by typing `<|end|>`. A question with it and its answer are rendered for training as

    <s><|user|>What is <#|end|>?<|end|><|assistant|>@A token.<|end|>@      # is `BREAK`, @ is `BORDER`

The typed <|end|> is no token, as # is removed after tokens were found. The model learns what is between two @.
"""

import functools
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.special_tokens import TURNS
from data.tokenizer import BREAK, Tokenizer
from errors import UserError, reading

Message = dict[str, Any]
BORDER = str(int(BREAK) + 1)  # around what `{% generation %}` marks; no text contains it either
# What shows how a template ends an answer.
EXAMPLE = ({"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is fine."})
# The template of tokenizers that are trained here, with their `TURNS`.
CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
ROLES = {"developer": "system", "human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")


def plain_messages(messages: Sequence[dict]) -> list[Message]:
    """Messages of a request or a row with role, content and other keys that have text; `UserError` for what is more."""
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a list, and not an empty one.")
    plain = []
    for number, message in enumerate(messages, 1):
        with reading(f"message {number}", "a message has a role, and its content is text or a list of text parts"):
            plain.append(plain_message(message))
    return plain


def plain_message(message: dict) -> Message:
    """One of `plain_messages`; `ValueError` for what is no text."""
    fields = {key: value for key, value in message.items() if value not in (None, [], {})}
    other_role, other_content = fields.pop("from", None), fields.pop("value", None)  # ShareGPT's names
    role, content = fields.pop("role", other_role), fields.pop("content", other_content)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError("a part of its content is no object with type and text")
    unsupported = [part["type"] for part in parts if part["type"] != "text"]
    unsupported += [key for key in ("tool_calls", "function_call") if key in fields]
    if unsupported:
        raise ValueError(f"{unsupported[0]} is not supported")
    texts = [part["text"] for part in parts]
    if not all(isinstance(text, str) for text in (role, *texts)):
        raise ValueError("its role or its content is not text")
    plain = {"role": ROLES.get(role, role), "content": "".join(texts)}
    plain |= {key: value for key, value in fields.items() if isinstance(value, str)}
    "".join(plain.values()).encode("utf-8")  # JSON can have half a surrogate pair as an escape
    return plain


def has_roles(tokenizer: Tokenizer) -> bool:
    """Whether it has the tokens for roles of tokenizers that are trained here."""
    return {*TURNS} <= {token.content for token in tokenizer.added_tokens.values()}


def add_chat_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with `CHAT_TEMPLATE` if it has tokens for roles and no template, as those trained here."""
    if tokenizer.chat_template is not None or not has_roles(tokenizer):
        return tokenizer
    # For other programs: special tokens are tokens where the template writes them, and <|end|> ends a text, too.
    config = tokenizer.config | {"chat_template": CHAT_TEMPLATE, "split_special_tokens": False}
    saved = tokenizer.fields("generation_config.json").items()  # its sampling is for texts, not for answers
    generation_config = {key: value for key, value in saved if key.endswith("token_id")}
    [end] = [i for i, token in tokenizer.added_tokens.items() if token.content == "<|end|>"]
    generation_config["eos_token_id"] = [tokenizer.eos_id, end]
    changed = {"tokenizer_config.json": config, "generation_config.json": generation_config}
    files = {name: json.dumps(fields, indent=2).encode() for name, fields in changed.items()}
    return Tokenizer(tokenizer.files | files, tokenizer.folder)


class ChatFormat:
    """A checkpoint's chat template with its tokenizer; `UserError` for one that fails or refuses the system prompt."""

    def __init__(self, tokenizer: Tokenizer, system: str | None = None):
        if tokenizer.chat_template is None:
            fix = "put the chat_template.jinja of its Instruct model into its folder, or use a model that chats"
            if has_roles(tokenizer):
                command = f"python train.py --init-from {shlex.quote(str(tokenizer.folder))} --learning-rate 1e-3"
                fix = f"teach it to talk: {command} --data chat.jsonl (one of yours; or, in English, python-chat)"
            raise UserError(f"{tokenizer.folder} has no chat template, so it only continues text; {fix}")
        self.tokenizer = tokenizer
        self._template = tokenizer.chat_template
        tokens = tokenizer.added_tokens.values()
        self._special = {token.content for token in tokens if token.special}
        # Some models have turn markers that are not marked as special. Runs of spaces are tokens, too, and no markers.
        markers = {token.content for token in tokens if token.content.strip() and token.content in self._template}
        self._control = self._special | markers
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.encode([EXAMPLE[0]])  # so that a template that fails, or leaves out the system prompt, does so now
        self.end_of_turn, self.ends = self._find_ends()

    def _find_ends(self) -> tuple[int | None, set[int]]:
        """The token that the template writes after an answer, None for plain text; and all tokens that end one. In
        <s><|user|>What is it?<|end|><|assistant|>It is fine.<|end|> the last <|end|>, and all special tokens, as
        small models may run on."""
        text = self.render(EXAMPLE, answer_follows=False)
        added = self.tokenizer.added_tokens
        special = {i for i in self.tokenizer.encode_special(text).ids if i in added and added[i].special}
        after_answer = text.rpartition(EXAMPLE[1]["content"])[2].lstrip()
        ids = self.tokenizer.encode_special(after_answer).ids
        if ids and ids[0] in added and added[ids[0]].content in self._control:
            return ids[0], special | {ids[0]}
        return None, special

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the conversation, up to where the model's answer begins."""
        messages = [*self._system, *plain_messages(messages)]
        self.hidden_keys(messages)  # which refuses messages whose content is hidden
        ids = self.tokenizer.encode_special(self.render(messages)).ids
        if not ids:
            raise UserError("the model's chat template writes nothing for these messages; give them a content.")
        return ids

    def encode_learned(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray, int]:
        """The ids of the conversation; which of them the model learns, bool; how many answers it cannot learn."""
        text = ""
        learned_spans = []  # begin and end of the characters that are learned
        for part, is_learned in self.render_parts(messages, answer_follows=False):
            if is_learned:
                learned_spans.append((len(text), len(text) + len(part)))
            text += part
        not_found = 0
        if "endgeneration" not in self._template:  # no `{% generation %}` blocks
            learned_spans, not_found = self._find_answers(messages, text)
        encoding = self.tokenizer.encode_special(text)
        token_starts, token_ends = np.array(encoding.offsets).reshape(-1, 2).T
        learned = np.zeros(len(token_starts), bool)
        for start, end in learned_spans:
            learned |= (token_ends > start) & (token_starts < end)
        return np.array(encoding.ids), learned, not_found

    def _find_answers(self, messages: Sequence[Message], text: str) -> tuple[list[tuple[int, int]], int]:
        """Begin and end of the answers in the text of a conversation; and how many are not found there, as a template
        (such as Qwen3's) changes them when the conversation continues."""
        marker = self.tokenizer.added_tokens.get(self.end_of_turn)  # None where turns end in plain text
        answer_spans, not_found = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            question = self.render(messages[:i], answer_follows=False)
            prompt = self.render(messages[:i])
            answered = self.render(messages[: i + 1], answer_follows=False)
            # The prompt may have an empty thought that is not in the answer: the answer begins where they differ.
            shared = os.path.commonprefix([prompt, answered])  # noqa: RUF071 - no paths
            if text.startswith(answered) and (shared == prompt or shared.startswith(question)):
                # It ends with the end-of-turn token, after which the template may write more, such as a line break.
                end = len(answered)
                if marker is not None and marker.content in answered[len(shared) :]:
                    end = answered.rindex(marker.content) + len(marker.content)
                answer_spans.append((len(shared), end))
            else:
                not_found += 1
        return answer_spans, not_found

    def hidden_keys(self, messages: Sequence[Message], *, answer_follows: bool = True) -> set[str]:
        """The keys whose text the template leaves out, "<think>" for a thought; `UserError` where it is a content."""
        # Each text is replaced by a number of its own; a number that is missing from the rendered text was left out.
        numbers = map(str, itertools.count(int(BORDER) + 1))
        numbered = []
        for message in messages:
            texts = {key: number_texts(text, numbers) for key, text in message.items() if key != "role"}
            numbered.append(message | texts)
        rendered = self.render(numbered, answer_follows=answer_follows)
        hidden = set()
        for place, message in enumerate(numbered, 1):
            thought, _, answer = message["content"].rpartition("</think>")
            for key, text in (message | {"content": answer, "<think>": thought}).items():
                if any(number not in rendered for number in re.findall("[0-9]{21}", text)):
                    hidden.add(key)
            if "content" in hidden:
                role = message["role"]
                raise UserError(f"the model's chat template leaves out message {place} ({role}); use another role.")
        return hidden

    def render(self, messages: Sequence[Message], *, answer_follows: bool = True) -> str:
        """The text of the conversation, with a `BREAK` in each token that a person or the model types."""
        return "".join(text for text, _ in self.render_parts(messages, answer_follows=answer_follows))

    def render_parts(self, messages: Sequence[Message], *, answer_follows: bool) -> list[tuple[str, bool]]:
        """The text in parts, each with whether it is inside a `{% generation %}` block: what the model learns."""
        broken = []
        for message in messages:  # in the model's own text, tokens that are not special, such as </think>, stay tokens
            tokens = self._special if message["role"] == "assistant" else self._control
            texts = {key: break_tokens(text, tokens) for key, text in message.items() if key != "role"}
            broken.append(message | texts)
        try:
            names = {"add_generation_prompt": answer_follows} | self.tokenizer.special_tokens
            text = compile_template(self._template).render(messages=broken, **names)
        except Exception as error:  # whatever the template raises
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"the model's chat template does not support this conversation ({reason}).") from error
        return [(part, i % 2 == 1) for i, part in enumerate(text.split(BORDER))]  # outside, inside, outside, ...


def number_texts(text: str, numbers: Iterator[str]) -> str:
    """Each text between <think> tags, if it is more than space, replaced by the next number."""
    parts = re.split("(</?think>)", text)  # every second one is a tag
    parts[::2] = [next(numbers) if part.strip() else part for part in parts[::2]]
    return "".join(parts)


def break_tokens(text: str, tokens: Iterable[str]) -> str:
    """Make tokens in the text plain text by a mark after their first character; one character cannot be broken."""
    patterns = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return re.sub("|".join(patterns), lambda match: match[0] + BREAK, text) if patterns else text


@functools.cache
def compile_template(source: str) -> jinja2.Template:
    """A chat template in Jinja's sandbox, with the settings and functions that transformers gives to it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    environment.filters["learned"] = lambda text: BORDER + text + BORDER
    environment.globals.update(tools=None, documents=None, raise_exception=raise_exception)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # `{% generation %}` marks the model's own text for training.
    source = re.sub(r"(\{%[-+]?\s*)generation\b", r"\1filter learned", source)
    return environment.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration\b", r"\1endfilter", source))


def raise_exception(message: str) -> None:
    """What templates call for a conversation that they do not support."""
    raise jinja2.TemplateError(message)
