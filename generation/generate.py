"""Token ids in, token ids out: one prefill of the left-padded prompts, then one decoding step per new token.

A sequence's tokens do not depend on the other sequences of its batch, up to the rounding of a batched matrix product.
A finished sequence stays in the batch and its further tokens are dropped, until the last one has finished: simple, and
good enough for small batches.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

import torch

import kernels
from data.tokenizer import Tokenizer
from errors import UserError
from generation.prompts import check_prompts, encode_prompt, first_tokens
from generation.sampling import generator_for, sample
from generation.settings import Sampling
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.device import threads_for
from model.fused_decode import decode_step_for

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass
class Generation:
    """What `generate` produced, and how long it took. Lists have an element per prompt."""

    tokens: list[list[int]]
    """New tokens of each sequence, without the EOS that ended it."""
    finish_reasons: list[FinishReason | None]
    """Why each sequence ended: EOS token, stopped by `on_token`, max_new_tokens reached, or context full."""
    prompt_tokens: int
    """Tokens of all prompts together, without those whose keys and values were already known."""
    steps: int = 0
    """Decoding steps after the prefill."""
    prefill_seconds: float = 0.0
    """Time until the first new token of every sequence is known."""
    decode_seconds: float = 0.0
    """Time of everything after that, callbacks included."""


@dataclass
class PrefixCache:
    """The tokens of the last call of `generate`, and their keys and values: the next call computes only what is new."""

    tokens: list[int] = field(default_factory=list)
    """At least those that the cache holds, in order."""
    cache: KeyValueCache | None = None

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens at the start of the prompt the cache holds. Not the last one: its logits are needed."""
        cached = self.tokens[: self.cache.length] if self.cache is not None else []
        pairs = enumerate(zip(cached, prompt[:-1], strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(cached), len(prompt) - 1))


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
    prefix: PrefixCache | None = None,
) -> Generation:
    """Continue each prompt (one token or more), deterministically.

    Sequence i has its own random generator, seeded by (seed, sample_numbers[i]), by default (seed, 0). For several
    samples of one prompt, repeat the prompt with the numbers 0, 1, 2. Its first token is one of `first_tokens[i]`,
    unless that is None or empty.

    Sequence i ends at an EOS id, when `on_token(i, token)` returns true, after max_new_tokens, or when prompt and new
    tokens together fill `max_position_embeddings`; then `on_finish(i, reason)` is called once. A prompt that is too
    long to generate even one token raises `UserError`. Only ids below `vocab_size` are sampled: a model may have more
    ids than its tokenizer.

    With `prefix`, for a single prompt: what the prompt has in common with the last call's tokens is not computed again.
    It stays valid if this call is interrupted anywhere, but not if a call without it comes in between.
    """
    check_prompts(prompts, context := decoder.config.max_position_embeddings)
    max_new = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    device = next(decoder.parameters()).device
    generators = [generator_for(seed, number, device) for number in sample_numbers or [0] * len(prompts)]
    cached = 0 if prefix is None else prefix.cached_tokens(prompts[0])
    result = Generation([[] for _ in prompts], [None] * len(prompts), prompt_tokens=sum(map(len, prompts)) - cached)

    def add_token(i: int, token: int) -> FinishReason | None:
        if token in eos_ids:
            return "eos"
        result.tokens[i].append(token)
        if on_token(i, token):
            return "stop"
        if len(result.tokens[i]) == max_new[i]:
            return "length" if max_new[i] == max_new_tokens else "context"
        return None

    start = time.perf_counter()
    vocab_size = vocab_size or decoder.config.vocab_size
    allowed = token_mask(first_tokens, vocab_size, device) if any(first_tokens or ()) else None
    sampling = sampling or Sampling()
    steps = next_tokens(decoder, prompts, max(max_new), sampling, generators, vocab_size, allowed, prefix, cached)
    with threads_for(decoder, len(prompts)), contextlib.closing(steps):
        for step, tokens in enumerate(steps):
            if step == 0:
                result.prefill_seconds = time.perf_counter() - start
            for i, token in enumerate(tokens):
                if result.finish_reasons[i] is None:
                    result.finish_reasons[i] = reason = add_token(i, token)
                    if reason is not None:
                        on_finish(i, reason)
            result.steps = step
            if all(result.finish_reasons):
                break
    result.decode_seconds = time.perf_counter() - start - result.prefill_seconds
    return result


@torch.inference_mode()
def next_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generators: list[torch.Generator],
    vocab_size: int,
    allowed: torch.Tensor | None,
    prefix: PrefixCache | None,
    cached: int,
) -> Iterator[list[int]]:
    """Yield the next token of every sequence, `max_new_tokens` times, also of sequences that the caller has ended.

    allowed (B, V) bool: what the first token may be, None for all.
    The first `cached` tokens of the prompt are taken from `prefix`, which holds all tokens of this call afterwards.
    """
    context, device = decoder.config.max_position_embeddings, next(decoder.parameters()).device
    tokens, padding = left_pad(prompts, device)
    seen = token_mask(prompts, vocab_size, device) if sampling.repetition_penalty != 1 else None
    shape = len(prompts), tokens.shape[1] + max_new_tokens
    with decode_step(decoder, *shape) as step:
        if step is None:
            cache = KeyValueCache(decoder.config, *shape, device=device, dtype=decoder.compute_dtype)
        else:
            cache = step.cache
        if prefix is not None:
            if cached:
                cache.keep_prefix(prefix.cache, cached)
            prefix.cache, prefix.tokens = cache, list(prompts[0])
            tokens = tokens[:, cached:]
        for _ in range(max_new_tokens):
            if cache.length >= context:
                # Only shorter, padded prompts still have room in the context. The sequences that have filled it are
                # finished but still computed: more padding keeps their rotary positions below max_position_embeddings.
                padding = padding.clamp(min=cache.length + 1 - context)
            if tokens.shape[1] == 1 and step is not None:
                logits = step(tokens, padding)
            else:
                logits = decoder(tokens, cache=cache, padding=padding, last_only=True)
            logits = logits[:, -1, :vocab_size]  # (B, V)
            if allowed is not None:
                logits, allowed = logits.masked_fill(~allowed, -math.inf), None
            sampled = sample(logits, sampling, generators, seen)  # (B,)
            ids = sampled.tolist()  # the only wait for the device in a step
            if min(ids) < 0:
                raise UserError(
                    "the model's logits are not finite; its weights are damaged, or its activations overflow: "
                    "try --dtype float32."
                )
            if prefix is not None:
                prefix.tokens += ids
            yield ids
            tokens = sampled[:, None]
            if seen is not None:
                seen.scatter_(1, tokens, True)


def decode_step(decoder: Decoder, batch_size: int, positions: int) -> contextlib.AbstractContextManager:
    """The fastest step for the decoder's device, with an empty cache of `positions`; None where the decoder itself is.

    A step takes tokens (B, 1) and padding, and returns logits (B, 1, V) that are valid until the next call.
    """
    if decoder.lora is not None:  # in training; elsewhere an adapter is part of the weights
        return contextlib.nullcontext()
    if kernels.implementation(decoder.embed_tokens.weight.device) is not kernels.cpu:
        return decode_step_for(decoder, batch_size, positions)
    cpu_step = import_cpu_step()
    if cpu_step is None or not cpu_step.supports(decoder.config, decoder.compute_dtype, batch_size):
        return contextlib.nullcontext()
    return contextlib.nullcontext(cpu_step.CpuDecodeStep(decoder, KeyValueCache(decoder.config, batch_size, positions)))


@functools.cache
def import_cpu_step() -> ModuleType | None:
    """`generation.cpu_step`, imported where it is needed alone; None, and one line, where Numba cannot be imported."""
    try:
        from generation import cpu_step
    except ImportError as error:
        print(f"decoding on the CPU is slower here ({error}); pip install numba", file=sys.stderr)
        return None
    return cpu_step


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


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> str:
    """The prompt and its continuation as one string. Depends on its arguments alone; torch's global RNG is not used."""
    ids, first, eos_ids = encode_prompt(tokenizer, prompt), first_tokens(tokenizer, prompt), (tokenizer.eos_id,)
    options = dict(max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(ids + generate(decoder, [ids], first_tokens=[first], eos_ids=eos_ids, **options).tokens[0])
