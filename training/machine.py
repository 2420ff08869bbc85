"""The device, the dtype of the activations, and what is known of the device's speed."""

import ctypes
import shutil
import sys
import time

import torch

# Dense bfloat16 peak in TFLOP/s without sparsity, from the vendors' data sheets, by a word of the device's name.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "MI300X": 1307,
}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the activations: what was asked for, or bfloat16 where this device is fast at it."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if device.type == "cpu" and matmul_seconds(torch.float32) > 1.5 * matmul_seconds(torch.bfloat16):
        return torch.bfloat16
    return torch.float32


def matmul_seconds(dtype: torch.dtype) -> float:
    """Seconds of a 512-cubed matrix product on the CPU: asking the processor beats knowing every processor's flags."""
    a = torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return min(times)


def device_name(device: torch.device) -> str:
    """A name for people: the GPU's model, or the number of threads on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type.upper()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device could do in this dtype at most, or None where that is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for word, tflops in PEAK_TFLOPS.items() if word in name), None)


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


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs: on a CPU, a C++ compiler."""
    return device.type != "cpu" or any(map(shutil.which, ("g++", "clang++", "c++", "cl")))
