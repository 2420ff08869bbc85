import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import kernels
from model.config import ModelConfig
from model.decoder import Decoder
from training.processes import Processes
from training.step import Diverged, largest_gradient, split_batch, train_step

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=12,
    attention_bias=True,
)


class KeepsGradients(torch.optim.SGD):
    """An optimizer that changes no weights and leaves the gradients for a test to read."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters())

    def step(self) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def a_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    inputs, targets = random.integers(0, 61, (2, 8, 12))
    targets[1:4] = np.where(random.random((3, 12)) < 0.8, -100, targets[1:4])  # very unequal micro-batches
    return inputs, targets


def step(model, micro_batches, optimizer, clip=float("inf"), scaler=NO_SCALER, processes=None) -> tuple[float, float]:
    return train_step(model, micro_batches, optimizer, scaler, clip, processes or Processes(), CPU)


def gradients(size: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = Decoder(CONFIG, seed=3)
    loss, _ = step(model, split_batch(*a_batch(), size, CPU), KeepsGradients(model))
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, gradient in expected.items():
        error = (found[name] - gradient).double().norm() / gradient.double().norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def test_one_batch_of_8_equals_4_of_2_also_with_ignored_tokens():
    # float32 sums in another order: a few roundings of 6e-8 each, amplified by cancellation between tokens
    loss_of_one, one = gradients(8)
    loss_of_four, four = gradients(2)
    assert loss_of_four == pytest.approx(loss_of_one, rel=1e-6)
    assert_close(four, one, 5e-6)


def test_the_gradient_is_that_of_the_mean_over_all_predicted_tokens():
    model = Decoder(CONFIG, seed=3)
    inputs, targets = map(torch.from_numpy, a_batch())
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    found_loss, found = gradients(2)
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close(found, {name: parameter.grad for name, parameter in model.named_parameters()}, 5e-6)


def sum_over_count(model, micro_batches, optimizer) -> float:
    """A training step from the loss of each token, the textbook's way."""
    predicted = sum(int((targets != -100).sum()) for _, targets in micro_batches)
    total = 0.0
    for inputs, targets in micro_batches:
        loss = model(inputs, targets).sum() / predicted
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_on_the_weighted_loss_are_bit_equal_to_steps_on_the_losses_over_their_count(dtype):
    models = [Decoder(CONFIG, seed=3, compute_dtype=dtype) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    micro_batches = split_batch(*a_batch(), 3, CPU)
    for _ in range(3):
        expected = sum_over_count(models[0], micro_batches, optimizers[0])
        loss, _ = step(models[1], micro_batches, optimizers[1])
        assert loss == pytest.approx(expected, rel=1e-6)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert not torch.equal(models[0].norm.weight, Decoder(CONFIG, seed=3).norm.weight)


@pytest.mark.skipif(kernels.gpu is None, reason="Triton is not installed")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_with_the_triton_kernels_needs_no_loss_of_single_tokens(monkeypatch, compiled):
    inputs, targets = (part[:2] for part in a_batch())
    found = []
    for choice in ("auto", "triton"):
        kernels.use(choice, CPU)
        model = Decoder(CONFIG, seed=3)
        model.activation_checkpointing = not compiled
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled and choice == "triton" else model
        try:
            step(run, split_batch(inputs, targets, 2, CPU), KeepsGradients(model))
        finally:
            kernels.use("auto", CPU)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        monkeypatch.setattr(sys.modules["kernels.cross_entropy"], "loss_forward", None)
    assert_close(found[1], found[0], 5e-6)


def test_a_batch_without_any_predicted_token_gives_zero_gradients():
    model = Decoder(CONFIG, seed=3)
    inputs, targets = a_batch()
    micro_batches = split_batch(inputs, np.full_like(targets, -100), 4, CPU)
    assert step(model, micro_batches, KeepsGradients(model)) == (0.0, 0.0)
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_clipping_scales_the_gradient_of_all_parameters_to_the_limit():
    for clip in (0.01, 1e6):
        model = Decoder(CONFIG, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        _, norm = step(model, split_batch(*a_batch(), 8, CPU), optimizer, clip)
        moved = (torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before).norm()
        assert moved.item() == pytest.approx(min(norm, clip), rel=1e-3)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_returned_norm_is_that_of_the_gradient_before_clipping():
    _, found = gradients(8)
    expected = torch.cat([gradient.flatten() for gradient in found.values()]).double().norm().item()
    model = Decoder(CONFIG, seed=3)
    _, norm = step(model, split_batch(*a_batch(), 8, CPU), torch.optim.SGD(model.parameters(), lr=1.0), clip=0.01)
    assert norm == pytest.approx(expected, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_named_and_leaves_the_weights_alone():
    model = Decoder(CONFIG, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    name, parameter = list(model.named_parameters())[3]
    parameter.register_hook(lambda gradient: torch.where(gradient == gradient.max(), torch.inf, gradient))
    with pytest.raises(Diverged, match=f"inf in {name}$"):
        step(model, split_batch(*a_batch(), 8, CPU), optimizer, clip=1.0)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_parameter_is_named_without_the_prefix_of_torch_compile():
    model = Decoder(CONFIG, seed=3)
    step(model, split_batch(*a_batch(), 8, CPU), KeepsGradients(model))
    model.norm.weight.grad[2] = float("nan")
    assert largest_gradient(model) == largest_gradient(torch.compile(model)) == "nan in norm.weight"


TWO_PROCESSES = """
import sys, numpy as np, torch
sys.path.insert(0, {root!r}); sys.path.insert(0, {root!r} + "/tests/training")
import test_step
from training.processes import finish_processes, start_processes
from training.step import split_batch
from model.decoder import Decoder
processes, _ = start_processes("cpu", 10)
inputs, targets = test_step.a_batch()
half = slice(4 * processes.rank, 4 * processes.rank + 4)
model = Decoder(test_step.CONFIG, seed=3)
micro_batches = split_batch(inputs[half], targets[half], 2, test_step.CPU)
wrapped = processes.wrap(model)
loss, _ = test_step.step(wrapped, micro_batches, test_step.KeepsGradients(model), processes=processes)
loss_of_one, expected = test_step.gradients(8)
assert abs(loss - loss_of_one) < 1e-6 * loss_of_one, (loss, loss_of_one)
test_step.assert_close({{name: p.grad for name, p in model.named_parameters()}}, expected, 5e-6)
assert test_step.largest_gradient(wrapped) == test_step.largest_gradient(model)
finish_processes(processes)
print("equal", flush=True)
"""


def test_two_processes_compute_the_gradient_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    out = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.count("equal") == 2
