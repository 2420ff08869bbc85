"""Sharing a machine: one process at a time in a folder (a run, a comparison, the cache), and cores to compute on."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from errors import UserError

NAME = ".lock"  # of the file in the folder; the system releases its lock when the process ends, however it ends


@contextlib.contextmanager
def locked(folder: Path, *, wait: str | None = None) -> Iterator[None]:
    """Make a folder and hold its lock inside the block.

    Where another process holds it: print `wait` to standard error and wait, or without that line raise `UserError`.
    """
    lock = FileLock(folder / NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        if wait is None:
            raise UserError(
                f"{folder} is in use by another process; wait until it ends, or give another folder."
            ) from None
        print(wait, file=sys.stderr, flush=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise UserError(f"{folder} cannot be used ({error}); give a folder that can be written.") from None
    try:
        yield
    finally:
        lock.release()


def usable_cores() -> int:
    """The CPU cores that this process may use: `taskset`, Slurm and cpusets may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
