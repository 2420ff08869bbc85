"""The norm family on one page, and the switch: `ModelConfig.norm` names a row of `NORMS`, and nothing else changes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kernels
from model.config import ModelConfig


@dataclass(frozen=True)
class Kind:
    """What a norm learns. Its arithmetic is `kernels.norm` with the same name."""

    weight: bool
    """It has a gain."""
    bias: bool
    """It has a bias, unless the configuration says `norm_bias` False."""


NORMS = {
    "rms": Kind(weight=True, bias=False),  # g x / sqrt(mean(x^2) + eps)
    "layer": Kind(weight=True, bias=True),  # g (x - mean) / sqrt(var + eps) + b
}


class Norm(nn.Module):
    """The norm that the configuration names, with the residual addition in front of it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        learned = NORMS[config.norm]
        has_bias = learned.bias and config.norm_bias
        self.weight = nn.Parameter(torch.empty(config.hidden_size)) if learned.weight else None
        self.bias = nn.Parameter(torch.empty(config.hidden_size)) if has_bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a block's output `x` to the residual stream and normalize the sum; both (B, T, D), both returned."""
        return kernels.norm(x, self.weight, self.bias, residual, kind=self.kind, eps=self.eps)
