"""The Triton loss beyond the tests of all implementations: chunks, long rows, large logits.

Tolerances: float32 sums of a few thousand terms: 1e-6; those of bfloat16 are explained in the tests.
"""

import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from kernels import cross_entropy


@pytest.mark.parametrize("workspace", [2**30, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_do_not_depend_on_chunks(draw, relative, monkeypatch, dtype, workspace):
    monkeypatch.setattr(cross_entropy, "WORKSPACE", workspace)  # 1 byte: chunks of the minimum size, 128
    rows, vocabulary = 261, 130
    assert cross_entropy.chunk_rows(rows, vocabulary, 2) == (rows if workspace > 1 else 128)
    x, weight, upstream = draw(rows, 24, dtype=dtype), draw(vocabulary, 24, mean=0.05, std=0.3), draw(rows)
    targets = torch.arange(rows) * 7 % vocabulary
    targets[::5], targets[1], targets[2] = -100, 0, vocabulary - 1

    def run(function, x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(x, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream.to(loss.dtype))

    found = run(gpu.linear_cross_entropy, x, weight)
    assert [t.dtype for t in found] == [torch.float32, dtype, torch.float32]
    expected = run(float64_loss, x.double(), weight.to(dtype).double())
    # bfloat16: logits of about 3 are off by 5e-3 before the exponential
    tolerances = (1e-6, 1e-6, 1e-6) if dtype == torch.float32 else (2e-3, 5e-3, 5e-3)
    for ours, exact, tolerance in zip(found, expected, tolerances, strict=True):
        assert relative(ours, exact) < tolerance


def float64_loss(x, weight, targets):
    """The definition, in the dtype of its inputs."""
    chosen = -torch.log_softmax(x @ weight.T, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == -100, 0.0, chosen)


@pytest.mark.parametrize("workspace", [2**30, 1])
def test_ignored_targets_have_no_loss_and_frozen_inputs_get_no_gradient(draw, monkeypatch, workspace):
    monkeypatch.setattr(cross_entropy, "WORKSPACE", workspace)
    x, weight, upstream = draw(140, 16).requires_grad_(), draw(33, 16).requires_grad_(), draw(140)
    loss = gpu.linear_cross_entropy(x, weight, torch.full((140,), -100))
    assert not loss.any() and not any(g.any() for g in torch.autograd.grad(loss, (x, weight), upstream))
    targets = torch.arange(140) % 33
    both = torch.autograd.grad(gpu.linear_cross_entropy(x, weight, targets), (x, weight), upstream)
    for i, given in enumerate(((x, weight.detach()), (x.detach(), weight))):
        (alone,) = torch.autograd.grad(gpu.linear_cross_entropy(*given, targets), (x, weight)[i], upstream)
        assert torch.equal(alone, both[i])


def test_rows_longer_than_a_tile_and_logits_of_80_are_exact_to_float32(draw, relative):
    logits = draw(3, 9001, std=1.0) * torch.tensor([[1.0], [30.0], [-30.0]])
    logits[0, 4096], logits[1, 9000], logits[2, 0] = 80.0, -80.0, 80.0
    targets = torch.tensor([4096, 9000, 5])
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (delta,) = torch.autograd.grad(expected, exact, torch.ones(3, dtype=torch.float64))
    loss = cross_entropy.compute_losses(logits, targets, -100, True)
    assert relative(loss, expected.detach()) < 1e-6
    assert relative(logits, delta) < 1e-6


def test_a_nan_logit_gives_a_nan_loss(draw):
    logits = draw(2, 50)
    logits[0, 7] = float("nan")
    loss = cross_entropy.compute_losses(logits, torch.tensor([1, 1]), -100, False)
    assert loss[0].isnan() and loss[1].isfinite()
