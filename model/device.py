"""What --device and --dtype mean on this machine, how memory and threads are used on it, and what it is called.

Every choice is a rule and no measurement, so that two runs on one machine never differ because it was busy.
"""

import contextlib
import ctypes
import importlib.util
import math
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from errors import UserError

ONE_THREAD_BELOW = 8_000_000  # multiply-adds in a decoding step: about a millisecond of one core


def choose_device(name: str) -> torch.device:
    """The device that `--device name` means. `auto` is CUDA if there is one, else MPS, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # there are no values on `meta`
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here ({reason}); use --device auto.") from None
    return device


def choose_training_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations that `--dtype name` means in training; master weights are float32 in any case.

    `auto` is bfloat16 where the device is fast at it, else float16 on a GPU (with loss scaling) and float32 elsewhere.
    """
    if name != "auto":
        return getattr(torch, name)
    if fast_at_bfloat16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def choose_inference_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype of weights and activations that `--dtype name` means in generation, for weights stored as `stored`.

    `auto` is that of training, but float32 on a CPU unless the weights are bfloat16: other weights stay exact.
    """
    if name == "auto" and device.type != "cuda" and stored != torch.bfloat16:
        return torch.float32
    return choose_training_dtype(name, device)


def fast_at_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices: CUDA from capability 8.0 on, CPUs with AVX-512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    uses_them = torch.backends.cpu.get_cpu_capability() == "AVX512"  # ATEN_CPU_CAPABILITY can rule it out
    return device.type == "cpu" and has_instructions and uses_them


def why_not_compile(device: torch.device) -> str | None:
    """What torch.compile lacks on this device, or None: a C++ compiler on a CPU, Triton elsewhere."""
    if device.type == "cpu":
        has_compiler = any(map(shutil.which, ("g++", "clang++", "c++", "cl")))
        return None if has_compiler else "no C++ compiler found (install g++, clang++ or Visual C++)"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


@contextlib.contextmanager
def threads_for(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Use one CPU thread for decoding steps of `rows` sequences so small that threads mostly wait for each other.

    On 2 busy cores, two threads decoded 5 to 30 times slower than one, with models of 4 and 0.3 million parameters.
    """
    before = torch.get_num_threads()
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and rows * sum(p.numel() for p in model.parameters()) < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Turn what a device, torch's allocator on the CPU and Python raise without memory into a `UserError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        on_cpu = "DefaultCPUAllocator" in str(error)  # a RuntimeError like any other
        if not on_cpu and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        raise UserError(message) from None


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks; other allocators (macOS, Windows, musl) are left as they are.

    A training step frees and allocates the same large buffers again and again. By default each is a new mapping that
    the operating system fills with zeros: a third of the time of a step in the default run.
    """
    if sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # from glibc's malloc.h
        ctypes.CDLL(None).mallopt(m_mmap_max, 0)
        ctypes.CDLL(None).mallopt(m_trim_threshold, 2**31 - 1)


def allocate(sizes: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Uninitialized tensors for weights that decoding reads again and again.

    On a CPU they lie in one large array of NumPy's, which asks Linux for pages of 2 MB. From torch's pages of 4 KB a
    decoding step takes 1.2 to 1.4 times as long (docs/generate.md).
    """
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
    counts = [shape.numel() * dtype.itemsize for shape, dtype in sizes]  # of bytes
    rounded = [math.ceil(count / 64) * 64 for count in counts]  # each begins a cache line
    blocks = torch.from_numpy(np.empty(sum(rounded), np.uint8)).split(rounded)
    each = zip(blocks, counts, sizes, strict=True)
    return [block[:count].view(dtype).view(shape) for block, count, (shape, dtype) in each]


def device_name(device: torch.device) -> str:
    """A name to print: the GPU's model, or the number of threads on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type.upper()


def processor() -> str:
    """The CPU's model, as the operating system names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
