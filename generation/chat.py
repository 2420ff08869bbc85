"""How a checkpoint writes a conversation as token ids: its chat template, its special tokens, and what ends an answer.

Special tokens are tokens where the template writes them, and plain text where a person or the model does: nobody can
end a turn or forge another one by typing `<|im_end|>`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from data.chat_template import read_template
from data.tokenizer import JsonTokenizer, break_tokens
from errors import UserError, read_json
from generation.prompts import check_length
from generation.template import Message, render

# The names under which templates find special tokens.
SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class ChatFormat:
    """A checkpoint's chat template with its tokenizer, and a system prompt that precedes every conversation.

    Raises `UserError` for a checkpoint without either, and for a template that fails or refuses the system prompt.
    """

    def __init__(self, checkpoint: Path, system: str | None = None):
        template = read_template(checkpoint)
        if template is None:
            raise UserError(
                f"{checkpoint} has no chat template, so the model only continues text: use --interactive or --prompt "
                f"without --chat, or a model trained for conversations (often named Instruct or Chat)."
            )
        self._template = template
        if not (checkpoint / "tokenizer.json").is_file():
            raise UserError(f"{checkpoint} has no tokenizer.json, which --chat needs; download or convert it.")
        self.tokenizer = JsonTokenizer(checkpoint / "tokenizer.json")
        self._variables = special_tokens(checkpoint)
        added = self.tokenizer.added_tokens
        # Some models have turn markers that are not marked as special. Runs of spaces are tokens, too, and no markers.
        in_template = {i for i, token in added.items() if token.content.strip() and token.content in self._template}
        self._special = {i for i, token in added.items() if token.special}
        self._control = self._special | in_template
        self._system = [] if system is None else [{"role": "system", "content": system}]

        answer = "It is fine."
        example = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
        text = self.render(example, answer_follows=False)
        self.leaves_system_out = system is not None and self._break_control(system).strip() not in text
        """Whether the template ignores the system prompt."""
        end = self.tokenizer.encode_special(text.rpartition(answer)[2].lstrip())
        self.end_of_turn = end[0] if end and end[0] in self._control else None
        """The token that the template writes after an answer. Not every model lists it as EOS."""

    def render(self, messages: Sequence[Message], *, answer_follows: bool = True) -> str:
        """The conversation as text, in which `break_tokens` has broken the special tokens of the messages.

        The model's own text may contain tokens that are not special, such as </think>; those stay tokens.
        """
        broken = []
        for message in (*self._system, *messages):
            content, by_model = message["content"], message["role"] == "assistant"
            broken.append({**message, "content": self._break_control(content, self._special if by_model else None)})
        text = render(self._template, broken, self._variables, answer_follows)
        if re.search("[\ud800-\udfff]", text):
            raise UserError("the chat template writes half of a character (a lone surrogate); get another template.")
        check_length("the conversation, as the chat template writes it,", text)
        return text

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the conversation, up to where the model's answer begins."""
        ids = self.tokenizer.encode_special(self.render(messages))
        if not ids:
            raise UserError("the model's chat template writes nothing for this conversation; get another template.")
        return ids

    def _break_control(self, text: str, ids: set[int] | None = None) -> str:
        """The text with the tokens of these ids broken, by default all that can structure a conversation."""
        added = self.tokenizer.added_tokens
        return break_tokens(text, [added[i].content for i in sorted(self._control if ids is None else ids)])


def special_tokens(checkpoint: Path) -> dict[str, str]:
    """The texts of the special tokens under the names by which templates call them."""
    fields = read_json(checkpoint / "special_tokens_map.json") | read_json(checkpoint / "tokenizer_config.json")
    found = {name: fields.get(name) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
