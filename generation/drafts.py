"""Drafts from the text itself: what followed an earlier occurrence of its last tokens may follow them again.

A decoding step computes the logits after a new token and after drafted ones in one pass over the weights. Greedy
decoding uses those that follow a drafted token only if it takes this token itself, so the text does not change
(Leviathan et al. 2023, arXiv 2211.17192, at temperature 0). No second model is needed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from generation.cpu_step import CpuDecodeStep

MAX_DRAFT = 16  # tokens
NGRAMS = (2, 4)  # how many last tokens are looked up; if both occurred before, the longer one counts


class DraftedStep:
    """Decodes one sequence token by token, and calls a `CpuDecodeStep` only for logits that are not computed yet."""

    def __init__(self, step: "CpuDecodeStep", prompt: Sequence[int]):
        self.step, self.cache = step, step.cache
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}  # for the n-grams of the text: where the last one ends
        self.end = 0  # where the last tokens of the text occurred before: the end of them, else that of the text
        self.draft: list[int] = []  # tokens that are computed, but not in the text yet
        self.logits = torch.empty(0)  # (1, 1 + len(draft), V) after the last token and after the drafted ones
        self.accepted = 0  # tokens of the last draft that are in the text
        self.limit = 0  # tokens of the next draft
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token to the text, and look up where its last tokens occurred before."""
        if self.text[self.end : self.end + 1] == [token]:
            self.limit = max(self.limit, 1)  # a draft would have been right
        self.text.append(token)
        self.end = len(self.text)
        for n in NGRAMS:
            ngram = tuple(self.text[-n:])
            self.end = self.ends.get(ngram, self.end)
            self.ends[ngram] = len(self.text)

    def __call__(self, tokens: Tensor, padding: None) -> Tensor:
        """Append a token (1, 1) int64 to the cache and return float32 logits (1, 1, V)."""
        [[token]] = tokens.tolist()
        is_drafted = self.draft[:1] == [token]
        if not is_drafted and (self.draft or self.accepted):
            # The next draft is as long as the last one was right, or twice as long if all of it was.
            self.limit = min(self.accepted if self.draft else 2 * self.accepted, MAX_DRAFT)
        if self.cache.length == len(self.text):  # else it is the last token of the prompt
            self.append(token)
        if is_drafted:
            del self.draft[0]
            self.accepted += 1
            self.cache.length += 1
            self.logits = self.logits[:, 1:]
        else:
            count = min(self.limit, self.cache.max_length - self.cache.length - 1)
            followed = self.text[self.end : self.end + count]
            self.draft = (followed * count)[:count]  # if the text ends there, it is assumed to repeat this part
            self.accepted = 0
            self.logits = self.step(torch.tensor([[token, *self.draft]]), padding)
            self.cache.length -= len(self.draft)
        return self.logits[:, :1]
