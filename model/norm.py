"""The norms that `ModelConfig.norm` chooses from; `NORMS` in model/config.py lists their learned parameters."""

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from errors import UserError
from kernels import reference
from model.config import NORM_GROUPS, ModelConfig

# Norms that are kernels, which add the residual too: their `kind` (kernels/reference.py). `srms` is RMSNorm
# without a weight (Qin et al. 2023, arXiv 2307.14995), `offset` one with weight 1 + offset (Gemma, arXiv 2403.08295).
FUSED = {"rms": "rms", "layer": "layer", "srms": "rms", "offset": "rms"}


class Norm(nn.Module):
    """The residual addition and, after it, the norm that the configuration names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.name = config.norm
        self.kind = FUSED.get(self.name)  # None: not a kernel
        self.eps = config.norm_eps
        if self.kind is None and self.name not in FORMULAS:
            raise UserError(f"the norm {self.name} has no row in FORMULAS (model/norm.py).")
        self.register_parameter("weight", None)  # None unless the loop below replaces it
        self.register_parameter("bias", None)
        for parameter in config.norm_parameters:
            shape = (config.hidden_size,) if parameter.per_channel else ()
            self.register_parameter(parameter.name, nn.Parameter(torch.empty(shape)))
        if self.name == "batch":  # saved with the weights, updated in training, not learned by gradients
            self.register_buffer("running_mean", torch.zeros(config.hidden_size))
            self.register_buffer("running_var", torch.ones(config.hidden_size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) in x's dtype and the sum x + residual, the new residual stream; all (B, T, D)."""
        if self.kind is not None:
            # Weight decay pulls an offset to 0, a weight of 1. A weight of `rms` has none: 0 would turn a channel off.
            weight = 1 + self.offset.float() if self.name == "offset" else self.weight
            return kernels.normalize(x, weight, self.bias, residual, kind=self.kind, eps=self.eps)
        s = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
        y = FORMULAS[self.name](self, s.float())
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype), s


def partial_rms(norm: Norm, s: Tensor) -> Tensor:
    """RMSNorm by the mean square of the first sixteenth of the channels (Zhang and Sennrich 2019, section 4.2)."""
    channels = s[..., : math.ceil(s.shape[-1] / 16)]
    return s * torch.rsqrt(channels.square().mean(-1, keepdim=True) + norm.eps)


def group(norm: Norm, s: Tensor) -> Tensor:
    """LayerNorm within each slice of the channels (Wu and He 2018, equation 7), one token at a time."""
    return reference.normalize(s.unflatten(-1, (NORM_GROUPS, -1)), kind="layer", eps=norm.eps)[0].flatten(-2)


def batch(norm: Norm, s: Tensor) -> Tensor:
    """Over all tokens of the batch, later ones too; in evaluation by running averages, whose momentum is 0.1."""
    averages = norm.running_mean, norm.running_var
    return F.batch_norm(s.flatten(0, -2), *averages, training=norm.training, eps=norm.eps).view_as(s)


# Norms that are no kernels, without weight and bias: of the residual stream s (..., D), in float32.
FORMULAS = {
    "center": lambda norm, s: s - s.mean(-1, keepdim=True),  # LayerNorm's re-centering without its re-scaling
    "prms": partial_rms,
    "l2": lambda norm, s: s / (s.norm(dim=-1, keepdim=True) + norm.eps),  # Zhang and Sennrich 2019, table 2
    "group": group,
    "batch": batch,
    "dyt": lambda norm, s: torch.tanh(norm.alpha * s),  # Zhu et al. 2025, arXiv 2503.10622
    "derf": lambda norm, s: torch.erf(norm.alpha * s + norm.shift),  # Chen et al. 2025, arXiv 2512.10938
    "none": lambda norm, s: s,
}


def is_norm_parameter(name: str) -> bool:
    """Whether a parameter, by its name in the decoder or in files, belongs to one of these norms: not of q and k."""
    return re.fullmatch(r"(model\.)?(layers\.\d+\.\w+_layernorm|norm)\.\w+", name) is not None
