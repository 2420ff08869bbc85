"""The norms that `ModelConfig.norm` switches, on one page: `NORMS` in model/config.py says what each learns.

`rms` and `layer` are `kernels.norm`, fused with the residual addition. The others exist to be compared with them and
are written for reading: each a few lines on float32 rows, without gain and bias.
"""

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from model.config import ModelConfig

# In files after "model.". The norms of q and k are not switched: no match.
PARAMETER = re.compile(
    r"(model\.)?(layers\.\d+\.(input|post_attention|attention_output|mlp_output)_layernorm|norm)"
    r"\.(weight|bias|running_mean|running_var)"
)
MOMENTUM = 0.1  # of BatchNorm's running averages (Ioffe and Szegedy 2015, algorithm 2; torch's default)


def center(s: Tensor, eps: float, groups: int) -> Tensor:
    """Re-centering without re-scaling: s - mean(s)."""
    return s - s.mean(-1, keepdim=True)


def partial_rms(s: Tensor, eps: float, groups: int) -> Tensor:
    """s / sqrt(mean of the first sixteenth's squares + eps): Zhang and Sennrich 2019, section 4.2, p = 6.25%."""
    first = s[..., : math.ceil(s.shape[-1] / 16)]
    return s * torch.rsqrt(first.square().mean(-1, keepdim=True) + eps)


def l2(s: Tensor, eps: float, groups: int) -> Tensor:
    """s / (norm2(s) + eps), without the sqrt(D) of rms: the L2-Norm of Zhang and Sennrich 2019, table 2."""
    return s / (torch.linalg.vector_norm(s, dim=-1, keepdim=True) + eps)


def group(s: Tensor, eps: float, groups: int) -> Tensor:
    """LayerNorm within each slice of the row: Wu and He 2018, equation 7, of one token at a time."""
    slices = s.unflatten(-1, (groups, -1))
    slices = slices - slices.mean(-1, keepdim=True)
    return (slices * torch.rsqrt(slices.square().mean(-1, keepdim=True) + eps)).flatten(-2)


def identity(s: Tensor, eps: float, groups: int) -> Tensor:
    """No norm at all."""
    return s


UNFUSED = {"center": center, "prms": partial_rms, "l2": l2, "group": group, "none": identity}


class Norm(nn.Module):
    """The norm that the configuration names, with the residual addition in front of it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.eps, self.groups = config.norm, config.norm_eps, config.norm_groups
        for name in ("weight", "bias"):
            learned = name in config.norm_parameters
            self.register_parameter(name, nn.Parameter(torch.empty(config.hidden_size)) if learned else None)
        if self.kind == "batch":
            self.register_buffer("running_mean", torch.zeros(config.hidden_size))
            self.register_buffer("running_var", torch.ones(config.hidden_size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a block's output `x` to the residual stream and normalize the sum; both (B, T, D), both returned."""
        if self.kind in kernels.NORM_KINDS:
            return kernels.normalize(x, self.weight, self.bias, residual, kind=self.kind, eps=self.eps)
        s = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
        y = self.over_the_batch(s) if self.kind == "batch" else UNFUSED[self.kind](s.float(), self.eps, self.groups)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype), s

    def over_the_batch(self, s: Tensor) -> Tensor:
        """BatchNorm: each channel over all tokens of all texts in training, by the running averages in evaluation.

        In training a token's output depends on the tokens after it: this norm is here to be measured, not to be used.
        """
        rows = s.float().flatten(0, -2)
        y = F.batch_norm(rows, self.running_mean, self.running_var, None, None, self.training, MOMENTUM, self.eps)
        return y.view_as(s)


def is_norm_parameter(name: str) -> bool:
    """Whether a decoder's parameter, or a tensor on disk, belongs to a norm that the switch swaps."""
    return PARAMETER.fullmatch(name) is not None
