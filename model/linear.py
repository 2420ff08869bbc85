"""A linear layer with float32 master weights that multiplies in the dtype of the activations."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from model.int8 import Int8Matrix


class Linear(nn.Module):
    """y = W x + b. Unlike torch.nn.Linear it draws no random numbers: `model.decoder.initialize` fills it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.copies: dict[torch.dtype, Tensor] | None = None
        """Copies of the weight in other dtypes, while `sharing_casts` keeps them."""
        self.int8: Int8Matrix | None = None
        """The weight quantized to 8 bits, for decoding on a CPU; whoever changes the weight must quantize it again."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.cast_weight(x.dtype), bias)

    def cast_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight in a dtype, differentiable."""
        if torch.compiler.is_compiling() or self.copies is None or dtype == self.weight.dtype:
            return self.weight.to(dtype)
        if dtype not in self.copies:
            self.copies[dtype] = self.weight.detach().to(dtype)
        return UseCopy.apply(self.weight, self.copies[dtype])


class UseCopy(torch.autograd.Function):
    """A weight's copy in another dtype as if it had just been cast: the gradient goes to the weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


@contextlib.contextmanager
def sharing_casts(model: nn.Module) -> Iterator[None]:
    """Cast each weight once instead of in every call of its layer: for the micro-batches of one optimizer step.

    The weights must not change inside. Under torch.compile every call casts.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        layer.copies = {}
    try:
        yield
    finally:
        for layer in layers:
            layer.copies = None
