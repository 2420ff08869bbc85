"""One optimizer step on given micro-batches: forward, backward, clip, update."""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from data.batches import IGNORED, Batch
from errors import UserError
from training.processes import Processes, full_tensor


@dataclass(frozen=True)
class StepResult:
    step: int  # done so far, this one included
    loss: float  # mean of the batch before the update, nats per token
    gradient_norm: float  # before clipping; infinite when float16 overflowed and the update was skipped
    learning_rate: float  # learning rate before the multiplier of a parameter group
    step_seconds: float  # wall-clock time of the step


class Diverged(UserError):
    """The loss or the gradient is not finite."""


def split_batch(batch: Batch, size: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Cut a batch, int64 (B, T), into micro-batches of at most `size` sequences, still on the host."""
    tensors = [torch.from_numpy(array) for array in batch if array is not None]
    if device.type == "cuda":
        tensors = [tensor.pin_memory() for tensor in tensors]  # so that copying does not block the host
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


def train_step(
    model: nn.Module, micro_batches: list[tuple[torch.Tensor, ...]], optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler, clip: float, processes: Processes, device: torch.device,
) -> tuple[float, float]:  # fmt: skip
    """Take one optimizer step; returns the loss in nats per token and the norm of the gradient before clipping.

    micro_batches: this process's inputs, targets and, where attention needs them, documents, each int64 (b, T), on the
    host or the device. The loss is the mean over the tokens of all processes whose target is not `IGNORED`.
    If float16 gradients overflow, the scaler skips the update and the returned norm is infinite. Any other loss or
    gradient that is not finite raises `Diverged` and leaves the weights as they were.
    """
    predicted = sum(int((targets != IGNORED).sum()) for _, targets, *_ in micro_batches)
    predicted = max(1, processes.sum(predicted))
    # Gradients are averaged over the processes: times their number, that is the sum.
    token_weight = torch.full((), processes.count / predicted, device=device)

    total = torch.zeros((), device=device)
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # of DistributedDataParallel
    for i, micro_batch in enumerate(micro_batches):
        tensors = [tensor.to(device, non_blocking=device.type == "cuda") for tensor in micro_batch]
        is_last = i == len(micro_batches) - 1  # its backward pass exchanges the gradients of all
        with contextlib.nullcontext() if is_last else no_sync():
            loss = model(*tensors, token_weight=token_weight)
            scaler.scale(loss).backward()
        total += loss.detach()
    loss = processes.sum(total.item()) / processes.count

    scaler.unscale_(optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradient_norm = full_tensor(nn.utils.get_total_norm([parameter.grad for parameter in trained]))
    finite = math.isfinite(gradient_norm.item())
    if not math.isfinite(loss) or not (finite or scaler.is_enabled()):
        raise Diverged(f"the loss is {loss:g} and the norm of the gradient {gradient_norm.item():g}")
    nn.utils.clip_grads_with_norm_(trained, clip, gradient_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss, gradient_norm.item() if finite else math.inf
