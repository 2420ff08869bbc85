"""What --device and --dtype mean on this machine: rules, no measurements. How a model uses its threads and memory."""

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator, Sequence

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


def choose_dtype(name: str, device: torch.device, stored: torch.dtype | None = None) -> torch.dtype:
    """What `--dtype name` means: the dtype of activations, in generation of weights too. stored: the dtype in files.

    On a CPU, `auto` rounds no weights of files, and is bfloat16 only where the processor multiplies it.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if device.type != "cpu" or stored not in (None, torch.bfloat16):
        return torch.float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    uses_them = torch.backends.cpu.get_cpu_capability() == "AVX512"  # ATEN_CPU_CAPABILITY can rule it out
    return torch.bfloat16 if has_instructions and uses_them else torch.float32


@contextlib.contextmanager
def threads_for(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Use one CPU thread for steps of `rows` sequences so small that two, on busy cores, take 5 to 30 times as long."""
    usual_threads = torch.get_num_threads()
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and rows * sum(p.numel() for p in model.parameters()) < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual_threads)


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
    """Let glibc keep large freed blocks for the next step: filling new ones with zeros is a third of its time."""
    if sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # from glibc's malloc.h
        ctypes.CDLL(None).mallopt(m_mmap_max, 0)
        ctypes.CDLL(None).mallopt(m_trim_threshold, 2**31 - 1)


def allocate(sizes: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Uninitialized tensors. On a CPU they are in an array of NumPy's, which asks Linux for pages of 2 MB: from torch's
    pages of 4 KB a decoding step takes 1.2 to 1.4 times as long."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
    byte_counts = [shape.numel() * dtype.itemsize for shape, dtype in sizes]
    rounded = [math.ceil(count / 64) * 64 for count in byte_counts]  # to cache lines
    blocks = torch.from_numpy(np.empty(sum(rounded), np.uint8)).split(rounded)
    blocks = [block[:count] for block, count in zip(blocks, byte_counts, strict=True)]
    return [block.view(dtype).view(shape) for block, (shape, dtype) in zip(blocks, sizes, strict=True)]
