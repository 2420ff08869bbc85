"""What all Triton launches share: the operators that torch sees, rows with a stride, and launch geometry.

Each kernel launch is an operator `torch.ops.prenorm.NAME` that returns new tensors and writes to nothing it is given,
so that torch.compile takes it whole (fullgraph) and CUDA graphs capture it. Geometry is a closed formula of the shape:
nothing is autotuned, and no number of tokens reaches the compiler.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

LIBRARY = torch.library.Library("prenorm", "DEF")


def operator(schema: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Register a function as the operator `schema`; `fake` makes outputs of the same shapes, dtypes and strides.

    The functions serve CUDA (and ROCm, which has that name in torch); the CPU is for Triton's interpreter.
    """

    def register(function: Callable) -> Callable:
        @wraps(function)
        def run(*arguments):
            device = arguments[0].device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*arguments)
            with torch.cuda.device(device):  # Triton launches on the current device, whatever its tensors are on
                return function(*arguments)

        name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CUDA", "CPU"):
            LIBRARY.impl(name, run, key)
        torch.library.register_fake(f"prenorm::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.prenorm, name)

    return register


def as_rows(x: Tensor) -> Tensor:
    """x (..., D) as (M, D) whose rows are contiguous, one stride apart; copies only what cannot be seen that way."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def unit(*sizes: int) -> int:
    """8 if it divides all sizes and strides, else 1.

    Kernels take sizes and strides in this unit. Triton widens loads to 128 bits for what it knows to be divisible, and
    of an argument it knows divisibility by 16 or nothing: hidden size 4,104 would be read 2 bytes at a time. Multiplied
    by a constant 8 in the kernel, every multiple of 8 is known to be one, without compiling anew for each size.
    """
    return 8 if all(size % 8 == 0 for size in sizes) else 1


class Properties(NamedTuple):
    """What launch geometry needs to know of a device."""

    multiprocessors: int
    max_warps: int
    """Warps in a block of 1,024 threads, the most that CUDA and ROCm run: AMD's have 64 threads."""
    copy_engine: bool
    """Whether tiles travel by Hopper's tensor memory accelerator, which needs no registers for addresses."""


@cache
def properties(device: torch.device) -> Properties:
    """Of a GPU; on a CPU, where Triton's interpreter runs programs one after another, of a very small one."""
    if device.type != "cuda":
        return Properties(multiprocessors=4, max_warps=32, copy_engine=True)
    found = torch.cuda.get_device_properties(device)
    hopper = torch.version.hip is None and (found.major, found.minor) >= (9, 0)
    return Properties(found.multi_processor_count, 1024 // found.warp_size, hopper)


def block_of(width: int) -> int:
    """The tile that holds a row: the next power of two, at least 16."""
    return max(16, next_power_of_2(width))
