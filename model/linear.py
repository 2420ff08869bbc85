"""A linear layer with float32 master weights that multiplies in the dtype of the activations."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.int8 import Int8Matrix


class Linear(nn.Module):
    """y = W x + b. Unlike torch.nn.Linear it draws no random numbers: `model.decoder.initialize` fills it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.int8: Int8Matrix | None = None
        """The weight quantized to 8 bits, for decoding on a CPU; whoever changes the weight must quantize it again."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)
