"""Data-parallel training in several processes under torchrun.

The process group exists only when torchrun started more than one process. With a single one, sums and maxima return
their arguments, and everything else here does nothing.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from errors import UserError

# How long the other processes wait at most while the main one downloads and prepares the text.
TIMEOUT = timedelta(hours=6)


@dataclass(frozen=True)
class Processes:
    """This process's place among all of them."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.count > 1:
            dist.barrier()

    def sum(self, *values: float, device: torch.device) -> list[float]:
        """Each value summed over the processes, in float64."""
        return self.reduce(values, device, dist.ReduceOp.SUM)

    def max(self, *values: float, device: torch.device) -> list[float]:
        """The maximum of each value over the processes, in float64."""
        return self.reduce(values, device, dist.ReduceOp.MAX)

    def reduce(self, values: tuple[float, ...], device: torch.device, operation: dist.ReduceOp) -> list[float]:
        if self.count == 1:
            return list(values)
        combined = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(combined, operation)
        return combined.tolist()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, with gradients averaged over the processes in each backward pass."""
        return model if self.count == 1 else DistributedDataParallel(model, broadcast_buffers=False)


def is_main_process() -> bool:
    """Whether this is the main process, for use before `start_processes`."""
    return number("WORLD_SIZE", 1) == 1 or number("RANK", 0) == 0


def number(name: str, default: int = 0) -> int:
    """An environment variable that torchrun sets to a number."""
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise UserError(f"the environment has {name} {value!r}, which is not a number; unset it, or start torchrun.")
    return int(value)


def start_processes(device_name: str) -> tuple[Processes, str]:
    """Join the process group if torchrun started several processes; also returns the device name of this process."""
    count = number("WORLD_SIZE", 1)
    if count == 1:
        return Processes(), device_name
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"the environment has WORLD_SIZE {count} but no {', '.join(missing)}; "
            f"start several processes with torchrun, or unset WORLD_SIZE."
        )
    processes = Processes(number("RANK"), count, number("LOCAL_RANK"))
    if processes.rank >= count or number("MASTER_PORT") >= 2**16:
        raise UserError(
            f"the environment has RANK {processes.rank} of WORLD_SIZE {count}, and MASTER_PORT "
            f"{os.environ['MASTER_PORT']}, which cannot be; start the processes with torchrun."
        )
    on_cuda = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
    if on_cuda and processes.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"more processes were started than the {torch.cuda.device_count()} CUDA devices here; start one per device."
        )
    if not on_cuda and device_name not in ("auto", "cpu"):
        raise UserError(f"--device {device_name} cannot be shared by {count} processes; use cuda or cpu.")
    device_name = f"cuda:{processes.local_rank}" if on_cuda else "cpu"
    if on_cuda:
        torch.cuda.set_device(device_name)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=TIMEOUT)
    return processes, device_name


def finish_processes(processes: Processes) -> None:
    """Leave the process group.

    A thread of Gloo needs Python's lock to release the tensors of the last collective. Deleting the model holds the
    lock and waits for that thread: with torch 2.13, a process that ends too soon after a collective may hang. The sleep
    gives the thread the lock first.
    """
    if processes.count > 1:
        dist.destroy_process_group()
        time.sleep(0.2)
