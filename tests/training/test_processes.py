"""One run in several processes, as `train.py --processes N` starts them."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from errors import UserError, is_main_process
from training import metrics, session
from training.loop import train
from training.processes import Processes, start_processes
from training.settings import parse

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def start(tmp_path):
    """A function that starts `train.py --processes 2` in the folder of the test, with a pipe for each stream."""
    children = []

    def popen(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "train.py"), "--processes", "2", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=environment))
        return children[-1]

    yield popen
    for child in children:
        child.kill()


@pytest.mark.parametrize("way", ["--activation-checkpointing", pytest.param("--compile", marks=pytest.mark.slow)])
def test_two_processes_train_the_run_of_one(flags, tmp_path, start, way):
    few = [*flags, "--steps", "10", "--micro-batch-size", "2"]
    train(parse(few, "test").settings, tmp_path / "one")
    process = start(*few, "--out", "two", way)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    assert out.count("next: ") == 1 and "Warning" not in errors  # only the main process prints
    one, two = ([line["loss"] for line in metrics.read(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (["--data", "nothere"], 'error: no file, folder or known text is called "nothere"'),  # only the main sees it
        (["--batch-size", "3"], "error: --batch-size 3 cannot be divided by 2 processes"),
    ],
)
def test_a_mistake_is_one_line_of_the_main_process_and_status_2(flags, start, mistake, line):
    process = start(*flags, *mistake)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2 and errors.startswith(line) and errors.count("\n") == 1


@pytest.mark.parametrize("killed", [0, 1])
def test_after_a_kill_one_line_says_how_to_resume(flags, tmp_path, start, killed):
    process = start(*flags, "--steps", "100000", "--out", "run")
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 16)  # past the evaluation of step 10, which saves
    ranks = {child.environ()["RANK"]: child for child in psutil.Process(process.pid).children()}
    ranks[str(killed)].kill()
    _, errors = process.communicate(timeout=60)
    expected = "error: process 0 was killed (SIGKILL)" if killed == 0 else "error: another process of this run ended"
    assert process.returncode == (137 if killed == 0 else 2) and "Traceback" not in errors
    assert expected in errors.splitlines()[-1] and "--resume" in errors.splitlines()[-1]


def test_a_stop_is_saved_and_resumes(flags, tmp_path, start):
    process = start(*flags, "--steps", "100000", "--out", "run")
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 3)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped and saved at step" in out and "Traceback" not in errors
    done = metrics.read(tmp_path / "run")[-1]["step"]
    process = start("--resume", "run", "--steps", str(done + 2))
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and f"resuming from run/last, step {done} of {done + 2}" in out


def wait_for_lines(path: Path, count: int) -> None:
    """Wait until a file has so many lines."""
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_batchnorm_in_several_processes_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "start_processes", lambda device, _: (Processes(count=2), device))
    batch = dataclasses.replace(settings, model=dataclasses.replace(settings.model, norm="batch"))
    with pytest.raises(UserError, match="--norm batch has statistics of its own in each process"):
        session.set_up(batch, tmp_path / "run", resume=False)


def test_a_process_alone_is_the_main_one_whatever_rank_the_environment_has(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_main_process() and start_processes("cpu", 10)[0].is_main
