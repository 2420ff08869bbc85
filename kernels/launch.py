"""What Triton launches share: rows, tiles, the limits of a device and, for training, registration as torch operators.

A launch of training is an operator `torch.ops.prenorm.NAME` that returns new tensors and writes to none of its inputs,
so that torch.compile accepts it (fullgraph) and CUDA graphs capture it. An operator cannot return an optional tensor:
an empty one stands for None. The launches of `decode` are plain functions, which write into buffers.

Nothing is autotuned: launch geometry is a closed formula of the shape. Triton compiles a kernel for sizes and strides
that 16 divides, to read 16 bytes at a time, and again for others. In training the number of tokens is excepted
(`do_not_specialize`) and never causes a recompile; `decode` is compiled for each number of sequences.
"""

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor

LIBRARY = torch.library.Library("prenorm", "DEF")


def register_op(fake: Callable) -> Callable[[Callable], Callable]:
    """Register a function as an operator of its name; `fake` makes outputs of the same shapes, dtypes and strides."""

    def register(function: Callable) -> Callable:
        @wraps(function)
        def launch(*arguments):
            device = arguments[0].device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*arguments)
            with torch.cuda.device(device):  # Triton launches on the current device, wherever its tensors are
                return function(*arguments)

        schema = torch.library.infer_schema(function, mutates_args=(), op_name=function.__name__)
        name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CUDA", "CPU"):  # CUDA is also ROCm; the CPU is for Triton's interpreter
            LIBRARY.impl(name, launch, key)
        torch.library.register_fake(f"prenorm::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.prenorm, name)

    return register


def with_unit_stride(x: Tensor) -> Tensor:
    """x itself where elements of the last dimension are neighbours, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """x (..., D) as (M, D) whose rows are contiguous and one stride apart; copies only if no such view exists."""
    return with_unit_stride(x.reshape(-1, x.shape[-1]))


def tile_width(width: int) -> int:
    """Columns of a tile that holds a complete row: the next power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU. Triton's interpreter on a CPU runs programs one after another: as if there were 4."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def max_warps(device: torch.device) -> int:
    """Warps of the largest block, 1,024 threads on CUDA and ROCm: 32, or 16 where a warp has 64 threads (AMD)."""
    return 1024 // torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
