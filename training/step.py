"""One optimizer step: micro-batches, gradient, clipping, update.

Every token of the whole batch weighs the same, however the batch is cut into micro-batches and processes: each part's
summed loss is divided by the number of predicted tokens of all parts.
"""

import contextlib
import math

import numpy as np
import torch
from torch import nn

from errors import UserError
from training.processes import Processes

MicroBatches = list[tuple[torch.Tensor, torch.Tensor]]


def micro_batches(inputs: np.ndarray, targets: np.ndarray, size: int, device: torch.device) -> MicroBatches:
    """Cut a batch (B, T) into micro-batches of at most `size` sequences, on the device."""

    def parts(array: np.ndarray) -> list[torch.Tensor]:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            return list(tensor.pin_memory().to(device, non_blocking=True).split(size))
        return list(tensor.to(device).split(size))

    return list(zip(parts(inputs), parts(targets), strict=True))


def backward(
    model: nn.Module,
    batches: MicroBatches,
    predicted: float,
    scaler: torch.amp.GradScaler,
    processes: Processes,
    device: torch.device,
) -> float:
    """Leave the gradient of the batch's mean loss (times the scaler's scale) in the parameters; returns that loss.

    predicted: the tokens that are predicted in the batches of all processes together.
    """
    total = torch.zeros((), device=device)
    for i, (inputs, targets) in enumerate(batches):
        last = i == len(batches) - 1
        with contextlib.nullcontext() if last or processes.count == 1 else model.no_sync():
            loss = model(inputs, targets).sum() / max(1, predicted)
            scaler.scale(loss * processes.count).backward()  # processes average their gradients, hence times count
        total += loss.detach()
    return processes.sum(total.item(), device=device)[0]


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip: float, loss: float
) -> float:
    """Clip the gradient and update the weights; returns the gradient's norm before clipping.

    Infinite under float16 means that the scaler skipped this update. Otherwise a loss or gradient that is not finite
    raises `Diverged`, and the weights are as they were before the step.
    """
    scaler.unscale_(optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in trained])
    finite = math.isfinite(norm.item())
    if not math.isfinite(loss) or not (finite or scaler.is_enabled()):
        raise Diverged(f"the loss is {loss:g} and the largest gradient {largest_gradient(model)}")
    nn.utils.clip_grads_with_norm_(trained, clip, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm.item() if finite else math.inf


class Diverged(UserError):
    """The loss or the gradient is not finite."""


def largest_gradient(model: nn.Module) -> str:
    """The largest gradient of the step, as `value in parameter`; one that is not a number counts as the largest."""
    values = {
        name: parameter.grad.abs().max().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    name = max(values, key=lambda name: math.inf if math.isnan(values[name]) else values[name])
    return f"{values[name]:.3g} in {name}"
