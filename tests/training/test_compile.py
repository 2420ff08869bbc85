"""`--compile` on a machine that lacks a compiler."""

import pytest

from errors import UserError
from model import device
from training.loop import train
from training.settings import parse


def test_without_a_compiler_one_line_says_so(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    with pytest.raises(UserError, match=r"--compile: no C\+\+ compiler found"):
        train(parse([*flags, "--compile"], "test").settings, tmp_path / "run")
