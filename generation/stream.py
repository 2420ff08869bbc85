"""Token ids in one at a time, printable text out: never part of a character, and nothing from a stop string on.

The texts of a stream joined equal `tokenizer.decode` of all ids (up to the stop string). This holds for tokenizers of
the LLaMA and Qwen families. There, a token's text depends on its neighbours in two ways only: a character's bytes may
be spread over several tokens, and spaces at the very start of the text may be dropped.
"""

from collections.abc import Sequence

from data.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders return for bytes that are not, or not yet, a character


class Detokenizer:
    """Decodes ids incrementally; holds back a character until all its bytes have arrived."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        # Once the text has begun, new ids are decoded behind this ordinary token instead of behind all earlier ids:
        # cheap, and their leading spaces are kept all the same.
        self._anchor = tokenizer.encode("a")
        self._context: list[int] = []
        self._pending: list[int] = []
        self._returned = 0  # characters of decode(context + pending) that have been returned

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
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

    def flush(self) -> str:
        """The text held back so far: bytes of a character that was never completed, as U+FFFD."""
        text = self._decode(self._context + self._pending)
        new, self._returned = text[self._returned :], len(text)
        return new


class StopStrings:
    """Passes text on up to the first stop string; holds back an end that may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain to be before any stop string; sets `found` once one is complete."""
        if self.found:
            return ""
        text = self._held + text
        # The stop string that is complete first wins, the longest if there are several: the same however text is split.
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, ""
            return text[: min(matches)[1]]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back so far, which turned out not to be a stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """The text of one sequence, returned as soon as it is certain, up to the first stop string after the prompt."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_strings = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop_strings.found

    def push_prompt(self, ids: Sequence[int]) -> str:
        """The prompt's text. It is not searched for stop strings."""
        return self._detokenizer.push(ids)

    def push(self, token: int) -> str:
        """The text that the next token completes."""
        return self._stop_strings.push(self._detokenizer.push([token]))

    def flush(self) -> str:
        """The text held back so far, empty after a stop string."""
        return self._stop_strings.push(self._detokenizer.flush()) + self._stop_strings.flush()
