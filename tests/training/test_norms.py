"""Training the norms alone, and starting from weights with another norm: for every norm that `--norm` offers."""

import pytest
import torch

from model.config import NORMS
from tests.training.runs import open_session, settings_of
from training.loop import train_steps
from training.session import set_up

LEARNING = [norm for norm, parameters in NORMS.items() if parameters]


@pytest.mark.parametrize("norm", LEARNING)
def test_norms_alone_learn_when_asked(flags, tmp_path, norm):
    # Weights large enough that norms which do not divide by the stream's size get a gradient to speak of.
    asked = ["--norm", norm, "--train-only", "norms", "--warmup-steps", "0", "--initializer-range", "0.02"]
    session = open_session(tmp_path, *flags, *asked, "--weight-decay", "5")
    before = {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}
    next(train_steps(session))
    names = [parameter.name for parameter in NORMS[norm]]
    modules = [f"layers.{i}.{place}_layernorm" for i in (0, 1) for place in ("input", "post_attention")]
    expected = {f"{module}.{name}" for module in [*modules, "norm"] for name in names}
    parameters = dict(session.model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == expected
    assert {name for name, parameter in parameters.items() if not torch.equal(before[name], parameter)} == expected


@pytest.mark.parametrize("norm", NORMS)
def test_a_run_starts_from_weights_with_another_norm_and_names_what_is_new(flags, finished_run, tmp_path, norm):
    lines = []
    settings = settings_of(*flags, "--init-from", str(finished_run), "--norm", norm)
    set_up(settings, tmp_path, resume=False, log=lines.append)
    assert f"weights: those of {finished_run / 'best'}" in lines
    for parameter in NORMS[norm]:
        assert parameter.name == "weight" or f"norm.{parameter.name}" in "".join(lines)
