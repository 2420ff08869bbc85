"""Which parameters learn, and at which learning rate; and the norms alone, from weights with another norm."""

import dataclasses

import pytest
import torch

from model.config import NORMS
from model.decoder import Decoder
from tests.training.runs import settings_of
from training.loop import train_steps
from training.optimizer import build_optimizer, freeze_parameters
from training.session import set_up
from training.settings import OptimizerSettings

CPU = torch.device("cpu")


def groups_by_parameter(model: Decoder, settings: OptimizerSettings) -> dict[str, dict]:
    """The optimizer's group of each parameter, by name; each is in one."""
    groups = build_optimizer(model, settings, CPU).param_groups
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
        chosen = build_optimizer(model, dataclasses.replace(settings.optimizer, optimizer=optimizer), CPU)
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
def test_norms_alone_learn_from_weights_with_another_norm_and_what_is_new_is_named(flags, finished_run, tmp_path, norm):
    frozen = ["--freeze", "*_proj.*", "embed_tokens.*", "lm_head.*"]
    asked = ["--norm", norm, *frozen, "--warmup-steps", "0", "--weight-decay", "5"]
    settings, lines = settings_of(*flags, "--init-from", str(finished_run), *asked), []
    session = set_up(settings, tmp_path, resume=False, log=lines.append)
    assert f"weights: those of {finished_run / 'best'}" in lines
    before = {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}
    next(train_steps(session))
    names = [parameter.name for parameter in NORMS[norm]]
    assert all(name == "weight" or f"norm.{name}" in "".join(lines) for name in names)
    modules = [f"layers.{i}.{place}_layernorm" for i in (0, 1) for place in ("input", "post_attention")]
    expected = {f"{module}.{name}" for module in [*modules, "norm"] for name in names}
    parameters = dict(session.model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == expected
    assert {name for name, parameter in parameters.items() if not torch.equal(before[name], parameter)} == expected
