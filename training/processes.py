"""Training in several processes, one for each GPU, started by `torchrun --nproc-per-node N train.py`; with `--shard`,
weights, gradients and moments are divided among them by rows: PyTorch's FSDP2.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import kernels
from errors import UserError
from files import digest
from model.decoder import Decoder
from training.settings import MachineSettings


@dataclass(frozen=True)
class Processes:
    """This process's place among all of them."""

    rank: int = 0
    count: int = 1
    store: dist.Store | None = None  # keys that all processes see
    device: torch.device | None = None  # device of this process; a single one chooses its own
    sharded: bool = False  # whether the weights are divided among them

    @contextlib.contextmanager
    def main_first(self, folder: Path) -> Iterator[Path]:
        """The main process runs the block, perhaps for hours, and then the others; all get the main one's folder."""
        if self.rank > 0:
            self.store.wait(["folder"], timedelta(hours=6))
            folder = Path(self.store.get("folder").decode())
        yield folder
        if self.rank == 0 and self.count > 1:
            self.store.set("folder", str(folder.absolute()))

    def check_equal(self, **values: object) -> None:
        """Raise `UserError` in all processes unless each has the same values, by their `repr`."""
        for name, value in values.items():
            number = int(digest(value)[:12], 16)  # exact as a float64
            if self.reduce(number, dist.ReduceOp.MAX) != self.reduce(number, dist.ReduceOp.MIN):
                raise UserError(f"the {name} of the processes differ; give all the same files, settings and Python.")

    def wait(self) -> None:
        """Return once all processes have called this."""
        self.max(0)

    def max(self, value: float) -> float:
        return self.reduce(value, dist.ReduceOp.MAX)

    def sum(self, value: float) -> float:
        return self.reduce(value, dist.ReduceOp.SUM)

    def reduce(self, value: float, operation: dist.ReduceOp) -> float:
        """The values of all processes, which wait for each other, as one, in float64."""
        if self.count == 1:
            return value
        result = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(result, operation)
        return result.item()


ALONE = Processes()


def start_processes(machine: MachineSettings) -> Processes:
    """Join the process group if several processes were started; each waits `timeout_minutes` for the others."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_cuda = machine.device == "cuda" or (machine.device == "auto" and torch.cuda.is_available())
    if on_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(f"there are only {torch.cuda.device_count()} CUDA devices here; start one process for each.")
    if not on_cuda and machine.device not in ("auto", "cpu"):
        raise UserError(f"--device {machine.device} cannot be shared by {count} processes; use cuda or cpu.")
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    store, rank, count = next(dist.rendezvous("env://"))
    timeout = timedelta(minutes=machine.timeout_minutes)
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    return Processes(rank, count, store, device, machine.shard)


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


def shard(model: Decoder, device: torch.device, *, compiled: bool) -> None:
    """Divide the parameters, which are on the CPU. Those of a layer are gathered, in float32, only while it runs."""
    from torch.distributed.device_mesh import init_device_mesh  # takes half a second
    from torch.distributed.fsdp import fully_shard

    if model.compute_dtype == torch.float16 or any(parameter.ndim == 0 for parameter in model.parameters()):
        raise UserError("--shard needs --dtype bfloat16 or float32, and a --norm without scalar parameters.")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into it
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if compiled:
        for layer in model.layers:
            layer.forward = kernels.compile_model(layer.forward)  # without the hooks that gather the weights
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of the tensor. Weights may be gathered after a forward pass."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """The complete tensor. Where it is divided, all processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def owner_ranks(tensors: Mapping, count: int) -> dict:
    """The rank of the process that owns each tensor, in turns from the largest on."""
    by_size = sorted(tensors, key=lambda key: -tensors[key].numel())
    return {key: i % count for i, key in enumerate(by_size)}


def owned_tensors(tensors: Mapping, count: int, rank: int, device: str | None = None) -> dict:
    """The complete tensors that `rank` owns, of the first `count` processes. All processes must call this."""
    owners = owner_ranks(tensors, count)
    owned = {}
    for key, tensor in tensors.items():
        full = full_tensor(tensor)  # gathered by all, one at a time
        if owners[key] == rank:
            owned[key] = full.to(device or full.device)
    return owned


def distribute_like(tensor: Tensor, like: Tensor, source: int | None = None) -> Tensor:
    """The tensor divided as `like` is, if that is divided; `source` is the process that has it, None: all have it."""
    if not is_sharded(like) or tensor.ndim == 0:
        return tensor
    return dist.tensor.distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=source)


@contextlib.contextmanager
def gathered(tensors: Mapping) -> Iterator[Mapping]:
    """The tensors that this process owns, complete. What the block writes into them is divided again."""
    if not any(map(is_sharded, tensors.values())):
        yield tensors
        return
    rank, count = dist.get_rank(), dist.get_world_size()
    owners = owner_ranks(tensors, count)
    owned = owned_tensors(tensors, count, rank)
    yield owned
    for key, tensor in tensors.items():
        full = owned[key] if key in owned else tensor.to_local().new_empty(tensor.shape)
        tensor.copy_(distribute_like(full, tensor, owners[key]))
