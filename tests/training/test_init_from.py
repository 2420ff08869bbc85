"""Runs that start from the weights of a checkpoint: what they keep, and what they print."""

import dataclasses

import pytest

from errors import UserError
from training import metrics
from training.loop import train
from training.settings import RunSettings, load_settings, parse, save_settings


def test_a_run_can_start_from_the_weights_of_a_model_with_another_norm(flags, run, tmp_path, capsys):
    settings = parse([*flags, "--steps", "3", "--init-from", str(run), "--norm", "layer"], "test").settings
    train(settings, tmp_path / "swapped")
    out = capsys.readouterr().out
    assert "tensors kept from" in out and "5 new: " in out  # the biases of two norms in two layers and the last one
    lines = metrics.read(tmp_path / "swapped")
    assert lines[1]["loss"] < 5.0  # starts from what the other run learned, not from log(400) = 6.0


def test_a_converted_norm_keeps_the_biases_of_the_run_unless_they_are_dropped(flags, tmp_path):
    train(parse([*flags, "--steps", "1", "--norm", "layer"], "test").settings, tmp_path / "layer")
    start = [*flags, "--init-from", str(tmp_path / "layer")]
    expected = {("rms",): True, ("rms", "--no-norm-bias"): None, ("layer",): None, ("l2",): True, ("none",): None}
    for (norm, *more), bias in expected.items():
        assert parse([*start, "--norm", norm, *more], "test").settings.model.norm_bias is bias, (norm, more)


@pytest.mark.parametrize("how", ["flag", "file"])
def test_falling_back_to_another_save_prints_one_note_and_the_settings_name_that_save(flags, run, tmp_path, capfd, how):
    (run / "best" / "model.safetensors").unlink()
    chosen = ["--init-from", str(run)]
    if how == "file":
        first = load_settings(run / "settings.toml")
        save_settings(dataclasses.replace(first, run=RunSettings(init_from=str(run))), tmp_path / "from.toml")
        chosen = ["--config", str(tmp_path / "from.toml")]
    settings = parse([*flags, *chosen, "--steps", "1"], "test").settings
    assert settings.run.init_from == str(run / "last")
    train(settings, tmp_path / "second")
    assert capfd.readouterr().err.count("note: ") == 1
    assert load_settings(tmp_path / "second" / "settings.toml").run.init_from == str(run / "last")


def test_missing_weights_are_a_one_line_error_before_the_run_starts(flags, tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist; give a checkpoint"):
        parse([*flags, "--init-from", str(tmp_path / "nowhere")], "test")
