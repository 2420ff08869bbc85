"""Device, dtype and threads: the only file that decides them, and what is known of a device.

Every choice is a rule, not a timing: two runs on one machine never differ because it was busy when one of them began.
"""

import contextlib
import ctypes
import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import kernels
from errors import UserError

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

ONE_THREAD_BELOW = 8_000_000  # multiply-adds in a decoding step, about a millisecond of one core

TYPES = ("cpu", "cuda", "mps")  # torch has others, such as meta, whose tensors hold no numbers


def choose_device(name: str) -> torch.device:
    """The device that a `--device` value means; `auto` is CUDA, else MPS, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in TYPES:
            raise UserError(f"--device {name} is of no type that models run on; use auto, cpu, cuda or mps.")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here ({reason}); --device auto takes what there is.") from None
    return device


def choose_kernels(name: str, device: torch.device) -> None:
    """Set what a `--kernels` value means on a device, for this process."""
    try:
        kernels.use(name, device)
    except ValueError as error:
        raise UserError(f"{error}; use --kernels auto, which takes what can.") from None


def fast_at_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in instructions of its own.

    CUDA from compute capability 8.0 on; a CPU with AVX-512-BF16 or AMX; MPS is taken not to. A rule and no measurement:
    the dtype of a run must not depend on how busy the machine was when it began.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        # Private to torch, hence the default: a version without them computes in float32, which is right everywhere.
        questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, question, bool)() for question in questions)
    return False


def choose_training_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the activations: what was asked for, or bfloat16 where this device is fast at it."""
    if name != "auto":
        return getattr(torch, name)
    if fast_at_bfloat16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def choose_inference_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype that a `--dtype` value means for weights stored as `stored`.

    On a CPU bfloat16 halves the bytes of a downloaded bfloat16 model at no loss, where the processor multiplies it
    natively; a float32 checkpoint of ours is small, bound by the number of operations, and keeps its exact weights.
    """
    if name != "auto":
        return getattr(torch, name)
    fast = fast_at_bfloat16(device)
    if device.type == "cuda":
        return torch.bfloat16 if fast else torch.float16
    return torch.bfloat16 if fast and stored == torch.bfloat16 else torch.float32


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


@contextlib.contextmanager
def threads_for(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Use one thread on the CPU where a decoding step is so small that threads would wait for each other, not work.

    On 2 cores beside other busy programs, two threads decoded 5 to 30 times slower than one, at 4 and 0.3 million
    parameters.
    """
    before = torch.get_num_threads()
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and rows * sum(p.numel() for p in model.parameters()) < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
