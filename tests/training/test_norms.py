"""Training the norms alone, from weights with another norm: for every norm that `--norm` offers."""

import pytest
import torch

from model.config import NORMS
from tests.training.runs import settings_of
from training.loop import train_steps
from training.session import set_up


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
