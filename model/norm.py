"""The norms that `ModelConfig.norm` chooses from.

To add one: a row in `NORMS` of model/config.py with its name and learned parameters, and a function of that name here.
Those in `FUSED` are kernels, which add the residual too. The others are for comparisons, and written to be read.
"""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from errors import UserError
from model.config import NORM_GROUPS, ModelConfig

MOMENTUM = 0.1  # momentum of BatchNorm's running statistics (Ioffe and Szegedy 2015, algorithm 2; torch's default)
# Norms that are kernels, and the kind there (formulas: `reference.normalize`). `srms` is RMSNorm without a weight (Qin
# et al. 2023, arXiv 2307.14995), `offset` RMSNorm with the weight 1 + offset (Gemma, arXiv 2403.08295).
FUSED = {"rms": "rms", "layer": "layer", "srms": "rms", "offset": "rms"}
FUNCTIONS: dict[str, Callable] = {}  # all others, below


class Norm(nn.Module):
    """The residual addition and, after it, the norm that the configuration names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        if self.kind not in (*FUSED, *FUNCTIONS):
            raise UserError(f"the norm {self.kind} is a row of NORMS, but model/norm.py has no function of that name.")
        self.register_parameter("weight", None)  # None unless the loop below replaces it
        self.register_parameter("bias", None)
        for parameter in config.norm_parameters:
            shape = (config.hidden_size,) if parameter.per_channel else ()
            self.register_parameter(parameter.name, nn.Parameter(torch.empty(shape)))
        if self.kind == "batch":  # saved with the weights, updated in training, not learned by gradients
            self.register_buffer("running_mean", torch.zeros(config.hidden_size))
            self.register_buffer("running_var", torch.ones(config.hidden_size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) in x's dtype and the sum x + residual, the new residual stream; all (B, T, D)."""
        if self.kind in FUSED:
            # Weight decay pulls an offset towards 0. The weight of `rms` has none, because 0 would switch channels off.
            weight = 1 + self.offset.float() if self.kind == "offset" else self.weight
            return kernels.normalize(x, weight, self.bias, residual, kind=FUSED[self.kind], eps=self.eps)
        s = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
        y = FUNCTIONS[self.kind](self, s.float())
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype), s


def unfused(function: Callable[[Norm, Tensor], Tensor]) -> Callable[[Norm, Tensor], Tensor]:
    """Register a norm: a function of the float32 stream s (..., D), to which weight and bias are applied afterwards."""
    FUNCTIONS[function.__name__] = function
    return function


@unfused
def center(norm: Norm, s: Tensor) -> Tensor:
    """s - mean(s): LayerNorm's re-centering without its re-scaling."""
    return s - s.mean(-1, keepdim=True)


@unfused
def prms(norm: Norm, s: Tensor) -> Tensor:
    """RMSNorm whose mean square is that of the first sixteenth of the row: Zhang and Sennrich 2019, section 4.2."""
    first = s[..., : math.ceil(s.shape[-1] / 16)]
    return s * torch.rsqrt(first.square().mean(-1, keepdim=True) + norm.eps)


@unfused
def l2(norm: Norm, s: Tensor) -> Tensor:
    """s / (|s| + eps), RMSNorm without its factor sqrt(D): the L2-Norm of Zhang and Sennrich 2019, table 2."""
    return s / (torch.linalg.vector_norm(s, dim=-1, keepdim=True) + norm.eps)


@unfused
def group(norm: Norm, s: Tensor) -> Tensor:
    """LayerNorm within each of NORM_GROUPS slices of a row: Wu and He 2018, equation 7, one token at a time."""
    slices = s.unflatten(-1, (NORM_GROUPS, -1))
    slices = slices - slices.mean(-1, keepdim=True)
    return (slices * torch.rsqrt(slices.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2)


@unfused
def batch(norm: Norm, s: Tensor) -> Tensor:
    """BatchNorm: statistics of each channel over all tokens of the batch; in evaluation, their running averages.

    In training a token's output depends on later tokens, so this norm is only for comparisons.
    """
    rows = s.flatten(0, -2)
    y = F.batch_norm(rows, norm.running_mean, norm.running_var, None, None, norm.training, MOMENTUM, norm.eps)
    return y.view_as(s)


@unfused
def dyt(norm: Norm, s: Tensor) -> Tensor:
    """tanh(alpha s) with a learned scalar alpha, no statistics: Zhu et al. 2025 (arXiv 2503.10622)."""
    return torch.tanh(norm.alpha * s)


@unfused
def derf(norm: Norm, s: Tensor) -> Tensor:
    """erf(alpha s + shift) with two learned scalars, no statistics: Chen et al. 2025 (arXiv 2512.10938)."""
    return torch.erf(norm.alpha * s + norm.shift)


@unfused
def none(norm: Norm, s: Tensor) -> Tensor:
    """No norm: the residual stream itself."""
    return s


# Names as in files; in the decoder they lack "model.". The norms of q and k are not switched and do not match.
NORM_TENSOR = re.compile(r"(model\.)?(layers\.\d+\.\w+_layernorm|norm)\.\w+")


def is_norm_parameter(name: str) -> bool:
    """Whether a decoder's parameter, or a tensor on disk, belongs to a norm that `ModelConfig.norm` chooses."""
    return NORM_TENSOR.fullmatch(name) is not None
