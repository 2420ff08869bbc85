"""One run in several processes under torchrun."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from errors import UserError
from training import metrics, session
from training.loop import train
from training.processes import Processes, is_main_process, start_processes
from training.settings import parse

ROOT = Path(__file__).parent.parent.parent


def test_two_processes_train_the_run_of_one(flags, tmp_path):
    few = [*flags, "--steps", "10"]
    train(parse(few, "test").settings, tmp_path / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "train.py"), *few, "--out", "two"]
    out = subprocess.run([*launch, *script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout.count("next: ") == 1  # only the main process prints
    one, two = ([line["loss"] for line in metrics.read(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


def test_batchnorm_in_several_processes_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "start_processes", lambda device: (Processes(count=2), device))
    batch = dataclasses.replace(settings, model=dataclasses.replace(settings.model, norm="batch"))
    with pytest.raises(UserError, match="--norm batch has statistics of its own in each process"):
        session.set_up(batch, tmp_path / "run", resume=False)


def test_a_world_size_without_the_variables_of_torchrun_is_a_one_line_error(monkeypatch):
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=f"WORLD_SIZE 2 but no {', '.join(names)}; start .* with torchrun"):
        start_processes("cpu")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="WORLD_SIZE 2 but no LOCAL_RANK, "):
        start_processes("cpu")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORLD_SIZE", "abc"),
        ("RANK", "x"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_PORT", "²"),
        ("RANK", "2"),
        ("RANK", "9" * 99),
    ],
)
def test_variables_that_torchrun_never_sets_so_are_a_one_line_error(monkeypatch, variable, value):
    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, usual in torchrun.items():
        monkeypatch.setenv(name, value if name == variable else usual)
    with pytest.raises(UserError, match=f"the environment has {variable} .* torchrun"):
        start_processes("cpu")


def test_a_process_alone_is_the_main_one_whatever_rank_the_environment_has(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_main_process() and start_processes("cpu")[0].is_main
