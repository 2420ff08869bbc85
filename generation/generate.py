"""Token ids in, token ids out: one prefill of the left-padded prompts, then one decoding step per new token."""

import math
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from errors import UserError
from generation.sampling import sample, sequence_generator
from generation.settings import Sampling
from generation.steps import DecoderStep, decode_step
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.device import threads_for

NOT_FINITE = "the model's logits are not finite; its weights are damaged, or its activations overflow: try float32."
FinishReason = Literal["eos", "stop", "length", "context"]  # EOS, a stop string, max_new_tokens, or the context is full


class NewToken(NamedTuple):
    """What a decoding step adds to one sequence."""

    sequence: int  # place of its prompt
    id: int
    end: FinishReason | None  # why the sequence ends here; an EOS is not part of its text
    logits: Tensor  # (B, V) of all sequences, before any filter; valid until the next step
    text: str = ""  # what `stream_texts` returns with it


@dataclass
class PrefixCache:
    """Tokens of the last call of `generate`, in order, whose keys and values are in its cache.

    The next call computes only what is new, also after an interrupt. Give it to every call with a decoder, as
    their caches may be the same memory; a call with several prompts empties it.
    """

    tokens: list[int] = field(default_factory=list)
    cache: KeyValueCache | None = None

    def move_to(self, cache: KeyValueCache, prompt: Sequence[int]) -> int:
        """Keep in `cache`, which may be the last one, what the prompt begins with; returns the number of its tokens."""
        count = 0
        while count < min(len(self.tokens), len(prompt) - 1) and self.tokens[count] == prompt[count]:
            count += 1  # not the last token of the prompt: its logits are needed
        if count:
            cache.keep_prefix(self.cache, count)
        self.cache = cache
        self.tokens = self.tokens[:count]
        return count


class Sampler:
    """Draws the next token of each sequence, and keeps what that depends on beside the logits."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, generators: Sequence[torch.Generator],
        first_tokens: Sequence[Sequence[int] | None] | None, vocab_size: int,
    ):  # fmt: skip
        self.sampling, self.generators = sampling, generators
        device = generators[0].device
        self.allowed = None  # (B, V) bool: what may be the first token
        if any(first_tokens or ()):
            self.allowed = token_mask([row or range(vocab_size) for row in first_tokens], vocab_size, device)
        self.seen = None  # (B, V) bool: tokens of the text so far, for the penalty
        if sampling.repetition_penalty != 1:
            self.seen = token_mask(prompts, vocab_size, device)

    def draw(self, logits: Tensor) -> tuple[Tensor, list[int]]:
        """Tokens by logits (B, V), as (B, 1) int64 and as a list; `UserError` for logits that are not finite."""
        if self.allowed is not None:
            logits = logits.masked_fill(~self.allowed, -math.inf)
            self.allowed = None
        tokens = sample(logits, self.sampling, self.generators, self.seen)[:, None]
        ids = tokens[:, 0].tolist()  # the only wait for the device in a step
        if min(ids) < 0:
            raise UserError(NOT_FINITE)
        if self.seen is not None:
            self.seen.scatter_(1, tokens, True)
        return tokens, ids


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    sample_numbers: Sequence[int] | None = None,
    first_tokens: Sequence[Sequence[int] | None] | None = None,
    eos_ids: Collection[int] = (),
    vocab_size: int | None = None,
    prefix: PrefixCache | None = None,
    drafts: bool = True,
) -> Generator[NewToken]:
    """Continue each prompt (one token or more) until its end; a sequence does not depend on the others in its batch.

    Sequence i has its own random generator, seeded by (seed, sample_numbers[i]), by default (seed, 0). Its first token
    is one of `first_tokens[i]`, unless that is None or empty. Only ids below `vocab_size` are sampled: a model may have
    more than its tokenizer. A prompt without room for one token is a `UserError`. For a single prompt a `prefix`, and
    at temperature 0 `drafts`, change how long it takes, but no token and no logit.
    """
    config, device = decoder.config, decoder.embed_tokens.weight.device
    context = config.max_position_embeddings
    check_prompts(prompts, context)
    last = max(map(max, prompts))
    if last >= config.vocab_size:
        raise UserError(f"the model has no embedding of token {last}; leave it out of the prompt or the chat template.")
    if prefix is not None and len(prompts) > 1:
        prefix.tokens, prefix.cache = [], None
        prefix = None
    sampling = sampling or Sampling()
    vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
    generators = [sequence_generator(seed, number, device) for number in sample_numbers or [0] * len(prompts)]
    sampler = Sampler(prompts, sampling, generators, first_tokens, vocab_size)
    limits = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    ends: list[FinishReason | None] = [None] * len(prompts)

    tokens, padding = left_pad(prompts, device)
    positions = tokens.shape[1] + max(limits)
    with threads_for(decoder, len(prompts)):
        can_draft = drafts and len(prompts) == 1 and sampling.temperature == 0
        step = decode_step(decoder, len(prompts), positions, drafts_from=prompts[0] if can_draft else None)
        cache = step.cache
        if prefix is not None:
            cached = prefix.move_to(cache, prompts[0])
            tokens, ids = tokens[:, cached:], prompts[0][cached:]
        for count in range(1, max(limits) + 1):
            if cache.length >= context:
                # Only shorter, padded prompts still have room in the context. The sequences that have filled it are
                # finished but still computed: more padding keeps their rotary positions below the context.
                padding = padding.clamp(min=cache.length + 1 - context)
            compute = step if tokens.shape[1] == 1 else DecoderStep(decoder, cache)
            logits = compute(tokens, padding)[:, -1, :vocab_size]
            if prefix is not None:
                prefix.tokens += ids
            tokens, ids = sampler.draw(logits)
            for i, token in enumerate(ids):
                if ends[i] is not None:  # further tokens of a finished sequence are dropped
                    continue
                if token in eos_ids:
                    ends[i] = "eos"
                elif count == limits[i]:
                    ends[i] = "length" if limits[i] == max_new_tokens else "context"
                yield NewToken(i, token, ends[i], logits)
            if None not in ends:
                return


class PromptTooLong(UserError):
    """A prompt that leaves no room in the model's context."""


def check_prompts(prompts: Sequence[Sequence[int]], context: int) -> None:
    """Raise `PromptTooLong` for a prompt that leaves no position of the model's context for a new token."""
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) >= context:
            name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise PromptTooLong(
                f"{name} has {len(prompt)} tokens, but the model's context is {context} tokens for prompt and "
                f"continuation together; shorten it to at most {context - 1} tokens."
            )


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as (B, T) int64 that all end at the last position, and the padding (B,) in front of each, None if all 0.

    prompt A   a a a a      padding 0
    prompt B   . . b b      padding 2: the next cache position holds the next token of every sequence
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(padding, prompts, strict=True)], device=device)
    return tokens, torch.tensor(padding, device=device) if any(padding) else None


def token_mask(rows: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """(B, V) bool: true for the tokens of each row."""
    mask = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, ids in enumerate(rows):
        mask[i, list(ids)] = True
    return mask.to(device)
