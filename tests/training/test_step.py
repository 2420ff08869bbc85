import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from model.config import ModelConfig
from model.decoder import Decoder
from training.processes import Processes
from training.step import Diverged, backward, micro_batches, update

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
)


def a_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    inputs, targets = random.integers(0, 61, (2, 8, 12))
    targets[1:4] = np.where(random.random((3, 12)) < 0.8, -100, targets[1:4])  # very unequal micro-batches
    return inputs, targets


def predicted() -> int:
    return int((a_batch()[1] >= 0).sum())


def gradients(size: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = Decoder(CONFIG, seed=3)
    loss = backward(model, micro_batches(*a_batch(), size, CPU), predicted(), NO_SCALER, Processes(), CPU)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, gradient in expected.items():
        error = (found[name] - gradient).double().norm() / gradient.double().norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def test_one_batch_of_8_equals_4_of_2_also_with_ignored_tokens():
    # float32 sums in another order: a few roundings of 6e-8 each, amplified by cancellation between tokens
    whole_loss, whole = gradients(8)
    cut_loss, cut = gradients(2)
    assert cut_loss == pytest.approx(whole_loss, rel=1e-6)
    assert_close(cut, whole, 5e-6)


def test_the_gradient_is_that_of_the_mean_over_all_predicted_tokens():
    model = Decoder(CONFIG, seed=3)
    inputs, targets = map(torch.from_numpy, a_batch())
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    found_loss, found = gradients(2)
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close(found, {name: parameter.grad for name, parameter in model.named_parameters()}, 5e-6)


def test_a_batch_without_any_predicted_token_gives_zero_gradients():
    model = Decoder(CONFIG, seed=3)
    inputs, targets = a_batch()
    batches = micro_batches(inputs, np.full_like(targets, -100), 4, CPU)
    assert backward(model, batches, 0, NO_SCALER, Processes(), CPU) == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_clipping_scales_the_whole_gradient_to_the_limit():
    for clip in (0.01, 1e6):
        model = Decoder(CONFIG, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        loss = backward(model, micro_batches(*a_batch(), 8, CPU), predicted(), NO_SCALER, Processes(), CPU)
        norm = update(model, optimizer, NO_SCALER, clip, loss)
        moved = (torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before).norm()
        assert moved.item() == pytest.approx(min(norm, clip), rel=1e-3)


def test_a_gradient_that_is_not_finite_is_named_and_leaves_the_weights_alone():
    model = Decoder(CONFIG, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = backward(model, micro_batches(*a_batch(), 8, CPU), predicted(), NO_SCALER, Processes(), CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    name, parameter = list(model.named_parameters())[3]
    parameter.grad.view(-1)[0] = float("inf")
    with pytest.raises(Diverged, match=f"inf in {name}"):
        update(model, optimizer, NO_SCALER, 1.0, loss)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


TWO_PROCESSES = """
import sys, numpy as np, torch
sys.path.insert(0, {root!r}); sys.path.insert(0, {root!r} + "/tests/training")
import test_step
from training import processes
from training.step import backward, micro_batches
from model.decoder import Decoder
ours, _ = processes.start("cpu")
inputs, targets = test_step.a_batch()
half = slice(4 * ours.rank, 4 * ours.rank + 4)
model = Decoder(test_step.CONFIG, seed=3)
batches = micro_batches(inputs[half], targets[half], 2, test_step.CPU)
predicted = ours.sum((targets[half] >= 0).sum(), device=test_step.CPU)[0]
loss = backward(ours.wrap(model), batches, predicted, test_step.NO_SCALER, ours, test_step.CPU)
whole_loss, whole = test_step.gradients(8)
assert abs(loss - whole_loss) < 1e-6 * whole_loss, (loss, whole_loss)
test_step.assert_close({{name: p.grad for name, p in model.named_parameters()}}, whole, 5e-6)
processes.finish(ours)
print("equal", flush=True)
"""


def test_two_processes_compute_the_gradient_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    out = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.count("equal") == 2
