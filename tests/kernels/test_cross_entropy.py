"""`linear_cross_entropy` against float64, for every implementation.

Tolerances: float32 sums over a hundred products and a few hundred classes: 1e-6. In bfloat16 the exact logits are
rounded as the product's, so that losses are as exact; gradients are rounded up to three times on a CPU, by 1.7e-3 each:
softmax - onehot, its product with the upstream gradient, and the result. The Triton kernels round once less, which
test_triton_loss.py demands.
"""

import math

import pytest
import torch

from kernels import cpu

N, D, V = 30, 48, 211
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    monkeypatch.setattr(cpu, "PRODUCT_ROWS", 20)  # of the CPU's, the last product and each last softmax are shorter
    monkeypatch.setattr(cpu, "SOFTMAX_ROWS", 8)


def inputs(draw, dtype=F32):
    x, weight = draw(N, D).to(dtype), draw(V, D, mean=0.05, std=0.4)
    targets = (torch.arange(N) * 7 % V).repeat_interleave(2)[::2]  # not contiguous
    targets[::5] = -100
    return x, weight, targets


def definition(x, weight, targets, dtype=torch.float64):
    """Losses of float64 logits, which are first rounded to a dtype as the product's result is."""
    weight = weight + (weight.to(dtype).double() - weight).detach()
    exact = x @ weight.T
    logits = exact + (torch.mm(x.to(dtype), weight.T.to(dtype)).double() - exact).detach()
    chosen = -torch.log_softmax(logits, dim=-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == -100, torch.zeros_like(chosen), chosen)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_losses_and_gradients_equal_the_float64_definition(kernel, draw, assert_exact, dtype):
    x, weight, targets = inputs(draw, dtype)
    losses, *_ = assert_exact(
        lambda x, weight: kernel.linear_cross_entropy(x, weight, targets),
        lambda x, weight: definition(x, weight, targets, dtype),
        (x, weight),
        [draw(N)],  # one for each token, as from gradient accumulation and masks
        lambda result_dtype, count: 1e-6 if count == N or dtype == F32 else 3.5e-3,
    )
    assert losses.dtype == F32
    plain = kernel.linear_cross_entropy(x, weight, targets)  # without gradients
    torch.testing.assert_close(plain, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("token_weight", "dtype"), [(0.3, BF16), (-1.7, F32)])
def test_the_weighted_sum_is_a_scalar_with_the_gradients_of_float64(kernel, draw, assert_exact, token_weight, dtype):
    x, weight, targets = inputs(draw, dtype)
    token_weight = torch.tensor(token_weight).requires_grad_()
    loss, *_ = assert_exact(
        lambda x, weight: kernel.linear_cross_entropy(x, weight, targets, token_weight),
        lambda x, weight: (definition(x, weight, targets, dtype) * token_weight.detach().double()).sum(),
        (x, weight),
        [torch.tensor(-0.7)],
        lambda result_dtype, count: 1e-6 if count == 1 or dtype == F32 else 3.5e-3,
    )
    plain = kernel.linear_cross_entropy(x, weight, targets, token_weight)
    assert loss.shape == () and not plain.requires_grad and plain == loss  # the weight is a constant


def test_huge_logits_do_not_overflow_and_a_target_of_probability_0_in_float32_has_an_exact_loss(kernel, draw, relative):
    """Logits of 5, 200 and 200 a row: -log softmax of the first is 195 + log 2."""
    x, weight, targets = inputs(draw)
    losses = kernel.linear_cross_entropy(x * 1e4, weight, targets)
    assert relative(losses, definition(x.double() * 1e4, weight.double(), targets)) < 1e-6
    weight, targets = torch.tensor([[5.0], [200.0], [200.0]]), torch.tensor([0, 1, 0])
    losses = kernel.linear_cross_entropy(torch.ones(3, 1), weight, targets)
    assert relative(losses, torch.tensor([195.0, 0.0, 195.0]).double() + math.log(2)) < 1e-6
