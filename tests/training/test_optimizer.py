"""Which parameters learn, and at which learning rate."""

import dataclasses

import torch
from safetensors.torch import load_file

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
