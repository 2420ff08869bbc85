"""The device, the dtype of the activations, and what is known of the device's speed."""

import ctypes
import importlib.util
import platform
import re
import shutil
import sys
from pathlib import Path

import torch

from model.device import fast_at_bfloat16

# Dense bfloat16 peak in TFLOP/s without sparsity, from the vendors' data sheets, by the device's name as CUDA gives it.
PEAK_TFLOPS = {
    r"B200": 2250,
    r"H200": 989,
    r"H100 80GB": 989,
    r"H100 PCIe": 756,
    r"H100 NVL": 835,
    r"A100": 312,
    r"L40S": 362,
    r"L4$": 121,
    r"A10$": 125,
    r"RTX 4090$": 165,
    r"RTX 3090$": 71,
}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the activations: what was asked for, or bfloat16 where this device is fast at it."""
    if name != "auto":
        return getattr(torch, name)
    if fast_at_bfloat16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def device_name(device: torch.device) -> str:
    """A name for people: the GPU's model, or the number of threads on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type.upper()


def processor() -> str:
    """The processor's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device could do in this dtype at most, or None where that is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{known}", name)), None)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of giving them back to the kernel.

    A training step frees and asks for the same large buffers again and again. By default each of them is a mapping of
    its own that the kernel has to make and fill with zeros every time (a third of a step of the default run). Other
    allocators (macOS, Windows, musl) are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4  # from glibc's malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def why_not_compile(device: torch.device) -> str | None:
    """What torch.compile lacks on this device, or None: a C++ compiler on a CPU, Triton elsewhere."""
    if device.type == "cpu":
        found = any(map(shutil.which, ("g++", "clang++", "c++", "cl")))
        return None if found else "no C++ compiler found (install g++, clang++ or Visual C++)"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
