"""Rotary position embeddings: tables of cosines and sines, float32 whatever dtype the model computes in."""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig


def frequencies(config: ModelConfig) -> Tensor:
    """Rotation per position of each pair of elements, in radians, float64 (d/2,): theta^(-2i/d) (Su et al. 2021).

    For longer contexts, `rope_scaling` divides each by `factor`. A pair keeps the share `unscaled` of its frequency.
    """
    pairs = torch.arange(config.resolved_head_dim // 2, dtype=torch.float64, device="cpu")
    frequency = config.rope_theta ** -(2 * pairs / config.resolved_head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":  # positions are interpolated: Chen et al. 2023, arXiv 2306.15595, equation 4
        unscaled = torch.zeros_like(frequency)
    elif scaling["rope_type"] == "llama3":  # linear in the turns within the context: Grattafiori et al. 2024, 3.2
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        first, last = yarn_ramp(config)
        unscaled = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling["factor"])


def yarn_ramp(config: ModelConfig) -> tuple[float, float]:
    """Indices of the last pair that keeps its frequency and the first that is fully scaled (Peng et al. 2023, 3.2).

    They are where a pair makes `beta_fast` and `beta_slow` turns in the original context. In between, `unscaled` falls
    linearly with the index of the pair, as in the authors' code and transformers; in the paper, with the turns.
    """
    scaling = config.rope_scaling

    def pair_with(turns: float) -> float:  # theta^(-2i/d) context = 2 pi turns, solved for i: not a whole number
        base = scaling["original_max_position_embeddings"] / (2 * math.pi * turns)
        return config.resolved_head_dim * math.log(base) / (2 * math.log(config.rope_theta))

    first, last = pair_with(scaling["beta_fast"]), pair_with(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.resolved_head_dim - 1)
    return (first, last) if first != last else (first, last + 0.001)  # a step, without dividing by 0


class Rope(nn.Module):
    """cos and sin of each position and pair of elements: computed in float64, kept as float32 (positions, d/2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.register_buffer("cos", torch.empty(0, device="cpu"), persistent=False)
        self.register_buffer("sin", torch.empty(0, device="cpu"), persistent=False)
        self.grow(2**15)  # more when a text needs them

    @torch.inference_mode(False)  # tables made while generating may be used in training later
    def grow(self, length: int) -> None:
        """Extend the tables to at least `length` positions, or to the context; yarn multiplies them (section 3.4)."""
        context = self.config.max_position_embeddings
        if len(self.cos) >= min(length, context):
            return
        count = min(max(length, 2 * len(self.cos)), context)  # at least doubled, so that it is rare
        angles = torch.outer(torch.arange(count, dtype=torch.float64, device="cpu"), frequencies(self.config))
        factor = (self.config.rope_scaling or {}).get("attention_factor", 1.0)  # yarn alone has one
        self.cos = (factor * angles.cos()).float().to(self.cos.device)
        self.sin = (factor * angles.sin()).float().to(self.sin.device)

    def _apply(self, fn, recurse: bool = True):
        """nn.Module.to() calls it. The tables move but stay float32: bfloat16 cannot tell positions above 256 apart."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, start: int, length: int, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin at cache positions start .. start + length: (T, d/2), or (B, T, d/2) with left padding (B,)."""
        if start + length > len(self.cos):  # not in a graph of torch.compile
            self.grow(start + length)
        if padding is None:
            return self.cos[start : start + length], self.sin[start : start + length]
        cache_positions = torch.arange(start, start + length, device=padding.device)
        positions = (cache_positions - padding[:, None]).clamp(min=0)  # (B, T); padding gets any position
        return self.cos[positions], self.sin[positions]
