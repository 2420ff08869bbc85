"""Training the norms alone, and starting from weights with another norm: for every norm that `--norm` offers."""

import pytest
from safetensors.torch import load_file

from model.config import NORMS
from training.loop import train
from training.settings import parse

LEARNING = [norm for norm, parameters in NORMS.items() if parameters]


@pytest.mark.parametrize("norm", LEARNING)
def test_norms_alone_learn_when_asked_and_weight_decay_reaches_only_what_their_row_says(flags, tmp_path, norm):
    # Weights large enough that norms which do not divide by the stream's size get a gradient to speak of.
    flags = [*flags, "--norm", norm, "--train-only", "norms", "--warmup-steps", "0", "--initializer-range", "0.02"]
    states, weights = [], []
    for decay, steps in (("0", "3"), ("5", "3"), ("5", "1")):
        folder = tmp_path / f"decay-{decay}-steps-{steps}"
        train(parse([*flags, "--weight-decay", decay, "--steps", steps], "test").settings, folder)
        states.append(load_file(folder / "last" / "training_state.safetensors"))
        weights.append(load_file(folder / "last" / "model.safetensors"))
    names = {parameter.name for parameter in NORMS[norm]}
    decaying = {parameter.name for parameter in NORMS[norm] if parameter.decays}
    modules = [f"layers.{i}.{place}_layernorm" for i in (0, 1) for place in ("input", "post_attention")]
    expected = {f"{module}.{name}" for module in [*modules, "norm"] for name in names}
    assert {name.removeprefix("exp_avg.") for name in states[0] if name.startswith("exp_avg.")} == expected
    for name, tensor in weights[0].items():
        assert tensor.equal(weights[1][name]) != (name.rpartition(".")[2] in decaying), name
        moved = not tensor.equal(weights[2][name])
        assert moved == (name.removeprefix("model.") in expected or "running_" in name), name


@pytest.mark.parametrize("norm", NORMS)
def test_a_run_starts_from_weights_with_another_norm_and_names_what_is_new(flags, run, tmp_path, capsys, norm):
    settings = parse([*flags, "--steps", "1", "--init-from", str(run), "--norm", norm], "test").settings
    train(settings, tmp_path / "converted")
    out = capsys.readouterr().out
    for parameter in NORMS[norm]:
        assert parameter.name == "weight" or f"norm.{parameter.name}" in out
