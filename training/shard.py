"""Every weight, gradient and moment divided by rows among the processes (`--shard`): PyTorch's FSDP2.

The weights of a layer are gathered just before it runs, in float32, and freed after it: what is computed is what one
process computes. torch's modules for this are imported by `shard`, because that takes half a second.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping

import torch

from errors import UserError
from model.decoder import Decoder


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


def share_out(tensors: Mapping, count: int, device: torch.device | str) -> tuple[list[int], dict]:
    """For each tensor the process that takes it, the one with the least so far; and whole copies of this process's."""
    sums, owners, share = [0] * count, [], {}
    for key, tensor in tensors.items():
        owners.append(sums.index(min(sums)))
        sums[owners[-1]] += tensor.numel()
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # gathered by all, one at a time
        if owners[-1] == torch.distributed.get_rank():
            share[key] = full.to(device, copy=True).contiguous()
    return owners, share


@contextlib.contextmanager
def whole_matrices(matrices: list[tuple]) -> Iterator[list[tuple]]:
    """This process's share of the matrices, as whole ones; what the block writes into them is divided again.

    Each is: the rows of what it packs, its weight and update (R, C), and the mean squares of its rows (R, 1).
    """
    if not matrices or not hasattr(matrices[0][1], "full_tensor"):
        yield matrices
        return
    mesh = matrices[0][1].device_mesh
    packed = {i: torch.cat([w, squares, update], dim=1) for i, (_, w, update, squares) in enumerate(matrices)}
    owners, share = share_out(packed, mesh.size(), matrices[0][1].device)  # (R, 2 C + 1) each
    split = {i: full.tensor_split([len(full[0]) // 2, len(full[0]) // 2 + 1], dim=1) for i, full in share.items()}
    yield [(matrices[i][0], weight, update, squares) for i, (weight, squares, update) in split.items()]
    for i, (_, weight, _, squares) in enumerate(matrices):
        shape = len(weight), weight.shape[1] + 1
        full = share[i][:, : shape[1]].contiguous() if i in share else squares.to_local().new_empty(shape)
        part = torch.distributed.tensor.distribute_tensor(full, mesh, weight.placements, src_data_rank=owners[i])
        weight.copy_(part[:, :-1])
        squares.copy_(part[:, -1:])
