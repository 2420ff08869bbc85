"""Token ids in, token ids out: one prefill of the left-padded prompts, then one decoding step per new token.

A finished sequence stays in the batch and its further tokens are dropped, until the last one has finished: simple, and
good enough for small batches.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from errors import UserError, note
from generation.sampling import generator_for, sample
from generation.settings import Sampling
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import threads_for
from model.fused_decode import decode_step_for, fused_step

MAX_CPU_SEQUENCES = 16  # the largest batch that `CpuDecodeStep` was measured with
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

    Sequence i has its own random generator, seeded by (seed, sample_numbers[i]), by default (seed, 0). For several
    samples of one prompt, repeat the prompt with the numbers 0, 1, 2. Its first token is one of `first_tokens[i]`,
    unless that is None or empty. Only ids below `vocab_size` are sampled: a model may have more than its tokenizer.

    Sequence i ends at an EOS id, when `on_token(i, token)` returns true, after max_new_tokens, or when it fills
    `max_position_embeddings`; then `on_finish(i, reason)` is called once. A prompt without room for one token raises
    `UserError`. `on_logits` gets the logits (B, V) of each step, valid until it returns.

    With `prefix`, for a single prompt: what the prompt has in common with the last call's tokens is not computed again.
    It stays valid if this call is interrupted anywhere, but not if a call without it comes in between.
    """
    context = decoder.config.max_position_embeddings
    check_prompts(prompts, context)
    last = max(map(max, prompts))
    if last >= decoder.config.vocab_size:
        raise UserError(f"the model has no embedding of token {last}; leave it out of the prompt or the chat template.")
    device = decoder.embed_tokens.weight.device
    sampling, vocab_size = sampling or Sampling(), min(vocab_size or math.inf, decoder.config.vocab_size)
    limits = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    generators = [generator_for(seed, number, device) for number in sample_numbers or [0] * len(prompts)]
    allowed = token_mask(first_tokens, vocab_size, device) if any(first_tokens or ()) else None
    seen = token_mask(prompts, vocab_size, device) if sampling.repetition_penalty != 1 else None
    tokens, padding = left_pad(prompts, device)
    shape = len(prompts), tokens.shape[1] + max(limits)
    cached = 0 if prefix is None else prefix.cached_tokens(prompts[0])  # before the step, which empties its cache
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

    with threads_for(decoder, len(prompts)), decode_step(decoder, *shape) as step:
        if step is None:
            cache = KeyValueCache(decoder.config, *shape, device=device, dtype=decoder.compute_dtype)
        else:
            cache = step.cache
        if prefix is not None:
            if cached:
                cache.keep_prefix(prefix.cache, cached)
            prefix.cache, prefix.tokens = cache, list(prompts[0])
            tokens = tokens[:, cached:]
        while None in result.finish_reasons:
            if cache.length >= context:
                # Only shorter, padded prompts still have room in the context. The sequences that have filled it are
                # finished but still computed: more padding keeps their rotary positions below max_position_embeddings.
                padding = padding.clamp(min=cache.length + 1 - context)
            if tokens.shape[1] == 1 and step is not None:
                logits = step(tokens, padding)
            else:
                logits = decoder(tokens, cache=cache, padding=padding, last_only=True)
            logits = logits[:, -1, :vocab_size]  # (B, V)
            on_logits(logits)
            if allowed is not None:
                logits, allowed = logits.masked_fill(~allowed, -math.inf), None
            sampled = sample(logits, sampling, generators, seen)  # (B,)
            ids = sampled.tolist()  # the only wait for the device in a step
            if min(ids) < 0:
                reason = "its weights are damaged, or its activations overflow"
                raise UserError(f"the model's logits are not finite; {reason}: try float32.")
            if prefix is not None:
                prefix.tokens += ids
            tokens = sampled[:, None]
            if seen is not None:
                seen.scatter_(1, tokens, True)
            for i, token in enumerate(ids):
                if result.finish_reasons[i] is None:
                    result.finish_reasons[i] = add_token(i, token)
                    if result.finish_reasons[i] is not None:
                        on_finish(i, result.finish_reasons[i])
    return result


def decode_step(decoder: Decoder, batch_size: int, positions: int) -> contextlib.AbstractContextManager:
    """The fastest step for the decoder's device, with an empty cache of `positions`; None where the decoder itself is.

    A step takes tokens (B, 1) and padding, and returns logits (B, 1, V) that are valid until the next call.
    """
    if decoder.lora is not None:  # in training; elsewhere an adapter is part of the weights
        return contextlib.nullcontext()
    if not has_cpu_step(decoder.config, decoder.embed_tokens.weight.device, decoder.compute_dtype, batch_size):
        return decode_step_for(decoder, batch_size, positions)
    from generation.cpu_step import CpuDecodeStep  # imports Numba, which a GPU does not need

    return contextlib.nullcontext(CpuDecodeStep(decoder, KeyValueCache(decoder.config, batch_size, positions)))


def has_cpu_step(config: ModelConfig, device: torch.device, dtype: torch.dtype, batch_size: int) -> bool:
    """Whether `CpuDecodeStep` computes the steps of a model; a note where only Numba is missing."""
    fits = batch_size <= MAX_CPU_SEQUENCES and dtype in (torch.float32, torch.bfloat16)
    if fused_step(config, device) != "cpu" or not fits:
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:  # new versions of Python wait for it
        note(f"decoding on the CPU is slower here ({error}); pip install numba")
        return False
    return True


class PromptTooLong(UserError):
    """A prompt that leaves no room in the model's context."""

    code = "context_length_exceeded"  # as OpenAI's API calls it


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
