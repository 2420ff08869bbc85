"""From logits to the next token: filters as pure functions on (B, V) float32 logits, and sampling.

A filtered token's logit is -inf. The filters, in their order, are those of transformers. Nothing waits for the device.
"""

import hashlib
import math

import torch

from generation.settings import Sampling


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make `seen` tokens (B, V bool) less likely: Keskar et al. 2019, section 4.1, but multiply negative logits."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide by the temperature. Subtracting the maximum first leaves softmax unchanged and prevents overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose probabilities sum to p or more: Holtzman et al. 2020, eq. 2."""
    values, ids = logits.sort(descending=True, stable=True)
    probabilities = values.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    # The mass before the most likely token is exactly 0: it is kept even if p is 0 in float32.
    dropped = (mass_before >= p) & (mass_before > 0)
    return torch.full_like(logits, -math.inf).scatter_(-1, ids, values.masked_fill(dropped, -math.inf))


def keep_min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep tokens whose probability is at least p times the largest one: Nguyen et al. 2024."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def filter_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Apply the temperature and the enabled filters, in order. Those after top-k see its k logits alone, as sorting a
    large vocabulary takes longer than a decoding step of a small model.
    """
    logits = apply_temperature(logits, sampling.temperature)
    remaining, ids = logits, None
    if sampling.top_k > 0:
        remaining, ids = logits.topk(min(sampling.top_k, logits.shape[-1]))
    if sampling.top_p < 1:
        remaining = keep_top_p(remaining, sampling.top_p)
    if sampling.min_p > 0:
        remaining = keep_min_p(remaining, sampling.min_p)
    return remaining if ids is None else torch.full_like(logits, -math.inf).scatter_(-1, ids, remaining)


def sequence_generator(seed: int, sample: int, device: torch.device) -> torch.Generator:
    """A generator for one sequence, alone and in any batch. A hash, as seed + sample is equal for (1, 2) and (2, 1)."""
    digest = hashlib.blake2b(f"generation {seed} {sample}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def sample_inverse_cdf(logits: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    """Sample from softmax(logits): the first token at which the sum of probabilities reaches a number in (0, 1].

    A filtered token is never the first. On a CPU one random number for each row is much faster than one for each token.
    """
    sums = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    uniform = [torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators]  # in [0, 1)
    return torch.searchsorted(sums, (1 - torch.stack(uniform)) * sums[:, -1:])[:, 0]


def sample_gumbel(logits: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    """Sample from softmax(logits): the argmax of p/e with e exponential (the Gumbel-max trick)."""
    noise = torch.empty_like(logits)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    # e may round to 0, and -inf - log(0) would be NaN; the clamp keeps a filtered token at -inf.
    return (logits - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()).argmax(-1)


def sample(
    logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator], seen: torch.Tensor | None = None
) -> torch.Tensor:
    """The next token of each row, (B,) int64. -1 for a row whose logits are not finite: checking needs no host sync."""
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        largest, tokens = logits.max(-1)
    else:
        draw = sample_inverse_cdf if logits.device.type == "cpu" else sample_gumbel
        largest, tokens = logits.amax(-1), draw(filter_logits(logits, sampling), generators)
    # The maximum is NaN or inf if any logit is; single -inf are valid.
    return tokens.masked_fill(~largest.isfinite(), -1)
