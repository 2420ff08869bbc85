"""Data-parallel training in several processes, one for each GPU, started by `torchrun --nproc-per-node N train.py`.

With a single process there is no group: sums and maxima return their arguments, and everything else does nothing.
"""

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process's place among all of them."""

    rank: int = 0
    count: int = 1
    store: dist.Store | None = None  # keys that all processes see
    device: torch.device | None = None  # device of this process; a single one chooses its own

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def main_first(self, key: str) -> Iterator[None]:
        """A block that the other processes enter when the main one has left it. Not a collective: it may take hours."""
        if not self.is_main:
            self.store.wait([key], timedelta(hours=6))
        yield
        if self.count > 1 and self.is_main:
            self.store.set(key, "")

    def folder_of_main(self, folder: Path) -> Path:
        """The run folder, which only the main process knows; the others get its absolute path."""
        if self.count > 1 and self.is_main:
            self.store.set("folder", str(folder.absolute()))
        return folder if self.is_main else Path(self.store.get("folder").decode())

    def check_equal(self, **values: object) -> None:
        """Raise `UserError` in all processes unless each has the same values, by their `repr`."""
        for name, value in values.items():
            digest = int(hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest(), 16)  # exact as a float64
            if -self.max(-digest) != self.max(digest):
                raise UserError(f"the {name} of the processes differ; give all the same files, settings and Python.")

    def wait(self) -> None:
        """Return once all processes have called this."""
        self.max(0)

    def max(self, value: float) -> float:
        """The maximum of a value over the processes, which wait for each other."""
        return self.sum(value, operation=dist.ReduceOp.MAX)[0]

    def sum(self, *values: float, operation: dist.ReduceOp = dist.ReduceOp.SUM) -> list[float]:
        """Each value summed over the processes, in float64."""
        if self.count == 1:
            return list(values)
        combined = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(combined, operation)
        return combined.tolist()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, with gradients averaged over the processes in each backward pass."""
        if self.count == 1:
            return model
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 renames broadcast_buffers
            return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


ALONE = Processes()


def start_processes(device_name: str, timeout_minutes: int) -> Processes:
    """Join the process group if several processes were started; each waits `timeout_minutes` for the others."""
    count, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if count == 1:
        return ALONE
    on_cuda = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
    if on_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(f"there are only {torch.cuda.device_count()} CUDA devices here; start one process for each.")
    if not on_cuda and device_name not in ("auto", "cpu"):
        raise UserError(f"--device {device_name} cannot be shared by {count} processes; use cuda or cpu.")
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    store, rank, count = next(dist.rendezvous("env://"))
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    return Processes(rank, count, store, device)


@contextlib.contextmanager
def explain_lost_process() -> Iterator[None]:
    """Turn what Gloo and NCCL raise when another process has ended, or hangs, into a `UserError`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise UserError("another process ended or does not answer; --resume takes the last save, if any.") from error


def finish_processes(processes: Processes) -> None:
    """Wait until every process is done, the main one with its summary, and leave the process group."""
    if processes.count > 1:
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.2)  # torch 2.13: at once, deleting the model and a thread of Gloo may wait for each other
