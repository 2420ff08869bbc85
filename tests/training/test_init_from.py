"""Runs that start from given weights: what is kept of them, and what is said."""

import dataclasses

import pytest

from errors import UserError
from training import metrics
from training.loop import train
from training.settings import RunSettings, load, parse, save


def test_a_norm_can_be_swapped_on_the_way_in(flags, run, tmp_path, capsys):
    settings = parse([*flags, "--steps", "3", "--init-from", str(run), "--norm", "layer"], "test").settings
    train(settings, tmp_path / "swapped")
    out = capsys.readouterr().out
    assert "tensors kept from" in out and "5 new: " in out  # the biases of two norms in two layers and the last one
    lines = metrics.read(tmp_path / "swapped")
    assert lines[1]["loss"] < 5.0  # starts from what the other run learned, not from log(400) = 6.0


@pytest.mark.parametrize("how", ["flag", "file"])
def test_that_another_save_is_used_is_said_once_and_its_directory_is_kept(flags, run, tmp_path, capfd, how):
    (run / "best" / "model.safetensors").unlink()
    chosen = ["--init-from", str(run)]
    if how == "file":
        first = load(run / "settings.toml")
        save(dataclasses.replace(first, run=RunSettings(init_from=str(run))), tmp_path / "from.toml")
        chosen = ["--config", str(tmp_path / "from.toml")]
    settings = parse([*flags, *chosen, "--steps", "1"], "test").settings
    assert settings.run.init_from == str(run / "last")
    train(settings, tmp_path / "second")
    assert capfd.readouterr().err.count("note: ") == 1
    assert load(tmp_path / "second" / "settings.toml").run.init_from == str(run / "last")


def test_weights_that_are_not_there_are_a_sentence_before_anything_is_done(flags, tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist; give a checkpoint"):
        parse([*flags, "--init-from", str(tmp_path / "nowhere")], "test")
