"""`--compile` on a machine that lacks a compiler."""

from model import device
from training.loop import train
from training.settings import parse


def test_compiling_without_a_compiler_is_said_in_one_line(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    train(parse([*flags, "--compile", "--steps", "2"], "test").settings, tmp_path / "run")
    assert "no C++ compiler found" in capsys.readouterr().out
