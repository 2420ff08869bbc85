"""A linear layer with float32 master weights that multiplies in the dtype of the activations."""

import torch
from torch import Tensor, nn

import kernels


class Linear(nn.Module):
    """y = W x + b. Unlike torch.nn.Linear it draws no random numbers: `model.decoder.initialize` fills it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        # A frozen copy of the weight for decoding on a CPU, made by `generation.steps`: integers, a scale of each row.
        self.int8: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)
