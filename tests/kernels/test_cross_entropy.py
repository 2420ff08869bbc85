"""`linear_cross_entropy` against float64.

Tolerances: float32 sums over a hundred products and a few hundred classes: 1e-6. In bfloat16 the exact logits are
rounded as the product's, so that losses are as exact; gradients are rounded up to three times on a CPU, by 1.7e-3 each:
softmax - onehot, its product with the upstream gradient, and the result. The Triton kernels round once less, which
test_triton_loss.py demands.
"""

import math
from functools import partial

import pytest
import torch

from kernels import cpu

N, D, V = 30, 48, 211
GRADIENT = [(torch.float32, 1e-6), (torch.bfloat16, 3.5e-3)]


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    monkeypatch.setattr(cpu, "PRODUCT_ROWS", 20)  # of the CPU's, the last product and each last softmax are shorter
    monkeypatch.setattr(cpu, "SOFTMAX_ROWS", 8)


def inputs(draw, dtype=torch.float32):
    x, weight = draw(N, D).to(dtype), draw(V, D, mean=0.05, std=0.4)
    targets = (torch.arange(N) * 7 % V).repeat_interleave(2)[::2]  # not contiguous
    targets[::5] = -100
    return x, weight, targets


def definition(x, weight, targets, dtype=torch.float64):
    """Losses of float64 logits, which are first rounded to a dtype as the product's result is."""
    exact = x @ weight.T
    logits = exact + (torch.mm(x.to(dtype), weight.T.to(dtype)).double() - exact).detach()
    chosen = -torch.log_softmax(logits, dim=-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == -100, torch.zeros_like(chosen), chosen)


@pytest.mark.parametrize(("dtype", "gradient"), GRADIENT)
def test_losses_and_gradients_equal_the_float64_definition(kernel, draw, relative, dtype, gradient):
    x, weight, targets = inputs(draw, dtype)
    upstream = draw(N)  # one for each token, as from gradient accumulation and masks

    def run(function, x, weight):
        x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
        losses = function(x, weight, targets)
        return losses, *torch.autograd.grad(losses, (x, weight), upstream.to(losses.dtype))

    actual = run(kernel.linear_cross_entropy, x, weight)
    expected = run(partial(definition, dtype=dtype), x.double(), weight.to(dtype).double())
    assert [tensor.dtype for tensor in actual] == [torch.float32, dtype, torch.float32]
    assert relative(actual[0], expected[0]) < 1e-6
    assert relative(actual[1], expected[1]) < gradient
    assert relative(actual[2], expected[2]) < gradient


@pytest.mark.parametrize(
    ("shape", "dtype", "gradient"),
    [((N,), *GRADIENT[1]), ((1,), *GRADIENT[0]), ((), *GRADIENT[1])],
)
def test_the_weighted_sum_is_a_scalar_with_the_gradients_of_float64(kernel, draw, relative, shape, dtype, gradient):
    x, weight, targets = inputs(draw, dtype)
    weights = draw(N)[0] if shape == () else draw(*shape)  # of both signs
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = kernel.linear_cross_entropy(x, weight, targets, token_weights=weights.requires_grad_())
    assert loss.shape == () and loss.dtype == torch.float32
    found = torch.autograd.grad(loss, (x, weight), torch.tensor(-0.7))
    exact = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    expected = (definition(*exact, targets, dtype) * weights.detach().double()).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, other in zip(found, torch.autograd.grad(expected * -0.7, exact), strict=True):
        assert relative(ours, other) < gradient
    plain = kernel.linear_cross_entropy(x.detach(), weight.detach(), targets, token_weights=weights)
    assert not plain.requires_grad and plain == loss  # the weights are constants


def test_ignored_tokens_have_no_loss_and_no_gradient(kernel, draw):
    x, weight, targets = inputs(draw)
    x.requires_grad_()
    losses = kernel.linear_cross_entropy(x, weight, targets)
    losses.backward(draw(N))
    ignored = targets == -100
    assert (losses[ignored] == 0).all() and (losses[~ignored] > 0).all()
    assert (x.grad[ignored] == 0).all() and (x.grad[~ignored] != 0).any(-1).all()


def test_huge_logits_do_not_overflow(kernel, draw, relative):
    x, weight, targets = inputs(draw)
    losses = kernel.linear_cross_entropy(x * 1e4, weight, targets)
    assert relative(losses, definition(x.double() * 1e4, weight.double(), targets)) < 1e-6


def test_a_target_of_probability_0_in_float32_has_an_exact_loss(kernel, relative):
    """Logits of 5, 200 and 200 a row: -log softmax of the first is 195 + log 2."""
    weight, targets = torch.tensor([[5.0], [200.0], [200.0]]), torch.tensor([0, 1, 0])
    losses = kernel.linear_cross_entropy(torch.ones(3, 1), weight, targets)
    assert relative(losses, torch.tensor([195.0, 0.0, 195.0]).double() + math.log(2)) < 1e-6


def test_without_gradients_the_losses_are_the_same(kernel, draw, relative):
    x, weight, targets = inputs(draw)
    with_gradient = kernel.linear_cross_entropy(x, weight.clone().requires_grad_(), targets)
    with torch.no_grad():
        assert relative(kernel.linear_cross_entropy(x, weight, targets), with_gradient) < 1e-6
