"""Token ids in, token ids out: one prefill of the left-padded prompts, then one decoding step per new token."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from errors import UserError
from generation.sampling import sample, sequence_generator
from generation.settings import Sampling
from generation.steps import decode_step
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.device import threads_for

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass
class Generation:
    """What `generate` produced. Lists have an element per prompt."""

    tokens: list[list[int]]  # new ones, without the EOS that ended the sequence
    finish_reasons: list[FinishReason | None]  # EOS, stopped by `on_token`, max_new_tokens reached, or context full


@dataclass
class PrefixCache:
    """The tokens of the last call of `generate`, and their keys and values: the next call computes only what is new."""

    tokens: list[int] = field(default_factory=list)  # at least those that the cache holds, in order
    cache: KeyValueCache | None = None

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens at the start of the prompt the cache holds. Not the last one: its logits are needed."""
        count = 0
        if self.cache is not None:
            while count < min(self.cache.length, len(prompt) - 1) and self.tokens[count] == prompt[count]:
                count += 1
        return count


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
    on_token: Callable[[int, int], bool | None] = lambda i, token: False,
    on_finish: Callable[[int, FinishReason], object] = lambda i, reason: None,
    on_logits: Callable[[torch.Tensor], object] = lambda logits: None,
    prefix: PrefixCache | None = None,
) -> Generation:
    """Continue each prompt (one token or more); a sequence's tokens do not depend on the others in its batch.

    Sequence i has its own random generator, seeded by (seed, sample_numbers[i]), by default (seed, 0). Its first token
    is one of `first_tokens[i]`, unless that is None or empty. Only ids below `vocab_size` are sampled: a model may have
    more than its tokenizer. It ends at an EOS id, when `on_token(i, token)` returns true, after max_new_tokens, or when
    it fills the context; then `on_finish(i, reason)` is called once. A prompt without room for one token is a
    `UserError`. `on_logits` gets the logits (B, V) of each step, valid until it returns.

    With `prefix`, for a single prompt: what the prompt has in common with the last call's tokens is not computed again.
    It stays valid if this call is interrupted anywhere, but not if a call without it comes in between.
    """
    context = decoder.config.max_position_embeddings
    check_prompts(prompts, context)
    last = max(map(max, prompts))
    if last >= decoder.config.vocab_size:
        raise UserError(f"the model has no embedding of token {last}; leave it out of the prompt or the chat template.")
    device, dtype = decoder.embed_tokens.weight.device, decoder.compute_dtype
    sampling = sampling or Sampling()
    vocab_size = min(vocab_size or math.inf, decoder.config.vocab_size)
    generators = [sequence_generator(seed, number, device) for number in sample_numbers or [0] * len(prompts)]
    allowed = token_mask(first_tokens, vocab_size, device) if any(first_tokens or ()) else None  # as the first token
    seen = token_mask(prompts, vocab_size, device) if sampling.repetition_penalty != 1 else None
    limits = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    result = Generation([[] for _ in prompts], [None] * len(prompts))

    def add_token(i: int, token: int) -> FinishReason | None:
        if token in eos_ids:
            return "eos"
        result.tokens[i].append(token)
        if on_token(i, token):
            return "stop"
        if len(result.tokens[i]) >= limits[i]:
            return "length" if limits[i] == max_new_tokens else "context"
        return None

    tokens, padding = left_pad(prompts, device)
    shape = len(prompts), tokens.shape[1] + max(limits)
    assert prefix is None or len(prompts) == 1
    # On a GPU decode_step returns the very cache that prefix points to, with length 0. So first count what it shares
    # with the prompt, then take the step, then set its length to that count.
    cached = 0 if prefix is None else prefix.cached_tokens(prompts[0])
    with threads_for(decoder, len(prompts)):
        step = decode_step(decoder, *shape)  # of a CPU, with the threads of now
        cache = step.cache if step else KeyValueCache(decoder.config, *shape, device=device, dtype=dtype)
        if prefix is not None:
            if cached:
                cache.keep_prefix(prefix.cache, cached)
            prefix.cache, prefix.tokens = cache, list(prompts[0])
            tokens = tokens[:, cached:]
        while None in result.finish_reasons:
            if cache.length >= context:
                # Only shorter, padded prompts still have room in the context. The sequences that have filled it are
                # finished but still computed: more padding keeps their rotary positions below the context.
                padding = padding.clamp(min=cache.length + 1 - context)
            if step is None or tokens.shape[1] > 1:
                logits = decoder(tokens, cache=cache, padding=padding, last_only=True)[:, -1, :vocab_size]
            else:
                logits = step(tokens, padding)[:, -1, :vocab_size]
            on_logits(logits)
            if allowed is not None:
                logits, allowed = logits.masked_fill(~allowed, -math.inf), None
            tokens = sample(logits, sampling, generators, seen)[:, None]
            ids = tokens[:, 0].tolist()  # the only wait for the device in a step
            if min(ids) < 0:
                reason = "its weights are damaged, or its activations overflow"
                raise UserError(f"the model's logits are not finite; {reason}: try float32.")
            if seen is not None:
                seen.scatter_(1, tokens, True)
            if prefix is not None:
                prefix.tokens += ids
            for i, token in enumerate(ids):
                if result.finish_reasons[i] is None:  # further tokens of a finished sequence are dropped
                    result.finish_reasons[i] = add_token(i, token)
                    if result.finish_reasons[i] is not None:
                        on_finish(i, result.finish_reasons[i])
    return result


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


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as (B, T) int64 that all end at the last position, and the padding (B,) in front of each, None if all 0.

    prompt A   a a a a      padding 0
    prompt B   . . b b      padding 2: the next cache position holds the next token of every sequence
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(padding, prompts, strict=True)], device=device)
    return tokens, torch.tensor(padding, device=device) if any(padding) else None


def token_mask(rows: Sequence[Sequence[int] | None], vocab_size: int, device: torch.device) -> torch.Tensor:
    """(B, V) bool: true for the tokens of each row, for all of a row that is None or empty."""
    mask = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, ids in enumerate(rows):
        mask[i, list(ids) if ids else slice(None)] = True
    return mask.to(device)
