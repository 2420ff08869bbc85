"""Muon updates the matrices of the layers, each of a packed one by itself, and AdamW everything else."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.pretrained import unpacked_tensors
from model.decoder import Decoder
from tests.training.runs import open_session
from training.estimate import memory
from training.loop import save, train_steps
from training.muon import COEFFICIENTS
from training.optimizer import build_optimizer

CPU = torch.device("cpu")


def with_muon(settings, **model):
    optimizer = dataclasses.replace(settings.optimizer, optimizer="muon", learning_rate=0.01, weight_decay=0.3)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, **model), optimizer=optimizer)


def set_gradients(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 0.3 + torch.randn(parameter.shape, generator=generator)


def polynomial_of_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """What the iteration computes, from a singular value decomposition in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


def takes_muon(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim == 2 and name.startswith("layers.")


def unpacked(model: Decoder, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `of` gives for each matrix of the layers, under the names of Hugging Face's matrices."""
    return unpacked_tensors({n: of(p) for n, p in model.named_parameters() if takes_muon(n, p)}, model.config)


@pytest.mark.parametrize("bias", [False, True])
def test_steps_equal_the_definition_in_float64_and_those_of_all_other_parameters_adamw(settings, relative, bias):
    settings = with_muon(settings, attention_bias=bias, qk_norm=bias, tie_word_embeddings=not bias)
    model, other = (Decoder(settings.model, seed=3) for _ in range(2))
    optimizer = build_optimizer(model, settings.optimizer, CPU)
    adamw = build_optimizer(other, dataclasses.replace(settings.optimizer, optimizer="adamw"), CPU)
    weights = {name: part.double() for name, part in unpacked(model, torch.Tensor.detach).items()}
    momenta = {name: torch.zeros_like(part) for name, part in weights.items()}
    squares = {name: torch.zeros(len(part), 1) for name, part in weights.items()}
    for step in range(3):
        before = {name: part.clone() for name, part in weights.items()}
        lr = 0.01 / (step + 1)
        for group in [*optimizer.param_groups, *adamw.param_groups]:
            group["lr"] = lr
        set_gradients(model, step)
        set_gradients(other, step)
        for name, gradient in unpacked(model, lambda parameter: parameter.grad.double()).items():
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
            update = polynomial_of_singular_values(0.05 * gradient + 0.95 * momenta[name])
            squares[name] = 0.95 * squares[name] + 0.05 * update.square().mean(1, keepdim=True)
            rows = update / squares[name].sqrt()
            update = rows * update.norm() / rows.norm()
            decay = torch.where(update.sign() == weights[name].sign(), 1 - lr * 0.3, 1.0)
            weights[name] = decay * weights[name] - lr * 0.2 * math.sqrt(max(update.shape)) * update
        optimizer.step()
        adamw.step()
        for name, found in unpacked(model, torch.Tensor.detach).items():
            assert relative(found - before[name], weights[name] - before[name]) < 3e-4, name
    assert len(weights) == 7 * model.config.num_hidden_layers
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert takes_muon(name, found) or torch.equal(found, expected), name


def test_a_gradient_that_overflows_under_float16_changes_nothing_and_one_of_zeros_stays_finite(settings):
    settings = with_muon(settings)
    model = Decoder(settings.model, seed=3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, scaler = build_optimizer(model, settings.optimizer, CPU), torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(torch.zeros(()))
    for value, moves in ((math.inf, False), (0.0, True)):
        set_gradients(model, 1)
        model.layers[1].self_attn.qkv_proj.weight.grad.fill_(value)  # zero: as in sequences of one token
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert any(not torch.equal(before[n], p) for n, p in model.named_parameters()) == moves
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_run_saves_one_moment_of_each_matrix_and_two_of_the_rest(flags, tmp_path):
    wide = ["--hidden-size", "192", "--intermediate-size", "512", "--steps", "3", "--optimizer", "muon"]
    session = open_session(tmp_path, *flags, *wide)
    next(train_steps(session))
    save(session)
    tensors, model = (load_file(tmp_path / "last" / f"{name}.safetensors") for name in ("training_state", "model"))
    moments = {name.partition(".")[0] for name in tensors if ".layers.0.mlp.down_proj" in name}
    assert moments == {"momentum_buffer", "row_squares"}
    moments = {name.partition(".")[0] for name in tensors if name.endswith("norm.weight")}
    assert moments == {"exp_avg", "exp_avg_sq", "step"}
    size = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("step."))
    assert memory(session.settings, torch.float32, CPU)["moments"] == pytest.approx(size, rel=0.01) and size > 3e6
    assert size < 1.5 * sum(tensor.nbytes for tensor in model.values())
