"""One process or many: data parallel training under torchrun, and nothing at all when there is one process.

The process group exists only when torchrun started more than one process; every function here is then a sum or a
barrier over them, and otherwise does nothing.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and saves."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            dist.barrier()

    def sum(self, values: list[float], device: torch.device) -> list[float]:
        """Sum each value over the processes (float64 where the device has it)."""
        if self.count == 1:
            return values
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = torch.tensor(values, dtype=dtype, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, its gradients averaged over the processes after each backward pass."""
        return model if self.count == 1 else DistributedDataParallel(model)


def start(device_name: str) -> tuple[Processes, str]:
    """Join the process group if torchrun started several processes; returns also this process's device name."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Processes(), device_name
    processes = Processes(int(os.environ["RANK"]), count, int(os.environ["LOCAL_RANK"]))
    on_cuda = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
    if on_cuda:
        device_name = f"cuda:{processes.local_rank}"
        torch.cuda.set_device(device_name)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    return processes, device_name


def finish(processes: Processes) -> None:
    """Leave the process group."""
    if processes.count > 1:
        dist.destroy_process_group()
