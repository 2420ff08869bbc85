"""Functions on tensors that the model is made of. They know nothing of modules, text or training.

`reference` defines each function: its formula, types and shapes. `cpu` and `gpu` have faster ones with the same
arguments, tested against it. This is the one place that picks an implementation; who calls a function never sees which.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from errors import UserError, note
from kernels import reference

if importlib.util.find_spec("triton"):  # Linux only
    from kernels import decode, gpu
else:
    decode = gpu = None
try:
    from kernels import cpu
except (ImportError, AttributeError) as error:  # Numba does not know this Python yet, or is too new for this code
    note(f"computing on a CPU is slower here ({error}); pip install numba")
    cpu = None

_choice = "auto"


def use(choice: str, device: torch.device) -> None:
    """Choose the implementation for this process. `torch`: plain PyTorch, on a CPU with the functions of `cpu`;
    `reference`: without them; `auto`: Triton wherever a GPU can run it, else `torch`; `triton`: `UserError` where it
    does not run on the device."""
    global _choice
    if choice == "triton" and (reason := triton_unavailable_reason(device)) is not None:
        raise UserError(f"the Triton kernels cannot run on {device.type}: {reason}; use --kernels auto.")
    _choice = choice


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, or None."""
    return "Triton is not installed" if gpu is None else cached_unavailable_reason(device)


# Dynamo calls it instead of tracing it; what functools.cache returns would be traced in spite of the mark.
# torch.compiler.assume_constant_result does the same, but imports Dynamo: 1 s.
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
    return None


def choose(device: torch.device, compiled: bool) -> tuple[ModuleType, str]:
    """The module whose functions run on a device, as `use` chose, and what it is in a few words; compiled: in a model
    that torch.compile has compiled."""
    if device.type == "cpu" and _choice in ("auto", "torch"):
        if cpu is None:
            return reference, "plain PyTorch (without Numba)"
        if compiled or torch.compiler.is_compiling():  # it fuses itself what `cpu` does in one pass
            return reference, "plain PyTorch"
        return cpu, "plain PyTorch with CPU functions"
    if _choice in ("torch", "reference"):
        return reference, "plain PyTorch"
    reason = triton_unavailable_reason(device)
    if reason is not None:
        return reference, f"plain PyTorch (no Triton kernels: {reason})"
    return gpu, "Triton, interpreted (slow)" if gpu.INTERPRETED else "Triton"


def implementation(device: torch.device, *, compiled: bool = False) -> ModuleType:
    return choose(device, compiled)[0]


def compile_model(model: Callable) -> Callable:
    """torch.compile without graph breaks. In torch 2.11 the name of an operator of ours replaces a text for a log, its
    arguments, which doubles with each layer; torch 2.13 formats it only if the log is on."""
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: str(target))
    return torch.compile(model, fullgraph=True)


def describe(device: torch.device, *, compiled: bool = False) -> str:
    return choose(device, compiled)[1]


def by_device(function: Callable) -> Callable:
    """A function of `reference`, run by the implementation for the device of its first argument."""

    @functools.wraps(function)
    def run(x: Tensor, *arguments, **options):
        return getattr(implementation(x.device), function.__name__)(x, *arguments, **options)

    return run


normalize = by_device(reference.normalize)
rotary = by_device(reference.rotary)
attention = by_device(reference.attention)
linear = by_device(reference.linear)
swiglu = by_device(reference.swiglu)
swiglu_mlp = by_device(reference.swiglu_mlp)
linear_cross_entropy = by_device(reference.linear_cross_entropy)
