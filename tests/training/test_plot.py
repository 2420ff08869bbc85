"""The loss curves of a run."""

import os
import subprocess
import sys
from pathlib import Path

from training import plot


def test_a_run_with_a_loss_that_is_not_finite_can_be_plotted(run, tmp_path):
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": "nan", "gradient_norm": "nan"}\n')
    plot.draw([run, run], tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_a_matplotlib_backend_that_is_not_there_does_not_matter(run, tmp_path):
    arguments = ["-m", "training.plot", str(run), "--out", str(tmp_path / "loss.png")]
    environment = {**os.environ, "MPLBACKEND": "bogus"}
    subprocess.run([sys.executable, *arguments], cwd=Path(__file__).parents[2], env=environment, timeout=60, check=True)
    assert (tmp_path / "loss.png").is_file()
