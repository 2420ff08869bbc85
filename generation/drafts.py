"""Drafts from the text itself: what followed an earlier occurrence of its last tokens may follow them again.

A decoding step computes the logits after a new token and after drafted ones in one pass over the weights. Greedy
decoding uses those that follow a drafted token only if it takes this token itself, so the text does not change
(Leviathan et al. 2023, arXiv 2211.17192, at temperature 0). No second model is needed.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model.cache import KeyValueCache

MAX_DRAFT = 16  # tokens
NGRAMS = (2, 4)  # how many last tokens are looked up; if both occurred before, the longer one counts


class DraftedStep:
    """Decodes one sequence token by token, and calls a `CpuDecodeStep` only for logits that are not computed yet."""

    def __init__(self, step: Callable[[Tensor, None], Tensor], cache: KeyValueCache, prompt: Sequence[int]):
        self.step, self.cache = step, cache
        self.text: list[int] = []
        self.last_ends: dict[tuple[int, ...], int] = {}  # for the n-grams of the text: where the last one ends
        self.match_end = 0  # where the last tokens of the text ended before; the length of the text if nowhere
        self.draft: list[int] = []
        self.accepted = 0  # tokens of the draft that are in the text
        self.logits = torch.empty(0)  # (1, 1 + len(draft), V) after the token before the draft, and after each of it
        self.draft_length = 1  # of the next draft
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token to the text, and look up where its last tokens ended before."""
        self.text.append(token)
        self.match_end = len(self.text)
        for n in NGRAMS:
            ngram = tuple(self.text[-n:])
            self.match_end = self.last_ends.get(ngram, self.match_end)
            self.last_ends[ngram] = len(self.text)

    def continuation(self, length: int) -> list[int]:
        """What followed the last tokens before. If the text ends there, it is assumed to repeat this part."""
        followed = self.text[self.match_end : self.match_end + length]
        return list(itertools.islice(itertools.cycle(followed), length))

    def choose_length(self, token: int) -> None:
        """Choose the length of the next draft, as the text continues with a token that is not drafted."""
        if self.accepted < len(self.draft):
            self.draft_length = self.accepted
        elif self.draft:
            self.draft_length = min(2 * self.accepted, MAX_DRAFT)
        elif self.continuation(1) == [token]:
            self.draft_length = 1  # a draft would have been right

    def __call__(self, tokens: Tensor, padding: None) -> Tensor:
        """Append a token (1, 1) int64 to the cache and return float32 logits (1, 1, V)."""
        [[token]] = tokens.tolist()
        is_drafted = self.accepted < len(self.draft) and self.draft[self.accepted] == token
        if not is_drafted:
            self.choose_length(token)
        if self.cache.length == len(self.text):  # else it is the last token of the prompt
            self.append(token)
        if is_drafted:
            self.accepted += 1
            self.cache.length += 1
        else:
            self.draft = self.continuation(min(self.draft_length, self.cache.max_length - self.cache.length - 1))
            self.accepted = 0
            self.logits = self.step(torch.tensor([[token, *self.draft]]), padding)
            self.cache.length -= len(self.draft)
        return self.logits[:, self.accepted : self.accepted + 1]
