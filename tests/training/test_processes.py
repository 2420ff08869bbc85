"""One run in several processes, as torchrun starts them."""

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
from training.checkpoint import find_last, read_state
from training.loop import train
from training.processes import Processes, start_processes
from training.settings import parse

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def start(tmp_path):
    """A function that starts `torchrun train.py` in the folder of the test, with a pipe for each stream."""
    children = []

    def popen(*arguments: str) -> subprocess.Popen:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [*torchrun, str(ROOT / "train.py"), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=environment))
        return children[-1]

    yield popen
    for child in children:
        child.terminate()  # torchrun then stops its own
        child.communicate()


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
    assert read_state(tmp_path / "two" / "last").tokens == 10 * 8 * 32


def test_a_mistake_is_a_line_of_the_main_process(flags, start):
    process = start(*flags, "--batch-size", "3")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1 and errors.count("error: --batch-size 3 cannot be divided by 2 processes") == 1


@pytest.mark.parametrize("stopped", ["SIGTERM", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_run_whose_process_is_killed_or_that_is_stopped_resumes(flags, tmp_path, start, stopped):
    process = start(*flags, "--steps", "100000", "--out", "run")
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 16)  # past the evaluation of step 10, which saves
    if stopped == "kill":
        psutil.Process(process.pid).children()[1].kill()
    else:
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=200)
    assert process.returncode != 0 and ("stopped and saved at step" in out) == (stopped == "SIGTERM")
    done = read_state(find_last(tmp_path / "run")).step
    resumed = parse(["--resume", str(tmp_path / "run"), "--steps", str(done + 2)], "test").settings
    assert train(resumed, tmp_path / "run", resume=True) == 0
    assert read_state(tmp_path / "run" / "last").step == done + 2


def wait_for_lines(path: Path, count: int) -> None:
    """Wait until a file has so many lines."""
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_batchnorm_in_several_processes_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "start_processes", lambda *_: Processes(count=2))
    batch = dataclasses.replace(settings, model=dataclasses.replace(settings.model, norm="batch"))
    with pytest.raises(UserError, match="--norm batch has statistics of its own in each process"):
        session.set_up(batch, tmp_path / "run", resume=False)


def test_a_process_alone_is_the_main_one_whatever_rank_the_environment_has(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_main_process() and start_processes("cpu", 10).is_main
