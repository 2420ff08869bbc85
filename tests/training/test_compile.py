"""`--compile` on a machine that lacks a compiler."""

from model import device
from training.loop import train
from training.settings import parse


def test_without_a_compiler_the_model_runs_eagerly_and_one_line_says_so(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    train(parse([*flags, "--compile", "--steps", "2"], "test").settings, tmp_path / "run")
    assert "no C++ compiler found" in capsys.readouterr().out
