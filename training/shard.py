"""Every weight, gradient and moment divided by rows among the processes (`--shard`): PyTorch's FSDP2.

The weights of a layer are gathered just before it runs, in float32, and freed after it: what is computed is what one
process computes. torch's modules for this are imported where they are used: that takes half a second.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from errors import UserError
from model.decoder import Decoder

Matrix = tuple[list[int], Tensor, Tensor, Tensor]  # rows of what it packs; weight, update (R, C); row squares (R, 1)


def shard(model: Decoder, device: torch.device, *, compiled: bool) -> None:
    """Divide the parameters, which are on the CPU, and move this process's part of them to the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if model.compute_dtype == torch.float16 or any(parameter.ndim == 0 for parameter in model.parameters()):
        raise UserError("--shard needs --dtype bfloat16 or float32, and a --norm whose parameters are no scalars.")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into it
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in model.layers:
        if compiled:  # without the hooks that gather the weights
            layer.forward = torch.compile(layer.forward, fullgraph=True)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """The tensor that the processes hold parts of; any other as it is. All processes must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy of this process's part of a tensor that all have, divided as the parameter is; scalars stay whole."""
    if not hasattr(parameter, "full_tensor") or tensor.ndim == 0:
        return tensor.to(parameter.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def share_out(tensors: list[Tensor], count: int) -> tuple[list[int], dict[int, Tensor]]:
    """For each tensor the process that takes it, the one with the least so far; and this process's whole ones."""
    sums, owners, share = [0] * count, [], {}
    for i, tensor in enumerate(tensors):
        owners.append(sums.index(min(sums)))
        sums[owners[i]] += tensor.numel()
        full = whole(tensor)  # one at a time
        if owners[i] == torch.distributed.get_rank():
            share[i] = full
    return owners, share


@contextlib.contextmanager
def whole_matrices(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """This process's share of the matrices, as whole ones; what the block writes into them is divided again."""
    if not matrices or not hasattr(matrices[0][1], "full_tensor"):
        yield matrices
        return
    from torch.distributed.tensor import distribute_tensor

    mesh = matrices[0][1].device_mesh
    packed = [torch.cat([weight, squares, update], dim=1) for _, weight, update, squares in matrices]  # (R, 2 C + 1)
    owners, share = share_out(packed, mesh.size())
    split = {i: full.tensor_split([len(full[0]) // 2, len(full[0]) // 2 + 1], dim=1) for i, full in share.items()}
    yield [(matrices[i][0], weight, update, squares) for i, (weight, squares, update) in split.items()]
    for i, (_, weight, _, squares) in enumerate(matrices):
        shape = len(weight), weight.shape[1] + 1
        full = share[i][:, : shape[1]].contiguous() if i in share else squares.to_local().new_empty(shape)
        part = distribute_tensor(full, mesh, weight.placements, src_data_rank=owners[i])
        weight.copy_(part[:, :-1])
        squares.copy_(part[:, -1:])
