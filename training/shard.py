"""Every weight, gradient and moment divided by rows among the processes (`--shard`): PyTorch's FSDP2.

A layer's weights are gathered just before it runs, in float32, and freed after it: it computes what one process does.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import kernels
from errors import UserError
from model.decoder import Decoder


def shard(model: Decoder, device: torch.device, *, compiled: bool) -> None:
    """Divide the parameters, which are on the CPU, and move this process's part of them to the device."""
    from torch.distributed.device_mesh import init_device_mesh  # takes half a second
    from torch.distributed.fsdp import fully_shard

    if model.compute_dtype == torch.float16 or any(parameter.ndim == 0 for parameter in model.parameters()):
        raise UserError("--shard needs --dtype bfloat16 or float32, and a --norm without scalar parameters.")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into it
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    if compiled:
        for layer in model.layers:
            layer.forward = kernels.compile_model(layer.forward)  # without the hooks that gather the weights
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of the tensor. Weights may be gathered after a forward pass."""
    return hasattr(tensor, "full_tensor")


def owned_tensors(tensors: Mapping, count: int, rank: int, device: torch.device | str) -> tuple[dict, dict]:
    """Which process owns each tensor, in turns from the largest on; and the complete ones that `rank` owns."""
    by_size, owned = sorted(tensors, key=lambda key: -tensors[key].numel()), {}
    owners = {key: i % count for i, key in enumerate(by_size)}
    for key, tensor in tensors.items():
        full = tensor.full_tensor() if is_sharded(tensor) else tensor  # gathered by all, one at a time
        if owners[key] == rank:
            owned[key] = full.to(device)
    return owners, owned


def distribute_like(tensor: Tensor, like: Tensor, source: int | None = None) -> Tensor:
    """The tensor divided as `like` is, if that is divided; `source` is the process that has it, None: all have it."""
    if not is_sharded(like) or tensor.ndim == 0:
        return tensor
    return torch.distributed.tensor.distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=source)


@contextlib.contextmanager
def gathered(tensors: list[Tensor]) -> Iterator[dict[int, Tensor]]:
    """The tensors that this process owns, complete, by index. What the block writes into them is divided again."""
    if not tensors or not is_sharded(tensors[0]):
        yield dict(enumerate(tensors))
        return
    mesh, device = tensors[0].device_mesh, tensors[0].device
    owners, owned = owned_tensors(dict(enumerate(tensors)), mesh.size(), mesh.get_rank(), device)
    yield owned
    for i, tensor in enumerate(tensors):
        full = owned[i] if i in owned else tensor.to_local().new_empty(tensor.shape)
        tensor.copy_(distribute_like(full, tensor, owners[i]))
