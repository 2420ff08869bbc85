"""The norms that `ModelConfig.norm` chooses from.

To add one: a row in `NORMS` of model/config.py with its name and learned parameters, and a function of that name here.
`rms` and `layer` are fused kernels; `srms` and `offset` call the one of `rms`. The others exist to be compared with
them and are written to be read.
"""

import functools
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from model.config import NORM_GROUPS, NORMS, ModelConfig

# BatchNorm alone also has buffers: saved with the weights, updated in training, not learned by gradients.
RUNNING_STATISTICS = {"running_mean": 0.0, "running_var": 1.0}
MOMENTUM = 0.1  # of the running statistics (Ioffe and Szegedy 2015, algorithm 2; torch's default)


class Norm(nn.Module):
    """The residual addition and, after it, the norm that the configuration names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        self.register_parameter("weight", None)  # None unless the loop below replaces it
        self.register_parameter("bias", None)
        for parameter in config.norm_parameters:
            shape = (config.hidden_size,) if parameter.per_channel else ()
            self.register_parameter(parameter.name, nn.Parameter(torch.empty(shape)))
        if self.kind == "batch":
            for name, initial in RUNNING_STATISTICS.items():
                self.register_buffer(name, torch.full((config.hidden_size,), initial))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) in x's dtype and the sum x + residual, the new residual stream; all (B, T, D)."""
        return FUNCTIONS[self.kind](self, x, residual)


def rms(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight * s / sqrt(mean(s^2) + eps), s = x + residual: Zhang and Sennrich 2019, equation 4."""
    return kernels.normalize(x, norm.weight, norm.bias, residual, kind="rms", eps=norm.eps)


def layer(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight * (s - mean(s)) / sqrt(var(s) + eps) + bias, s = x + residual: Ba et al. 2016, equation 4."""
    return kernels.normalize(x, norm.weight, norm.bias, residual, kind="layer", eps=norm.eps)


def srms(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """s / sqrt(mean(s^2) + eps), s = x + residual: SRMSNorm of TransNormerLLM, Qin et al. 2023 (arXiv 2307.14995)."""
    return kernels.normalize(x, None, None, residual, kind="rms", eps=norm.eps)


def offset(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(1 + offset) * s / sqrt(mean(s^2) + eps) + bias, s = x + residual: RMSNorm as Gemma has it (arXiv 2403.08295).

    Its point is weight decay, which pulls the offset towards 0 and so the weight 1 + offset towards 1. The weight of
    `rms` does not decay, because 0 would switch channels off. Without decay both train alike, up to rounding.
    """
    return kernels.normalize(x, 1 + norm.offset.float(), norm.bias, residual, kind="rms", eps=norm.eps)


def unfused(normalize: Callable[[Norm, Tensor], Tensor]) -> Callable:
    """Complete a function of float32 rows s (..., D): add the residual before it, apply weight and bias after it."""

    @functools.wraps(normalize)
    def add_and_normalize(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        s = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
        y = normalize(norm, s.float())
        if norm.weight is not None:
            y = y * norm.weight
        if norm.bias is not None:
            y = y + norm.bias
        return y.to(x.dtype), s

    return add_and_normalize


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


FUNCTIONS = {name: globals()[name] for name in NORMS}

# Names as in files; in the decoder they lack "model.". The norms of q and k are not switched and do not match.
TENSORS = {parameter.name for row in NORMS.values() for parameter in row} | RUNNING_STATISTICS.keys()
NORM_TENSOR = re.compile(
    r"(model\.)?(layers\.\d+\.(input|post_attention|attention_output|mlp_output)_layernorm|norm)"
    rf"\.({'|'.join(sorted(TENSORS))})"
)


def is_norm_parameter(name: str) -> bool:
    """Whether a decoder's parameter, or a tensor on disk, belongs to a norm that `ModelConfig.norm` chooses."""
    return NORM_TENSOR.fullmatch(name) is not None
