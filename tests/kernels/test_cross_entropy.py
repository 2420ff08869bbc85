"""`linear_cross_entropy` against float64.

Tolerances: float32 sums over a hundred products and a few hundred classes: 1e-6. In bfloat16 logits are rounded
(1.66e-3 of about 4, so 7e-3 nats on each loss of about 8) and so are the gradients: 2e-3 and 5e-3.
"""

import pytest
import torch
from torch.nn import functional as F

N, D, V = 300, 48, 211  # more rows than one chunk of the CPU's


def inputs(draw, dtype=torch.float32):
    x, weight = draw(N, D).to(dtype), draw(V, D, mean=0.05, std=0.4)
    targets = torch.arange(N) * 7 % V
    targets[::5] = -100
    return x, weight, targets


def definition(x, weight, targets):
    log_probabilities = torch.log_softmax(x @ weight.T, dim=-1)
    chosen = -log_probabilities.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == -100, torch.zeros_like(chosen), chosen)


@pytest.mark.parametrize(("dtype", "loss", "gradient"), [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 2e-3, 5e-3)])
def test_losses_and_gradients_equal_the_float64_definition(kernel, draw, relative, dtype, loss, gradient):
    x, weight, targets = inputs(draw, dtype)
    upstream = draw(N)  # one for each token, as from gradient accumulation and masks

    def run(function, x, weight):
        x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
        losses = function(x, weight, targets)
        return losses, *torch.autograd.grad(losses, (x, weight), upstream.to(losses.dtype))

    actual = run(kernel.linear_cross_entropy, x, weight)
    expected = run(definition, x.double(), weight.to(dtype).double())
    assert [tensor.dtype for tensor in actual] == [torch.float32, dtype, torch.float32]
    assert relative(actual[0], expected[0]) < loss
    assert relative(actual[1], expected[1]) < gradient
    assert relative(actual[2], expected[2]) < gradient


def test_ignored_tokens_have_no_loss_and_no_gradient(kernel, draw):
    x, weight, targets = inputs(draw)
    x.requires_grad_()
    losses = kernel.linear_cross_entropy(x, weight, targets)
    losses.backward(draw(N))
    ignored = targets == -100
    assert (losses[ignored] == 0).all() and (losses[~ignored] > 0).all()
    assert (x.grad[ignored] == 0).all() and (x.grad[~ignored] != 0).any(-1).all()


def test_ignore_index_can_be_any_label(kernel, draw, relative):
    x, weight, targets = inputs(draw)
    other = targets.masked_fill(targets == -100, 3)
    losses = kernel.linear_cross_entropy(x, weight, other, ignore_index=3)
    assert relative(losses, definition(x.double(), weight.double(), other.masked_fill(other == 3, -100))) < 1e-6


def test_huge_logits_do_not_overflow(kernel, draw, relative):
    x, weight, targets = inputs(draw)
    losses = kernel.linear_cross_entropy(x * 1e4, weight, targets)
    assert relative(losses, definition(x.double() * 1e4, weight.double(), targets)) < 1e-6


def test_without_gradients_the_losses_are_the_same(kernel, draw):
    x, weight, targets = inputs(draw)
    with_gradient = kernel.linear_cross_entropy(x, weight.clone().requires_grad_(), targets)
    with torch.no_grad():
        assert torch.equal(kernel.linear_cross_entropy(x, weight, targets), with_gradient)


def test_it_equals_torch_cross_entropy_on_float32_logits(kernel, draw, relative):
    x, weight, targets = inputs(draw)
    expected = F.cross_entropy(x @ weight.T, targets, ignore_index=-100, reduction="none")
    assert relative(kernel.linear_cross_entropy(x, weight, targets), expected) < 1e-6
