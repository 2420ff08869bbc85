"""Turns token ids, one at a time, into text. It returns only complete characters, and no text from a stop string on.

The texts joined equal `tokenizer.decode` of all ids, for tokenizers like LLaMA's and Qwen's: there, a character's bytes
may be spread over several tokens, and spaces at the very start of the text may be dropped.
"""

import contextlib
from collections.abc import Generator, Sequence

from data.tokenizer import Tokenizer
from generation.generate import FinishReason, NewToken

REPLACEMENT = "\ufffd"  # what decoders return for bytes that are not, or not yet, a character


class TextStream:
    """The text of one sequence, returned as soon as it is certain, up to the first stop string after the prompt."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self._decode = tokenizer.decode
        # Once the text has begun, new ids are decoded behind this token alone: that keeps their leading spaces.
        self._anchor = tokenizer.encode("a")
        self._context: list[int] = []
        self._pending: list[int] = []
        self._returned = 0  # characters of decode(context + pending) that have been returned
        self._stop = stop
        self._held = ""  # what may be the beginning of a stop string
        self.end: FinishReason | None = None  # why it has ended
        self.text = self._completed(prompt)  # all so far; that of the prompt is not searched for stop strings

    def push(self, token: int) -> str:
        """The text that the next token completes, as far as it is certain to be before any stop string."""
        new = self._before_stop(self._completed([token]))
        self.text += new
        return new

    def finish(self) -> str:
        """The text held back so far: what is no stop string, and the bytes of an incomplete character as U+FFFD."""
        new = self._before_stop(self._decode(self._context + self._pending)[self._returned :]) + self._held
        self.text += new
        self._held = ""
        return new

    def _completed(self, ids: Sequence[int]) -> str:
        """The characters that these ids complete."""
        self._pending += ids
        text = self._decode(self._context + self._pending)
        # An unfinished character has at most three bytes, each decoded to at most one replacement character.
        incomplete = min(len(text) - len(text.rstrip(REPLACEMENT)), 3)
        end = max(self._returned, len(text) - incomplete)
        new, self._returned = text[self._returned : end], end
        if not incomplete and (self._context or text.strip()):
            self._context, self._pending = self._anchor, []
            self._returned = len(self._decode(self._anchor))
        return new

    def _before_stop(self, text: str) -> str:
        """Pass text on up to the first stop string; hold back an end that may be the beginning of one."""
        if self.end == "stop":
            return ""
        text = self._held + text
        # The first stop string to be complete ends the text; of several that end together, the longest. So the result
        # does not depend on how the text is split into tokens.
        matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if matches:
            self.end = "stop"
            self._held = ""
            return text[: min(matches)[1]]
        begins = (start for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in self._stop))
        end = next(begins, len(text))
        self._held = text[end:]
        return text[:end]


def stream_texts(tokens: Generator[NewToken], streams: Sequence[TextStream]) -> Generator[NewToken]:
    """The tokens of `generate` with the texts of their sequences' streams; a stop string ends a sequence, too."""
    with contextlib.closing(tokens):
        for token in tokens:
            stream = streams[token.sequence]
            if stream.end is not None:
                continue
            text = "" if token.end == "eos" else stream.push(token.id)
            stream.end = stream.end or token.end
            if stream.end is not None:
                text += stream.finish()
            yield token._replace(text=text, end=stream.end)
            if all(stream.end is not None for stream in streams):
                return
