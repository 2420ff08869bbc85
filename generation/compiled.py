"""Functions whose loops Numba compiles for this processor, once: later processes find them in a cache."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from numba import njit
from numba.core.caching import FunctionCache

from errors import note


class LoopCache(FunctionCache):
    """Numba's cache on disk, which raises errors for a damaged file and a full disk: then compile anew."""

    def load_overload(self, *arguments: object) -> object:
        try:
            return super().load_overload(*arguments)
        except Exception:  # whatever Numba raises
            note(f"the decoding step is compiled anew, as its cache in {self.cache_path} is damaged")
            with contextlib.suppress(OSError):
                self.flush()

    def save_overload(self, *arguments: object) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(*arguments)


def compiled(function: Callable, parallel: bool = False) -> Callable:
    """The loops of a function in machine code, where sums are added in any order, as vectors; NaN stays NaN."""
    loops = njit(function, parallel=parallel, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
    try:
        loops._cache = LoopCache(function)
    except RuntimeError:  # neither this folder nor the home directory can be written
        note(f"the decoding step is compiled in each process: {Path(__file__).parent} cannot be written")
    return loops
