"""Token ids in, token ids out: one prefill of left-padded prompts, then a column of the key/value cache per step.

A row's tokens do not depend on the rows beside it, up to the rounding of a batched matrix product. Rows that have ended
run along, their tokens dropped, until the last one ends: simple, and right for batches of a few texts.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from data.tokenizer import Tokenizer
from errors import UserError
from generation.prompts import prompt_ids
from generation.sampling import generator_for, sample
from generation.settings import Sampling
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.device import threads_for
from model.fused_decode import make_decode_step


@dataclass
class Generation:
    """What `generate` made, and how long it took; a row per prompt."""

    tokens: list[list[int]]
    """New tokens of each row, without the one that ended it."""
    endings: list[str | None]
    """Why each row ended: `end of text`, `stopped` (by on_token), `length` or `context`."""
    prompt_tokens: int
    """Tokens of all rows' prompts."""
    steps: int = 0
    """Decoding steps after the prefill."""
    prefill_seconds: float = 0.0
    """Until the first token of every row is known."""
    decode_seconds: float = 0.0
    """The rest, with what the callbacks took."""


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    sample_numbers: Sequence[int] | None = None,
    eos_ids: Collection[int] = (),
    vocabulary: int | None = None,
    on_token: Callable[[int, int], bool | None] | None = None,
    on_end: Callable[[int, str], object] | None = None,
) -> Generation:
    """Continue each prompt (one token or more), deterministically.

    Row i draws from a generator of its own, seeded by (seed, sample_numbers[i]), all 0 by default: for several texts
    from one prompt, repeat it with numbers 0, 1, 2.

    A row ends at an EOS id, when `on_token(row, token)` returns true, after max_new_tokens, or where prompt and new
    tokens together fill `max_position_embeddings`; a prompt that leaves no room there is a `UserError`. Only ids below
    `vocabulary` are drawn: a model may have rows for more tokens than its tokenizer knows.
    """
    sampling = sampling or Sampling()
    limit = decoder.config.max_position_embeddings
    check_prompts(prompts, limit)
    room = [min(max_new_tokens, limit - len(prompt)) for prompt in prompts]
    device = next(decoder.parameters()).device
    generators = [generator_for(seed, number, device) for number in sample_numbers or [0] * len(prompts)]
    result = Generation([[] for _ in prompts], [None] * len(prompts), prompt_tokens=sum(map(len, prompts)))

    def take(row: int, token: int) -> str | None:
        """Add a token to a row; why the row ends with it, or None."""
        if token in eos_ids:
            return "end of text"
        result.tokens[row].append(token)
        if on_token is not None and on_token(row, token):
            return "stopped"
        if len(result.tokens[row]) == room[row]:
            return "length" if room[row] == max_new_tokens else "context"
        return None

    start = time.perf_counter()
    steps = next_tokens(decoder, prompts, max(room), result.endings, sampling, generators, vocabulary)
    with threads_for(decoder, len(prompts)):
        for step, tokens in enumerate(steps):
            if step == 0:
                result.prefill_seconds = time.perf_counter() - start
            for row, token in enumerate(tokens):
                if result.endings[row] is None:
                    result.endings[row] = take(row, token)
                    if result.endings[row] is not None and on_end is not None:
                        on_end(row, result.endings[row])
            result.steps = step
            if all(result.endings):
                break
    result.decode_seconds = time.perf_counter() - start - result.prefill_seconds
    return result


@torch.inference_mode()
def next_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    room: int,
    endings: list[str | None],
    sampling: Sampling,
    generators: list[torch.Generator],
    vocabulary: int | None,
) -> Iterator[list[int]]:
    """Yield the next token of every row, `room` times at most; the caller keeps in `endings` which rows have ended."""
    limit = decoder.config.max_position_embeddings
    device = next(decoder.parameters()).device
    tokens, padding = left_padded(prompts, device)
    columns = min(tokens.shape[1] + room, limit)
    cache = KeyValueCache(decoder.config, len(prompts), columns, device=device, dtype=decoder.compute_dtype)
    seen = tokens_seen(prompts, decoder.config.vocab_size, device) if sampling.repetition_penalty != 1 else None
    fused = make_decode_step(decoder, cache, padding)
    for _ in range(room):
        if cache.length == limit:
            # The rows that go on have padding in front, else they would have ended here: give them those columns.
            unused = min(pad for pad, ending in zip(padding.tolist(), endings, strict=True) if ending is None)
            drop_columns(cache, unused)
            padding = (padding - unused).clamp(min=0)
        if tokens.shape[1] == 1 and fused is not None:
            logits = fused(tokens, padding)
        else:
            logits = decoder(tokens, cache=cache, padding=padding, last_only=True)
        logits = logits[:, -1, :vocabulary]  # (B, V)
        chosen = sample(logits, sampling, generators, None if seen is None else seen[:, :vocabulary])  # (B,)
        values = chosen.tolist()  # the one wait for the device in a step
        if min(values) < 0:
            raise UserError("the model's logits are not finite; the weights are damaged, or --dtype float32 is needed.")
        yield values
        tokens = chosen[:, None]
        if seen is not None:
            seen.scatter_(1, tokens, True)


def drop_columns(cache: KeyValueCache, count: int) -> None:
    """Take the first `count` columns out of the cache and move the others there. Keys keep the positions they had."""
    for tensor in (cache.keys, cache.values):  # (L, B, K, S, d)
        tensor[..., : cache.length - count, :] = tensor[..., count : cache.length, :].clone()
    cache.length -= count


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> str:
    """The prompt and its continuation as one text: a function of its arguments that leaves torch's global RNG alone."""
    ids = prompt_ids(tokenizer, prompt)
    result = generate(
        decoder,
        [ids],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        eos_ids=(tokenizer.eos_id,),
        vocabulary=tokenizer.vocab_size,
    )
    return tokenizer.decode(ids + result.tokens[0])


def check_prompts(prompts: Sequence[Sequence[int]], limit: int) -> None:
    """Raise `UserError` for a prompt that leaves no room for one new token."""
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) >= limit:
            which = f"prompt {number} has" if len(prompts) > 1 else "the prompt has"
            raise UserError(
                f"{which} {len(prompt)} tokens and the model's context ends at {limit}; "
                f"shorten it to at most {limit - 1} tokens."
            )


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as (B, T) int64 that end together, and how many columns in front of each are padding (None: no row's).

    prompt A   a a a a      padding 0
    prompt B   . . b b      padding 2: the next column is the next token of every row
    """
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    tokens = torch.tensor([[0] * pad + list(row) for pad, row in zip(padding, rows, strict=True)], device=device)
    return tokens, torch.tensor(padding, device=device) if any(padding) else None


def tokens_seen(rows: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """(B, V) bool: which tokens each row's prompt holds."""
    seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
    for row, prompt in enumerate(rows):
        seen[row, list(prompt)] = True
    return seen.to(device)
