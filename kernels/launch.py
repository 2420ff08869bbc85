"""What all Triton launches share: registration as torch operators, rows, tiles and device limits.

Each kernel launch is an operator `torch.ops.prenorm.NAME` that returns new tensors and writes to none of its inputs, so
that torch.compile accepts it (fullgraph) and CUDA graphs capture it. An operator cannot return an optional tensor:
where an output does not exist for the given inputs, an empty tensor (0 elements) stands for None. Launch geometry is a
closed formula of the shape: nothing is autotuned, and the number of tokens never causes a recompile.
Triton compiles a kernel once for sizes and strides that 16 divides, which are read 16 bytes at a time, and once for
others; of the number of tokens (`do_not_specialize`) it knows nothing.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import NamedTuple

import torch
from torch import Tensor

LIBRARY = torch.library.Library("prenorm", "DEF")


def register_op(schema: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Register a function as the operator `schema`; `fake` makes outputs of the same shapes, dtypes and strides.

    The functions serve CUDA (and ROCm, which torch also calls "cuda"); the CPU is for Triton's interpreter.
    """

    def register(function: Callable) -> Callable:
        @wraps(function)
        def run(*arguments):
            device = arguments[0].device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*arguments)
            with torch.cuda.device(device):  # Triton launches on the current device, wherever its tensors are
                return function(*arguments)

        name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CUDA", "CPU"):
            LIBRARY.impl(name, run, key)
        torch.library.register_fake(f"prenorm::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.prenorm, name)

    return register


def as_rows(x: Tensor) -> Tensor:
    """x (..., D) as (M, D) whose rows are contiguous and one stride apart; copies only if no such view exists."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class DeviceLimits(NamedTuple):
    """What launch geometry needs to know about a device."""

    multiprocessors: int
    max_warps: int
    """Warps in the largest block, 1,024 threads on CUDA and ROCm: 32, or 16 where a warp has 64 threads (AMD)."""


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a GPU. Triton's interpreter on a CPU runs programs one after another: it gets those of a tiny GPU."""
    if device.type != "cuda":
        return DeviceLimits(multiprocessors=4, max_warps=32)
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits(found.multi_processor_count, 1024 // found.warp_size)


def tile_width(width: int) -> int:
    """Columns of a tile that holds a complete row: the next power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())
