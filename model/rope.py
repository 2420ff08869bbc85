"""Rotary position embeddings: tables of cosines and sines, float32 whatever dtype the model computes in."""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig


def frequencies(config: ModelConfig) -> Tensor:
    """Rotation per position of each pair of elements, in radians, float64 (d/2,): theta^(-2i/d) (Su et al. 2021).

    For longer contexts, a scaling divides by `factor` the part of each that `unscaled_part` does not keep.
    """
    exponents = torch.arange(0, config.resolved_head_dim, 2, dtype=torch.float64, device="cpu")
    frequency = config.rope_theta ** -(exponents / config.resolved_head_dim)
    if config.rope_scaling is None:
        return frequency
    unscaled = unscaled_part(config, frequency)
    return frequency * (unscaled + (1 - unscaled) / config.rope_scaling["factor"])


def unscaled_part(config: ModelConfig, frequency: Tensor) -> Tensor:
    """How much of each frequency (d/2,) its scaling leaves as it is: from 0, divided by `factor`, to 1, unchanged."""
    scaling, context = config.rope_scaling, config.rope_scaling.get("original_max_position_embeddings")
    if scaling["rope_type"] == "linear":  # positions are interpolated: Chen et al. 2023, arXiv 2306.15595, equation 4
        return torch.zeros_like(frequency)
    if scaling["rope_type"] == "llama3":  # linear in the turns that fit into the context: Grattafiori et al. 2024, 3.2
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return ((context * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)

    # yarn (Peng et al. 2023, arXiv 2309.00071, section 3.2): 1 for pairs that make more than `beta_fast` turns in the
    # context, 0 for fewer than `beta_slow`; in between linear in the pair's index, as in the authors' code and in
    # transformers; in the paper, in the number of turns. `truncate` rounds the two ends to whole indices.
    def index_with(turns: float) -> float:
        """Index of the pair that makes this many turns in the original context; in general not a whole number."""
        return config.resolved_head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(config.rope_theta))

    first, last = index_with(scaling["beta_fast"]), index_with(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.resolved_head_dim - 1)
    if first == last:
        last += 0.001  # a step, without dividing by 0
    return 1 - ((torch.arange(len(frequency), dtype=torch.float64, device="cpu") - first) / (last - first)).clamp(0, 1)


class Rope(nn.Module):
    """cos and sin of (position, pair): computed in float64, kept as float32 (positions, d/2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        cos, sin = self.tables(min(config.max_position_embeddings, 2**15))  # more once a text needs more, see `grow`
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first `count` positions, on the CPU; yarn scales them (Peng et al. 2023, section 3.4)."""
        angles = torch.outer(torch.arange(count, dtype=torch.float64, device="cpu"), frequencies(self.config))
        scaling = self.config.rope_scaling
        factor = scaling["attention_factor"] if scaling is not None and scaling["rope_type"] == "yarn" else 1.0
        return (factor * angles.cos()).float(), (factor * angles.sin()).float()

    @torch.inference_mode(False)  # tables made while generating may be used in training later
    def grow(self, length: int) -> None:
        """Extend the tables to at least `length` positions, but not beyond the context."""
        context, count = self.config.max_position_embeddings, len(self.cos)
        if count < min(length, context):
            self.cos, self.sin = (t.to(self.cos.device) for t in self.tables(min(max(length, 2 * count), context)))

    def _apply(self, fn, recurse: bool = True):
        """Move with the model to a device but stay float32: bfloat16 cannot tell positions above 256 apart."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, start: int, length: int, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin at cache positions start .. start + length: (T, d/2), or (B, T, d/2) with left padding (B,)."""
        if start + length > len(self.cos):
            self.grow(start + length)
        if padding is None:
            return self.cos[start : start + length], self.sin[start : start + length]
        cache_positions = torch.arange(start, start + length, device=padding.device)
        positions = (cache_positions - padding[:, None]).clamp(min=0)  # (B, T); padding gets any position
        return self.cos[positions], self.sin[positions]
