"""One run in several processes, as torchrun starts them."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from errors import UserError, is_main_process
from tests.training.runs import losses, open_session, resume, train_run
from training import session
from training.checkpoint import find_last, read_state
from training.loop import train_steps
from training.processes import Processes, start_processes

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("stopped", ["SIGTERM", pytest.param("kill", marks=pytest.mark.slow)])
def test_two_processes_train_the_run_of_one_and_it_resumes_after_a_signal_or_a_kill(flags, tmp_path, stopped):
    flags = [*flags, "--steps", "100000", "--micro-batch-size", "2", "--activation-checkpointing"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command, run = [*torchrun, str(ROOT / "train.py"), *flags, "--out", "run"], tmp_path / "run"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    try:
        file, deadline = run / "metrics.jsonl", time.monotonic() + 100
        while not file.exists() or file.read_bytes().count(b"\n") < 16:  # past the save of step 10
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if stopped == "kill":
            psutil.Process(process.pid).children()[1].kill()
    finally:
        process.terminate()
        out, errors = process.communicate(timeout=200)
    assert process.returncode != 0 and out.count("stopped and saved at step") == (1 if stopped == "SIGTERM" else 0)
    assert out.count("run: ") == 1 and "Warning" not in errors  # only the main process prints
    state = read_state(find_last(run))
    assert state.tokens == state.step * 8 * 32
    one = itertools.islice(train_steps(open_session(tmp_path, *flags)), state.step)
    assert losses(run)[: state.step] == pytest.approx([result.loss for result in one], rel=1e-4)
    assert resume(run, "--steps", str(state.step + 2)) == 0
    assert read_state(run / "last").step == state.step + 2


def test_processes_must_be_given_equal_texts_tokenizers_settings_and_saves(flags, text_folder, tmp_path, monkeypatch):
    def compared(*more: str, resume: bool = False) -> dict[str, object]:
        """What a process compares with the others."""
        found = {}
        with monkeypatch.context() as patch:
            patch.setattr(Processes, "check_equal", lambda _, **values: found.update(values))
            open_session(tmp_path / "run", *more, resume=resume)
        return found

    copy = shutil.copytree(text_folder, tmp_path / "copy")
    run = train_run(tmp_path / "run", *flags, "--steps", "2")
    tokenizer = ["--tokenizer", str(shutil.copytree(run / "last", tmp_path / "tokenizer"))]
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    alike = compared(*flags)
    assert compared(*flags, "--data", str(copy), *tokenizer, "--out", "x", "--cache", str(tmp_path / "cache")) == alike
    config.write_text(config.read_text().replace('"add_bos_token": true', '"add_bos_token": false'))
    (copy / "00.txt").write_text("another text")
    others = {
        "texts": compared(*flags, "--data", str(copy), "--tokenizer", str(run / "last")),
        "tokenizers": compared(*flags, *tokenizer),
        "settings": compared(*flags, "--learning-rate", "1e-3"),
        "saves": compared("--resume", str(run), *flags, resume=True),
    }
    for name, values in others.items():
        assert [key for key in alike if values[key] != alike[key]] == [name]
    monkeypatch.setattr(Processes, "max", lambda _, value: value if value < 0 else value + 1)  # one has another number
    with pytest.raises(UserError, match="the texts of the processes differ; give all the same files"):
        Processes().check_equal(**alike)


def test_what_several_processes_cannot_train_is_a_line(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "start_processes", lambda *_: Processes(count=4))
    for flag, value, message in (
        ("--norm", "batch", "has statistics of its own in each process"),
        ("--batch-size", "2", "cannot be divided by 4 processes"),
    ):
        with pytest.raises(UserError, match=f"{flag} {value} {message}"):
            open_session(tmp_path, *flags, flag, value)


def test_a_process_alone_is_the_main_one_whatever_rank_the_environment_has(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_main_process() and start_processes("cpu", 10).is_main
