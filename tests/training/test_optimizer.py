"""Which parameters learn, and at which learning rate."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from model.config import NORMS
from model.decoder import Decoder
from training.loop import train
from training.optimizer import build_optimizer
from training.settings import parse


def test_train_only_norms_trains_the_norms_and_nothing_else(flags, tmp_path):
    train(parse([*flags, "--steps", "3", "--train-only", "norms"], "test").settings, tmp_path / "norms")
    tensors = load_file(tmp_path / "norms" / "last" / "training_state.safetensors")
    moved = {name.split(".", 1)[1] for name in tensors if name.startswith("exp_avg.")}
    assert moved and all("norm" in name for name in moved)


def test_embedding_and_head_can_have_a_learning_rate_multiplier(settings):
    model = Decoder(dataclasses.replace(settings.model, tie_word_embeddings=False))
    groups = build_optimizer(
        model, dataclasses.replace(settings.optimizer, embedding_lr_multiplier=5.0), torch.device("cpu")
    ).param_groups
    by_multiplier = {group["lr_multiplier"]: group for group in groups if group["weight_decay"]}
    vocabulary = {id(model.embed_tokens.weight), id(model.lm_head.weight)}
    assert {id(parameter) for parameter in by_multiplier[5.0]["params"]} == vocabulary
    assert not vocabulary & {id(parameter) for parameter in by_multiplier[1.0]["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("decay", [None, 0.0, 0.3])
def test_embedding_and_head_can_have_a_weight_decay_of_their_own(settings, optimizer, decay):
    model = Decoder(dataclasses.replace(settings.model, tie_word_embeddings=False))
    flags = dataclasses.replace(settings.optimizer, weight_decay=2.0, embedding_weight_decay=decay, optimizer=optimizer)
    groups = build_optimizer(model, flags, torch.device("cpu")).param_groups
    found = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        of_vocabulary = name in ("embed_tokens.weight", "lm_head.weight")
        expected = (2.0 if decay is None else decay) if of_vocabulary else 2.0 if parameter.ndim == 2 else 0.0
        assert found[id(parameter)] == expected, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_and_biases_can_have_a_learning_rate_multiplier(settings, norm, optimizer):
    model = Decoder(dataclasses.replace(settings.model, norm=norm, attention_bias=True, qk_norm=True))
    flags = dataclasses.replace(
        settings.optimizer, norm_lr_multiplier=3.0, embedding_lr_multiplier=1.0, optimizer=optimizer
    )
    groups = build_optimizer(model, flags, torch.device("cpu")).param_groups
    found = {id(p): group["lr_multiplier"] for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert found[id(parameter)] == (3.0 if parameter.ndim < 2 else 1.0), name


@pytest.mark.parametrize("norm", NORMS)
def test_matrices_decay_and_of_the_vectors_and_scalars_only_those_whose_row_says_so(settings, norm):
    shape = {"attention_bias": True, "qk_norm": True, "tie_word_embeddings": False, "norm_placement": "sandwich"}
    model = Decoder(dataclasses.replace(settings.model, norm=norm, **shape))
    flags = dataclasses.replace(settings.optimizer, embedding_weight_decay=None)
    groups = build_optimizer(model, flags, torch.device("cpu")).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    decaying = tuple(f".{parameter.name}" for parameter in NORMS[norm] if parameter.decays)
    for name, parameter in model.named_parameters():
        expected = settings.optimizer.weight_decay if parameter.ndim == 2 or name.endswith(decaying) else 0.0
        assert decay[id(parameter)] == expected, name
    assert settings.optimizer.weight_decay > 0


def test_a_row_whose_weight_decays_leaves_the_norms_of_q_and_k_alone(settings, monkeypatch):
    monkeypatch.setitem(NORMS, "rms", (dataclasses.replace(NORMS["rms"][0], decays=True),))
    model = Decoder(dataclasses.replace(settings.model, qk_norm=True))
    groups = build_optimizer(model, settings.optimizer, torch.device("cpu")).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decay[id(model.norm.weight)] == decay[id(model.layers[0].input_layernorm.weight)] > 0
    assert decay[id(model.layers[0].self_attn.q_norm.weight)] == decay[id(model.layers[0].self_attn.k_norm.weight)] == 0


def test_without_a_gradient_weight_decay_pulls_the_weight_of_offset_to_1_and_leaves_that_of_rms(settings):
    """A step of AdamW multiplies what decays by 1 - learning rate x weight decay, here 1 - 0.1 x 0.5."""
    flags = dataclasses.replace(settings.optimizer, learning_rate=0.1, weight_decay=0.5)
    found = {}
    for norm, name in (("offset", "offset"), ("rms", "weight")):
        model = Decoder(dataclasses.replace(settings.model, norm=norm))
        parameter = getattr(model.norm, name)
        parameter.data.fill_(0.4)
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        build_optimizer(model, flags, torch.device("cpu")).step()
        found[norm] = parameter.detach()
    torch.testing.assert_close(found["offset"], torch.full_like(found["offset"], 0.4 * 0.95))
    assert (found["rms"] == 0.4).all()


def test_without_weight_decay_offset_trains_as_rms_does(flags, tmp_path, relative):
    """Three steps in float32. Adam divides by the gradient's own size, so that a small gradient's rounding counts."""
    saved = {}
    for norm in ("offset", "rms"):
        steps = ["--norm", norm, "--steps", "3", "--warmup-steps", "0", "--weight-decay", "0"]
        train(parse([*flags, *steps], "test").settings, tmp_path / norm)
        saved[norm] = load_file(tmp_path / norm / "last" / "model.safetensors")
    for name, tensor in saved["rms"].items():
        if "norm" in name:
            found = saved["offset"][name.replace(".weight", ".offset")] + 1
            assert tensor.std() > 1e-3 and relative(found - 1, tensor - 1) < 1e-3, name
