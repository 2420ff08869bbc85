"""Functions on tensors that the model is made of. They know nothing of modules, text or training.

This is the one place that picks an implementation; callers never see which one ran.
`kernels.reference` is the specification that every implementation is tested against.
"""

from types import ModuleType

import torch
from torch import Tensor

from kernels import cpu, reference

__all__ = ["causal_attention", "linear_cross_entropy", "norm", "rotary", "swiglu_mlp"]


def implementation(x: Tensor) -> ModuleType:
    """The module whose functions are fastest for a tensor like x; torch.compile fuses the specification itself."""
    return cpu if x.device.type == "cpu" and not torch.compiler.is_compiling() else reference


def norm(x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    """RMSNorm or LayerNorm, see `reference.norm`."""
    return implementation(x).norm(x, *args, **kwargs)


def rotary(qkv: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary positions on packed queries and keys, see `reference.rotary`."""
    return implementation(qkv).rotary(qkv, *args, **kwargs)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention, see `reference.causal_attention`."""
    return implementation(q).causal_attention(q, k, v)


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """The gated MLP, see `reference.swiglu_mlp`."""
    return implementation(x).swiglu_mlp(x, gate_up_weight, down_weight)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The head and its loss, see `reference.linear_cross_entropy`."""
    return implementation(x).linear_cross_entropy(x, weight, targets, ignore_index)
