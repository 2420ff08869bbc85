"""The loss on a whole validation set, over every token: in nats per token, as perplexity and in bits per byte."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from data.batches import IGNORED, Batch
from model.decoder import Decoder
from training.processes import ALONE, Processes


@dataclass(frozen=True)
class Evaluation:
    """The loss summed over a text, and the means that follow from it."""

    nats: float  # negative log-likelihood of the whole text
    tokens: int  # predicted, including those that begin and end documents
    text_bytes: int | None  # bytes of UTF-8; None for conversations, of which only answers are predicted

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text: unlike the others, it compares models with different tokenizers."""
        return None if self.text_bytes is None else self.nats / math.log(2) / self.text_bytes

    def __str__(self) -> str:
        perplexity = f"perplexity {self.perplexity:.2f}"
        if self.text_bytes is None:
            return f"{self.loss:.4f} nats per answer token, {perplexity} ({self.tokens:,} tokens)"
        sizes = f"{self.tokens:,} tokens, {self.text_bytes:,} bytes"
        return f"{self.loss:.4f} nats per token, {perplexity}, {self.bits_per_byte:.4f} bits per byte ({sizes})"


@torch.no_grad()
def evaluate(
    model: Decoder, windows: Iterable[Batch], text_bytes: int | None, device: torch.device, processes: Processes = ALONE
) -> Evaluation:
    """Sum the loss over `windows`, batches of int64 (B, T); the processes share the windows out."""
    nats, tokens = 0.0, 0
    windows = iter(windows)
    model.eval()  # matters to BatchNorm, the one norm that keeps running statistics
    while turn := list(itertools.islice(windows, processes.count)):
        # A process without a window in the last turn drops its result: a sharded forward pass needs all processes.
        batch = turn[min(processes.rank, len(turn) - 1)]
        loss = model(*(torch.from_numpy(array).to(device) for array in batch if array is not None))
        if processes.rank < len(turn):
            nats += loss.sum().item()
            tokens += int((batch.targets != IGNORED).sum())
    model.train()
    return Evaluation(processes.sum(nats), int(processes.sum(tokens)), text_bytes)
