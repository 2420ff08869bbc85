"""Functions on tensors that the model is made of. They know nothing of modules, text or training.

This is the one place that picks an implementation; callers never see which one ran.
`kernels.reference` is the specification that every implementation is tested against.
"""

from types import ModuleType

import torch
from torch import Tensor

from kernels import cpu, reference

__all__ = ["attention", "describe", "linear_cross_entropy", "norm", "rotary", "swiglu_mlp"]

NORM_KINDS = ("rms", "layer")


def implementation(device: torch.device) -> ModuleType:
    """The module whose functions are fastest on a device; torch.compile fuses the specification itself."""
    return cpu if device.type == "cpu" and not torch.compiler.is_compiling() else reference


def describe(device: torch.device) -> str:
    """What runs on a device, in a few words, when it is not compiled."""
    return {cpu: "plain PyTorch with CPU functions", reference: "plain PyTorch"}[implementation(device)]


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """RMSNorm or LayerNorm of x, or of x + residual, and the residual stream; see `reference.norm`."""
    if kind not in NORM_KINDS:  # here, for all implementations
        raise ValueError(f"norm kind {kind!r} is none of {', '.join(NORM_KINDS)}")
    return implementation(x.device).norm(x, weight, bias, residual, kind=kind, eps=eps)


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed rows split into q, k and v, with q and k turned by their positions; see `reference.rotary`."""
    run = implementation(qkv.device).rotary
    return run(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight, k_norm_weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention, causal or as the mask says; see `reference.attention`."""
    return implementation(q.device).attention(q, k, v, mask)


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """The gated MLP; see `reference.swiglu_mlp`."""
    return implementation(x.device).swiglu_mlp(x, gate_up_weight, down_weight)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss of each token from the head's input x; see `reference.linear_cross_entropy`."""
    return implementation(x.device).linear_cross_entropy(x, weight, targets, ignore_index)
