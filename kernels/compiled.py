"""Functions whose loops Numba compiles for this processor, once: later processes find them in a cache."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from filelock import FileLock
from numba.core.caching import FunctionCache
from numba.core.codegen import CPUCodeLibrary
from numba.extending import overload
from torch import Tensor

from errors import note

optimize = CPUCodeLibrary._optimize_final_module


def optimize_private_copies(library: CPUCodeLibrary) -> None:
    """Numba optimizes copies of the functions that it links, but the process that compiles would run the originals.

    Those round differently. Copies that are private are run here as well as by the processes that load them. Only in
    kernels/cpu.py, whose loops train: with those of generation/cpu_step.py, which call each other, processes crashed.
    """
    functions = [*library._final_module.functions]
    if any("kernels3cpu" in function.name for function in functions):  # kernels.cpu, as symbols have it
        linked = {function.name for part in library._linking_libraries for function in part.get_defined_functions()}
        for function in functions:
            if function.name in linked and not function.is_declaration:
                function.linkage = "internal"
    optimize(library)


CPUCodeLibrary._optimize_final_module = optimize_private_copies


class LoopCache(FunctionCache):
    """Numba's cache on disk, which raises errors for a damaged file and a full disk: then compile anew."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)  # which looks at changes of the function's own file
        self._cache_file._source_stamp = self._cache_file._source_stamp, Path(__file__).stat().st_mtime_ns

    def load_overload(self, *arguments: object) -> object:
        try:
            machine_code = super().load_overload(*arguments)
        except Exception:  # whatever Numba raises
            note(f"loops are compiled anew, as their cache in {self.cache_path} is damaged")
            with contextlib.suppress(OSError):
                self.flush()
            return None
        if machine_code is None:
            note("compiling loops for this processor, once: a few seconds")
        return machine_code

    def save_overload(self, *arguments: object) -> None:
        # Two processes at once would choose one file for different loops, and load the wrong ones.
        with contextlib.suppress(OSError, NotImplementedError), FileLock(f"{self._cache_file._index_path}.lock"):
            super().save_overload(*arguments)


def compiled(function: Callable, parallel: bool = False) -> Callable:
    """The loops of a function in machine code, where sums are added in any order, as vectors; NaN stays NaN."""
    any_order = {"reassoc", "contract", "nsz", "arcp"}
    loops = numba.njit(function, parallel=parallel, error_model="numpy", fastmath=any_order)
    try:
        loops._cache = LoopCache(function)
    except RuntimeError:  # neither this folder nor the home directory can be written
        note(f"loops are compiled in each process: {Path(__file__).parent} cannot be written")
    return loops


def widen(x):  # a stub: Numba compiles calls of it as `_widen` below
    """A number as float32; a uint16 holds the bits of a bfloat16, which are the upper half of a float32's."""


@overload(widen)
def _widen(x):
    if x == numba.uint16:
        return lambda x: np.uint32(np.uint32(x) << 16).view(np.float32)
    return lambda x: np.float32(x)


def store(array, i, x):  # a stub: Numba compiles calls of it as `_store` below
    """array[i] = x, a float32; rounded to the nearest bfloat16, ties to even, if the array holds the bits of those."""


@overload(store)
def _store(array, i, x):
    def store_bits(array, i, x):
        bits = np.float32(x).view(np.uint32)
        array[i] = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)

    def store_float(array, i, x):
        array[i] = x

    return store_bits if array.dtype == numba.uint16 else store_float


def use_threads_of_torch() -> None:
    threads = torch.get_num_threads()
    if numba.get_num_threads() != min(threads, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        torch.set_num_threads(threads)  # Numba has just set the number for all of OpenMP, which torch uses too


def call(loops: Callable, *arguments: object) -> None:
    """Call compiled loops, with contiguous arrays for tensors, on as many threads as torch uses."""
    use_threads_of_torch()
    loops(*(to_array(x) if isinstance(x, Tensor) else x for x in arguments))


def to_array(x: Tensor) -> np.ndarray:
    """The numbers of a tensor, contiguous; those of bfloat16 as their bits, uint16."""
    x = x.detach().contiguous()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
