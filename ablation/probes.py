"""What happens inside a model while it trains: cheap looks that explain differences between norms.

Of every norm's input s, the residual stream: how large the mean of a row is beside its spread, and beside its length
(the cosine with the vector of ones); the largest activation. Of a step: how far it moves the weights.
"""

import math

import numpy as np
import torch
from torch import Tensor

from model.decoder import Decoder
from model.norm import Norm


@torch.no_grad()
def of_streams(model: Decoder, tokens: np.ndarray, device: torch.device) -> dict[str, list[float] | float]:
    """Per norm in order of depth, averaged over the tokens (B, T) int64 of one evaluation."""
    means, cosines, largest = [], [], []

    def look(module: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        s = outputs[1].float()
        mean = s.mean(-1)
        means.append((mean.abs() / s.std(-1, correction=0).clamp(min=1e-20)).mean().item())
        length = torch.linalg.vector_norm(s, dim=-1).clamp(min=1e-20)
        cosines.append((mean.abs() * math.sqrt(s.shape[-1]) / length).mean().item())
        largest.append(s.abs().max().item())

    hooks = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, Norm)]
    training = model.training
    try:
        model.eval()(torch.from_numpy(tokens).to(device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {"mean_over_deviation": means, "cosine_with_ones": cosines, "largest_activation": max(largest)}


def copy_of_weights(model: Decoder) -> list[Tensor]:
    """The weights as they are."""
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def update_share(model: Decoder, before: list[Tensor]) -> float:
    """Length of a step beside the length of the weights."""
    moved = sum((p - old).double().square().sum().item() for p, old in zip(model.parameters(), before, strict=True))
    return math.sqrt(moved / sum(old.double().square().sum().item() for old in before))
