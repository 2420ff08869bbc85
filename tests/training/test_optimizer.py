"""Which parameters learn, and at which learning rate."""

import dataclasses

import pytest
import torch

from model.config import NORMS
from model.decoder import Decoder
from training.optimizer import build_optimizer, freeze_parameters
from training.settings import OptimizerSettings

CPU = torch.device("cpu")


def groups_by_parameter(model: Decoder, settings: OptimizerSettings) -> dict[str, dict]:
    """The optimizer's group of each parameter, by name; each is in one."""
    groups = build_optimizer(model, settings, CPU).param_groups
    found = {id(parameter): group for group in groups for parameter in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("vocabulary_decay", [None, 0.3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("norm", NORMS)
def test_vocabulary_matrices_and_vectors_have_learning_rates_and_weight_decays_of_their_own(
    settings, norm, optimizer, vocabulary_decay
):
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
