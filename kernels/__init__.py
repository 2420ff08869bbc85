"""Functions on tensors that the model is made of. They know nothing of modules, text or training.

This is the one place that picks an implementation; callers never see which one ran.
Every implementation is tested against `kernels.reference`.
"""

import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from errors import UserError
from kernels import cpu, reference

if importlib.util.find_spec("triton"):  # Linux only
    from kernels import decode, gpu
else:
    decode = gpu = None

__all__ = ["attention", "compile_model", "describe", "linear", "linear_cross_entropy", "normalize", "rotary"]
__all__ += ["swiglu_mlp", "use"]

NORM_KINDS = ("rms", "layer")

_choice = "auto"


def use(choice: str, device: torch.device) -> None:
    """Choose the implementation for this process: `triton`, `torch`, or `auto`, Triton wherever a GPU can run it.

    `reference` is plain PyTorch on every device, for comparisons; on a CPU, `torch` means faster functions than that.
    Raises `UserError` for `triton` where it does not run on the device.
    """
    global _choice
    if choice == "triton" and (reason := triton_unavailable_reason(device)) is not None:
        raise UserError(f"the Triton kernels cannot run on {device.type}: {reason}; use --kernels auto.")
    _choice = choice


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, or None."""
    return "Triton is not installed" if gpu is None else cached_unavailable_reason(device)


# Called, not traced: Dynamo would trace into functools.cache and shutil.which. This is all that
# torch.compiler.assume_constant_result does, but it imports Dynamo, and every command would start a second later.
triton_unavailable_reason._dynamo_marked_constant = True


@functools.cache
def cached_unavailable_reason(device: torch.device) -> str | None:
    """`triton_unavailable_reason`, computed once per device. Triton compiles its launchers in C."""
    if device.type == "cpu" and gpu.INTERPRETED:
        return None
    if device.type != "cuda":
        hint = " (or, slowly, in Triton's interpreter: TRITON_INTERPRET=1)" if device.type == "cpu" else ""
        return f"they need an NVIDIA or AMD GPU{hint}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0 (Ampere) or newer"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler (install gcc or clang)"
    if not os.access(os.path.expanduser("~"), os.W_OK):  # where Triton has its cache, without which it cannot compile
        os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    return None


def implementation(device: torch.device) -> ModuleType:
    """The module whose functions run on a device, as `use` chose."""
    if _choice == "reference":
        return reference
    if _choice == "triton":
        return gpu
    if _choice == "auto" and device.type == "cuda" and triton_unavailable_reason(device) is None:
        return gpu
    # torch.compile fuses the reference itself
    return cpu if device.type == "cpu" and not torch.compiler.is_compiling() else reference


def compile_model(model: Callable) -> Callable:
    """torch.compile without graph breaks.

    For its log torch 2.11 formats the arguments of each custom operator, a text that doubles with each layer (12 layers
    were not compiled after seven minutes), so its name replaces it. torch 2.13 formats it only if the log is on.
    """
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: str(target))
    return torch.compile(model, fullgraph=True)


def describe(device: torch.device) -> str:
    """What runs on a device without torch.compile, in a few words."""
    chosen = implementation(device)
    if chosen is gpu:
        return "Triton, interpreted (slow)" if gpu.INTERPRETED else "Triton"
    if chosen is cpu:
        return "plain PyTorch with CPU functions"
    return "plain PyTorch" if _choice != "auto" else f"plain PyTorch ({triton_unavailable_reason(device)})"


def normalize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """RMSNorm or LayerNorm of x, or of x + residual, and the residual stream; see `reference.normalize`."""
    assert kind in NORM_KINDS
    return implementation(x.device).normalize(x, weight, bias, residual, kind=kind, eps=eps)


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
    """Packed rows split into q, k and v, with q and k rotated by their positions; see `reference.rotary`."""
    run = implementation(qkv.device).rotary
    return run(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight, k_norm_weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention, causal or as the mask says; see `reference.attention`."""
    return implementation(q.device).attention(q, k, v, mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in x's dtype; see `reference.linear`."""
    return implementation(x.device).linear(x, weight, bias)


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """The gated MLP; see `reference.swiglu_mlp`."""
    return implementation(x.device).swiglu_mlp(x, gate_up_weight, down_weight)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None) -> Tensor:
    """The loss of each token from the head's input x, or their weighted sum; see `reference.linear_cross_entropy`."""
    return implementation(x.device).linear_cross_entropy(x, weight, targets, token_weights)
