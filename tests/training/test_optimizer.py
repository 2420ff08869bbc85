"""Which parameters learn, at which learning rate; norms alone; and Muon, which updates each matrix of the layers."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.pretrained import unpacked_tensors
from model.config import NORMS
from model.decoder import Decoder
from tests.training.runs import open_session, settings_of
from training.estimate import memory
from training.loop import save, train_steps
from training.optimizer import COEFFICIENTS, build_optimizer, freeze_parameters
from training.session import set_up
from training.settings import OptimizerSettings

CPU = torch.device("cpu")


def groups_by_parameter(model: Decoder, settings: OptimizerSettings) -> dict[str, dict]:
    """The optimizer's group of each parameter, by name; each is in one."""
    groups = build_optimizer(model, settings).param_groups
    group_by_id = {id(parameter): group for group in groups for parameter in group["params"]}
    assert len(group_by_id) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    return {name: group_by_id[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("vocabulary_decay", [None, 0.3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("norm", NORMS)
def test_kinds_of_parameters_have_rates_and_decays_of_their_own(settings, norm, optimizer, vocabulary_decay):
    shape = {"attention_bias": True, "qk_norm": True, "tie_word_embeddings": False, "norm_placement": "sandwich"}
    model = Decoder(dataclasses.replace(settings.model, norm=norm, **shape))
    rates = {"embedding_lr_multiplier": 5.0, "norm_lr_multiplier": 3.0}
    decays = {"weight_decay": 2.0, "embedding_weight_decay": vocabulary_decay}
    chosen = dataclasses.replace(settings.optimizer, optimizer=optimizer, **rates, **decays)
    decaying = tuple(f".{parameter.name}" for parameter in NORMS[norm] if parameter.decays)
    for name, group in groups_by_parameter(model, chosen).items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            expected = 5.0, 2.0 if vocabulary_decay is None else vocabulary_decay
        elif model.get_parameter(name).ndim == 2:
            expected = 1.0, 2.0
        else:
            expected = 3.0, 2.0 if name.endswith(decaying) else 0.0
        assert (group["lr_multiplier"], group["weight_decay"]) == expected, name


def test_frozen_parameters_are_in_no_group_and_a_group_may_be_empty(settings):
    for optimizer in ("adamw", "muon"):
        model = Decoder(dataclasses.replace(settings.model, tie_word_embeddings=False))
        freeze_parameters(model, ("*norm.*", "embed_tokens.*", "lm_head.*"))
        chosen = build_optimizer(model, dataclasses.replace(settings.optimizer, optimizer=optimizer))
        trained = {parameter for group in chosen.param_groups for parameter in group["params"]}
        assert trained == {parameter for name, parameter in model.named_parameters() if "_proj." in name}
        model(torch.ones(1, 8, dtype=torch.long)).sum().backward()
        chosen.step()


def test_a_row_whose_weight_decays_leaves_the_norms_of_q_and_k_alone(settings, monkeypatch):
    monkeypatch.setitem(NORMS, "rms", (dataclasses.replace(NORMS["rms"][0], decays=True),))
    model = Decoder(dataclasses.replace(settings.model, qk_norm=True))
    decay = {name: group["weight_decay"] for name, group in groups_by_parameter(model, settings.optimizer).items()}
    assert decay["norm.weight"] == decay["layers.0.input_layernorm.weight"] > 0
    assert decay["layers.0.self_attn.q_norm.weight"] == decay["layers.0.self_attn.k_norm.weight"] == 0


@pytest.mark.parametrize("norm", [norm for norm, parameters in NORMS.items() if parameters])
def test_norms_alone_learn_from_other_norms_weights_and_new_ones_are_named(flags, finished_run, tmp_path, capsys, norm):
    frozen = ["--freeze", "*_proj.*", "embed_tokens.*", "lm_head.*"]
    asked = ["--norm", norm, *frozen, "--warmup-steps", "0", "--weight-decay", "5"]
    session = set_up(settings_of(*flags, "--init-from", str(finished_run), *asked), tmp_path, resume=False)
    out = capsys.readouterr().out
    assert f"weights: those of {finished_run / 'best'}\n" in out
    before = {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}
    next(train_steps(session))
    names = [parameter.name for parameter in NORMS[norm]]
    assert all(name == "weight" or f"norm.{name}" in out for name in names)
    modules = [f"layers.{i}.{place}_layernorm" for i in (0, 1) for place in ("input", "post_attention")]
    expected = {f"{module}.{name}" for module in [*modules, "norm"] for name in names}
    parameters = dict(session.model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == expected
    assert {name for name, parameter in parameters.items() if not torch.equal(before[name], parameter)} == expected


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
    optimizer = build_optimizer(model, settings.optimizer)
    adamw = build_optimizer(other, dataclasses.replace(settings.optimizer, optimizer="adamw"))
    weights = {name: matrix.double() for name, matrix in unpacked(model, torch.Tensor.detach).items()}
    momenta = {name: torch.zeros_like(matrix) for name, matrix in weights.items()}
    squares = {name: torch.zeros(len(matrix), 1) for name, matrix in weights.items()}
    for step in range(3):
        before = {name: matrix.clone() for name, matrix in weights.items()}
        lr = 0.01 / (step + 1)
        for group in [*optimizer.param_groups, *adamw.param_groups]:
            group["lr"] = lr
        set_gradients(model, step)
        set_gradients(other, step)
        for name, gradient in unpacked(model, lambda parameter: parameter.grad.double()).items():
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
            has_heads = name.endswith(("q_proj.weight", "k_proj.weight"))
            heads = len(gradient) // model.config.resolved_head_dim if has_heads else 1
            updates = []
            for momentum in (0.05 * gradient + 0.95 * momenta[name]).chunk(heads):
                updates.append(polynomial_of_singular_values(momentum))
            squares[name] = 0.95 * squares[name] + 0.05 * torch.cat(updates).square().mean(1, keepdim=True)
            for i, (update, square) in enumerate(zip(updates, squares[name].chunk(heads), strict=True)):
                rows = update / square.sqrt()
                updates[i] = 0.2 * math.sqrt(max(rows.shape)) * rows * update.norm() / rows.norm()
            update = torch.cat(updates)
            decay = torch.where(update.sign() == weights[name].sign(), 1 - lr * 0.3, 1.0)
            weights[name] = decay * weights[name] - lr * update
        optimizer.step()
        adamw.step()
        for name, matrix in unpacked(model, torch.Tensor.detach).items():
            assert relative(matrix - before[name], weights[name] - before[name]) < 3e-4, name
    assert len(weights) == 7 * model.config.num_hidden_layers
    for (name, parameter), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert takes_muon(name, parameter) or torch.equal(parameter, expected), name


def test_a_gradient_that_overflows_under_float16_changes_nothing_and_one_of_zeros_stays_finite(settings):
    settings = with_muon(settings)
    model = Decoder(settings.model, seed=3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, scaler = build_optimizer(model, settings.optimizer), torch.amp.GradScaler("cpu", enabled=True)
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
