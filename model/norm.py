"""The norms that `ModelConfig.norm` switches, on one page: `NORMS` in model/config.py says what each learns."""

import re

import torch
from torch import Tensor, nn

import kernels
from model.config import ModelConfig

# Two in each layer and one before the head; in files after "model.". The norms of q and k are not switched: no match.
PARAMETER = re.compile(r"(model\.)?(layers\.\d+\.(input|post_attention)_layernorm|norm)\.(weight|bias)")


class Norm(nn.Module):
    """The norm that the configuration names, with the residual addition in front of it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        for name in ("weight", "bias"):
            learned = name in config.norm_parameters
            self.register_parameter(name, nn.Parameter(torch.empty(config.hidden_size)) if learned else None)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a block's output `x` to the residual stream and normalize the sum; both (B, T, D), both returned."""
        return kernels.norm(x, self.weight, self.bias, residual, kind=self.kind, eps=self.eps)


def is_norm_parameter(name: str) -> bool:
    """Whether a decoder's parameter, or a tensor on disk, belongs to a norm that the switch swaps."""
    return PARAMETER.fullmatch(name) is not None
