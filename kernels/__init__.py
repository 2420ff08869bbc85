"""Functions on tensors that the model is made of. They know nothing of modules, text or training.

`reference` defines each function: its formula, types and shapes. `cpu` and `gpu` have faster ones with the same
arguments, tested against it. This is the one place that picks an implementation; who calls a function never sees which.
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
    """Choose the implementation for this process: `triton`, `torch`, or `auto`, Triton wherever a GPU can run it.

    `reference`: plain PyTorch even on a CPU. Raises `UserError` for `triton` where it does not run on the device.
    """
    global _choice
    if choice == "triton" and (reason := triton_unavailable_reason(device)) is not None:
        raise UserError(f"the Triton kernels cannot run on {device.type}: {reason}; use --kernels auto.")
    _choice = choice


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, or None."""
    return "Triton is not installed" if gpu is None else cached_unavailable_reason(device)


# Dynamo calls it instead of tracing it. torch.compiler.assume_constant_result does the same, but imports Dynamo: 1 s.
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
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))  # of its cache, without which it cannot compile
    if "TRITON_CACHE_DIR" not in os.environ and not os.access(home, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    return None


def implementation(device: torch.device) -> ModuleType:
    """The module whose functions run on a device, as `use` chose."""
    if _choice == "reference":
        return reference
    runs_triton = device.type == "cuda" and triton_unavailable_reason(device) is None
    if _choice == "triton" or (_choice == "auto" and runs_triton):
        return gpu
    runs_loops = device.type == "cpu" and cpu is not None
    return cpu if runs_loops and not torch.compiler.is_compiling() else reference  # torch.compile fuses that itself


def compile_model(model: Callable) -> Callable:
    """torch.compile without graph breaks.

    For its log torch 2.11 formats the arguments of each operator of ours, a text that doubles with each layer: the
    operator's name replaces it. torch 2.13 formats it only if the log is on.
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
    if _choice != "auto":
        return "plain PyTorch"
    why = "without Numba" if device.type == "cpu" else f"no Triton kernels: {triton_unavailable_reason(device)}"
    return f"plain PyTorch ({why})"


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
