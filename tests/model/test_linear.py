"""The linear layer: micro-batches share one cast of its weight, and nothing else changes by that."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model.linear import Linear, sharing_casts

BF16 = torch.bfloat16


class CountCasts(TorchDispatchMode):
    """Counts casts of the weight and of its gradients."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and arguments[0].shape == (5, 3)
        return function(*arguments, **(kwargs or {}))


@pytest.fixture
def layers():
    """Two equal layers."""
    pair = Linear(3, 5, bias=True), Linear(3, 5, bias=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for ours, other in zip(*(layer.parameters() for layer in pair), strict=True):
            ours.copy_(torch.randn(ours.shape, generator=generator) + 0.3)
            other.copy_(ours)
    return pair


def test_micro_batches_share_a_cast_and_every_step_makes_a_new_one(layers):
    shared, other = layers
    inputs = [torch.randn(7, 3, dtype=BF16) + 0.3 for _ in range(4)]
    upstream = [torch.randn(7, 5, dtype=BF16) for _ in range(4)]
    for step in range(3):
        with CountCasts() as casts, sharing_casts(torch.nn.Sequential(shared)):
            for x, grad in zip(inputs, upstream, strict=True):
                shared(x).backward(grad)
        assert casts.count == 1 + 4  # the weight, and its gradient from each micro-batch
        for x, grad in zip(inputs, upstream, strict=True):
            F.linear(x, other.weight.to(BF16), other.bias.to(BF16)).backward(grad)
        for ours, exact in zip(shared.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, exact.grad) and ours.grad.dtype == torch.float32, step
        for layer in layers:
            # Changes weights in place without changing their version: no copy may outlive the step.
            torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()
            layer.zero_grad(set_to_none=True)


def test_copies_end_with_an_error_inside_and_dtypes_do_not_mix(layers):
    layer, other = layers
    x = torch.randn(7, 3) + 0.3
    with pytest.raises(ZeroDivisionError), sharing_casts(layer):
        for dtype in (BF16, torch.float16, torch.float32, BF16):
            assert torch.equal(layer(x.to(dtype)), other(x.to(dtype)))
        assert layer.copies.keys() == {BF16, torch.float16}
        _ = 1 / 0
    assert layer.copies is None


def test_a_frozen_weight_passes_the_gradient_on(layers):
    x, upstream = torch.randn(7, 3, dtype=BF16, requires_grad=True), torch.randn(7, 5, dtype=BF16)
    ours, other = (layer.requires_grad_(False) for layer in layers)
    with sharing_casts(ours):
        (mine,) = torch.autograd.grad(ours(x), x, upstream)
    assert torch.equal(mine, torch.autograd.grad(other(x), x, upstream)[0])
