"""Rotary position embeddings: tables of cosines and sines, float32 whatever dtype the model computes in."""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig


def frequencies(config: ModelConfig) -> Tensor:
    """Rotation per position of each pair of elements, in radians, float64 (d/2,): theta^(-2i/d).

    Su et al. 2021, section 3.2.2.

    With Llama 3's scaling, wavelengths longer than the original context divided by `low_freq_factor` are stretched by
    `factor`, and those shorter than the context divided by `high_freq_factor` are unchanged. In between, the two are
    blended linearly in the number of turns that fit into the original context (Grattafiori et al. 2024, section 3.2).
    """
    exponents = torch.arange(0, config.resolved_head_dim, 2, dtype=torch.float64, device="cpu")
    frequency = config.rope_theta ** -(exponents / config.resolved_head_dim)
    if config.rope_scaling is None:
        return frequency
    scaling = config.rope_scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_in_context = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    unscaled = ((turns_in_context - low) / (high - low)).clamp(0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling["factor"])


class Rope(nn.Module):
    """cos and sin of (position, pair): computed once in float64, kept as float32 (max_position_embeddings, d/2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies(config))
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """Move with the model to a device but stay float32: bfloat16 cannot tell positions above 256 apart."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, start: int, length: int, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin at cache positions start .. start + length: (T, d/2), or (B, T, d/2) with left padding (B,).

        A token's rotary position is its cache position minus its sequence's padding.
        """
        if padding is None:
            return self.cos[start : start + length], self.sin[start : start + length]
        cache_positions = torch.arange(start, start + length, device=padding.device)
        positions = (cache_positions - padding[:, None]).clamp(min=0)  # (B, T); padding gets any position
        return self.cos[positions], self.sin[positions]
