"""From token ids, one at a time, to text that can be printed at once: whole characters, and never past a stop string.

The parts of a stream joined equal `tokenizer.decode` of all ids (up to the stop string). This is for tokenizers of the
LLaMA and Qwen families, where a token's text depends on its neighbours in two ways alone: a character may be spread
over several tokens as bytes, and the spaces in front of the whole text may be dropped.
"""

from collections.abc import Callable, Sequence

from data.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet


class Detokenizer:
    """Turns ids into text step by step, holding back a character until all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        # Once text has begun, the ids at hand are decoded behind this ordinary token: cheap, and their leading spaces
        # stay, as they would behind all the ids before them.
        self._anchor = tokenizer.encode("a")
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = 0  # characters of decode(context + pending) that are out

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._pending += ids
        text = self._decode(self._context + self._pending)
        # The bytes of an unfinished character are at most three, each shown as at most one replacement character.
        undecided = min(len(text) - len(text.rstrip(REPLACEMENT)), 3)
        end = max(self._shown, len(text) - undecided)
        new, self._shown = text[self._shown : end], end
        if not undecided and (self._context or text.strip()):
            self._context, self._pending = self._anchor, []
            self._shown = len(self._decode(self._anchor))
        return new

    def flush(self) -> str:
        """What was held back: the bytes of a character that never came to its end, as U+FFFD."""
        text = self._decode(self._context + self._pending)
        new, self._shown = text[self._shown :], len(text)
        return new


class StopStrings:
    """Lets text through up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        """The text that lies before any stop string for certain; sets `met` when one is complete."""
        if self.met:
            return ""
        text = self._held + text
        # The one that is complete first wins, and of several the longest: the same however the text was cut in pieces.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.met, self._held = True, ""
            return text[: min(found)[1]]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back and is no stop string after all."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """One text on its way out: writes the prompt, then each token's text as soon as it is certain."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], write: Callable[[str], object]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._write = write
        write(self._detokenizer.push(prompt))  # not searched for stop strings: only what the model adds is

    def push(self, token: int) -> bool:
        """Take the next token; True when the text has met a stop string and wants no more."""
        self._write(self._stops.push(self._detokenizer.push([token])))
        return self._stops.met

    def close(self) -> None:
        """Write what is held back; nothing after a stop string."""
        self._write(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
