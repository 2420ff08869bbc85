"""The loss curves of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from errors import UserError
from training import plot
from training.loop import train
from training.settings import parse


def command(monkeypatch, *arguments: object) -> None:
    """Run the program in this process."""
    monkeypatch.setattr(sys, "argv", ["plot", *map(str, arguments)])
    plot.main()


def test_a_run_with_a_loss_that_is_not_finite_can_be_plotted(run, tmp_path):
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": "nan", "gradient_norm": "nan"}\n')
    plot.draw([run, run], tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_differ_in_more_than_one_setting_get_a_note(run, flags, tmp_path, monkeypatch, capsys):
    for name, more in (("layer", []), ("both", ["--seed", "2"])):
        train(parse([*flags, "--steps", "20", "--norm", "layer", *more], "test").settings, tmp_path / name)
    capsys.readouterr()
    command(monkeypatch, tmp_path / "layer", tmp_path / "both", "--out", tmp_path / "one.svg")
    assert "note" not in capsys.readouterr().out
    command(monkeypatch, tmp_path / "both", run, "--out", tmp_path / "three.svg")
    printed = capsys.readouterr().out
    for change in ("norm: layer -> rms", "seed: 2 -> 1", "steps: 20 -> 40"):
        assert change in printed.splitlines()[0]


def test_other_endings_are_refused(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="must end in"):
        command(monkeypatch, run, "--out", tmp_path / "loss.xyz")


def test_a_matplotlib_backend_that_is_not_there_does_not_matter(run, tmp_path):
    arguments = ["-m", "training.plot", str(run), "--out", str(tmp_path / "loss.png")]
    environment = {**os.environ, "MPLBACKEND": "bogus"}
    subprocess.run([sys.executable, *arguments], cwd=Path(__file__).parents[2], env=environment, timeout=60, check=True)
    assert (tmp_path / "loss.png").is_file()
