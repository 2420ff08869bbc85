import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from model.config import ModelConfig
from model.decoder import Decoder
from training.processes import Processes
from training.step import Diverged, split_batch, train_step

CPU = torch.device("cpu")
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
CONFIG = ModelConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, attention_bias=True)


class KeepsGradients(torch.optim.SGD):
    """An optimizer that leaves the gradients for a test to read; without a learning rate it changes no weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def a_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    inputs, targets = random.integers(0, 61, (2, 8, 12))
    targets[1:4] = np.where(random.random((3, 12)) < 0.8, -100, targets[1:4])  # very unequal micro-batches
    return inputs, targets


def step(model, micro_batches, optimizer, clip=float("inf"), scaler=NO_SCALER, processes=None) -> tuple[float, float]:
    return train_step(model, micro_batches, optimizer, scaler, clip, processes or Processes(), CPU)


@pytest.mark.parametrize("size", [8, 2])
def test_the_gradient_is_that_of_the_mean_over_all_predicted_tokens_in_any_number_of_micro_batches(relative, size):
    model = Decoder(CONFIG, seed=3)
    inputs, targets = map(torch.from_numpy, a_batch())
    expected = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    expected.backward()
    other = Decoder(CONFIG, seed=3)
    loss, _ = step(other, split_batch(a_batch(), size, CPU), KeepsGradients(other))
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for (name, found), parameter in zip(other.named_parameters(), model.parameters(), strict=True):
        assert relative(found.grad, parameter.grad) < 5e-6, name  # float32 sums in another order


def test_a_batch_without_any_predicted_token_gives_zero_gradients():
    model = Decoder(CONFIG, seed=3)
    inputs, targets = a_batch()
    micro_batches = split_batch((inputs, np.full_like(targets, -100)), 4, CPU)
    assert step(model, micro_batches, KeepsGradients(model)) == (0.0, 0.0)
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-3)])
def test_clipping_scales_the_gradient_of_all_parameters_to_the_limit(dtype, tolerance):
    """In float16 backward gives the gradient of the scaled loss; norm, limit and update are those without the scale."""
    model = Decoder(CONFIG, seed=3)
    step(model, split_batch(a_batch(), 8, CPU), KeepsGradients(model))
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for clip in (0.01, 1e6):
        model = Decoder(CONFIG, seed=3, compute_dtype=dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=2**12, enabled=dtype == torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        _, norm = step(model, split_batch(a_batch(), 8, CPU), optimizer, clip, scaler)
        moved = before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        clipped = gradient * min(1, clip / gradient.norm())
        assert (moved - clipped).norm() < tolerance * clipped.norm()
        assert norm == pytest.approx(gradient.norm().item(), rel=tolerance / 10)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    model = Decoder(CONFIG, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parameter = list(model.parameters())[3]
    parameter.register_hook(lambda gradient: torch.where(gradient == gradient.max(), torch.inf, gradient))
    with pytest.raises(Diverged, match="norm of the gradient inf"):
        step(model, split_batch(a_batch(), 8, CPU), optimizer, clip=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # float16: the step is skipped, unless the loss is NaN as well
    parameter.register_hook(lambda gradient: gradient * torch.nan)
    assert step(model, split_batch(a_batch(), 8, CPU), optimizer, clip=1.0, scaler=scaler)[1] == torch.inf
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, model.parameters()))
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(Diverged, match="loss is nan"):
        step(model, split_batch(a_batch(), 8, CPU), optimizer, clip=1.0, scaler=scaler)
