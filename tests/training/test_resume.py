"""A run that was stopped or killed and then resumed equals, bit for bit, the run that was not."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from errors import UserError
from training import checkpoint, metrics
from training.evaluate import Evaluation
from training.loop import save, train, train_steps
from training.session import set_up
from training.settings import parse, save_settings

ROOT = Path(__file__).parent.parent.parent
TIMES = ("seconds",)
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # rounding depends on how many threads share a sum


def measurements(run: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics.read(run)]


def assert_equal_runs(found: Path, expected: Path) -> None:
    """Weights, moments and every logged number are bit-identical."""
    last = [checkpoint.find_last(run) for run in (found, expected)]  # a kill may have left it as last.new
    for file in ("model.safetensors", "training_state.safetensors"):
        left, right = (load_file(directory / file) for directory in last)
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), name
    left, right = ({p.name: p.read_bytes() for p in directory.glob("*token*")} for directory in last)
    assert left == right and len(left) >= 3
    assert measurements(found) == measurements(expected)
    states = [json.loads((directory / "state.json").read_text()) for directory in last]
    for state in states:
        del state["seconds"]
    assert states[0] == states[1]


def stop_at(monkeypatch, last: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal while it logs the step `last`."""
    write = metrics.Metrics.write

    def write_and_signal(self, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == last and "loss" in values:
            signal.raise_signal(number)

    monkeypatch.setattr(metrics.Metrics, "write", write_and_signal)


@pytest.mark.parametrize(
    ("dtype", "number", "optimizer"), [("float32", signal.SIGINT, "adamw"), ("bfloat16", signal.SIGTERM, "muon")]
)
def test_40_steps_equal_20_and_20_resumed(flags, tmp_path, monkeypatch, capsys, dtype, number, optimizer):
    growing = ["--first-sequence-length", "8"] if optimizer == "muon" else []
    settings = parse([*flags, "--dtype", dtype, "--optimizer", optimizer, *growing], "test").settings
    assert train(settings, tmp_path / "straight") == 0
    stop_at(monkeypatch, 20, number)
    assert train(settings, tmp_path / "resumed") == number
    monkeypatch.undo()
    assert f"resume with: python train.py --resume {tmp_path / 'resumed'}" in capsys.readouterr().out
    assert checkpoint.read_state(tmp_path / "resumed" / "last").step == 20
    assert train(settings, tmp_path / "resumed", resume=True) == 0
    assert_equal_runs(tmp_path / "resumed", tmp_path / "straight")


def test_a_caller_of_the_steps_can_stop_at_any_of_them_save_and_resume_bit_for_bit(flags, tmp_path):
    settings = parse(flags, "test").settings
    train(settings, tmp_path / "straight")
    expected = [line["loss"] for line in metrics.read(tmp_path / "straight") if "loss" in line]
    losses = []
    for stop in (1, 18, 40):
        session = set_up(settings, tmp_path / "steps", resume=stop > 1, log=lambda line: None)
        for result in train_steps(session):
            losses.append(result.loss)
            if result.step == stop:
                break
        save(session)
        assert session.saver.finish()
        save_settings(settings, tmp_path / "steps" / "settings.toml")
    assert losses == expected
    for file in ("model.safetensors", "training_state.safetensors"):
        found, straight = (load_file(tmp_path / name / "last" / file) for name in ("steps", "straight"))
        assert found.keys() == straight.keys() and all(torch.equal(found[name], straight[name]) for name in straight)


def test_a_run_that_is_killed_ends_bit_for_bit_like_one_that_was_not(flags, tmp_path):
    flags = [*flags, "--steps", "80", "--evaluate-every", "4"]
    train(parse(flags, "test").settings, tmp_path / "straight")
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--out", "killed"]
    with subprocess.Popen(command, cwd=tmp_path, env=ONE_THREAD, stdout=subprocess.DEVNULL) as process:
        while checkpoint.find_complete(tmp_path / "killed" / "last") is None and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.3))
        process.kill()
    assert process.returncode != 0, "it ended before it was killed"
    killed = tmp_path / "killed"
    assert train(parse(["--resume", str(killed)], "test").settings, killed, resume=True) == 0
    assert_equal_runs(killed, tmp_path / "straight")


@pytest.fixture
def stopped_run(flags, tmp_path, monkeypatch) -> Path:
    stop_at(monkeypatch, 5)
    train(parse(flags, "test").settings, tmp_path / "run")
    monkeypatch.undo()
    return tmp_path / "run"


def test_resuming_with_another_text_tokenizer_model_or_optimizer_says_what_differs(flags, stopped_run, tmp_path):
    (tmp_path / "other").mkdir()
    for number in range(60):
        (tmp_path / "other" / f"{number}.txt").write_text(f"something else number {number}\n" * 40)
    for change, message in (
        (("--data", str(tmp_path / "other")), "the text differs"),
        (("--hidden-size", "64"), "cannot be resumed: hidden_size: 32 -> 64"),
        (("--norm", "layer"), "cannot be resumed: norm: rms -> layer"),
        (("--qk-norm",), "cannot be resumed: qk_norm: False -> True"),
        (("--optimizer", "adamw"), "cannot be resumed: optimizer: muon -> adamw"),
        (("--tokenizer", str(stopped_run / "last")), "cannot be resumed: tokenizer: None -> "),
        (("--validation-salt", "1"), "cannot be resumed: validation_salt: 0 -> 1"),
        (("--validation-fraction", "0.1"), "cannot be resumed: validation_fraction: 0.05 -> 0.1"),
        (("--seed", "2"), "cannot be resumed: seed: 1 -> 2"),
    ):
        settings = parse(["--resume", str(stopped_run), *change], "test").settings
        with pytest.raises(UserError, match=message):
            train(settings, stopped_run, resume=True)
    assert checkpoint.read_state(stopped_run / "last").step == 5


def test_a_resumed_run_lists_other_changes_and_ends_at_its_own_number_of_steps_or_the_given_one(stopped_run, capsys):
    def resume(*flags: str) -> int:
        train(parse(["--resume", str(stopped_run), *flags], "test").settings, stopped_run, resume=True)
        return checkpoint.read_state(stopped_run / "last").step

    assert resume("--steps", "7", "--learning-rate", "0.001") == 7
    out = capsys.readouterr().out
    assert "learning_rate: 0.003 -> 0.001" in out and "steps: 40 -> 7" in out
    with pytest.raises(UserError, match=r"has already done 7 steps; for more, raise --steps"):
        resume()
    assert resume("--steps", "40") == 40


@pytest.mark.parametrize(
    "change", ["validation_salt = 9", "validation_fraction = 0.6", "seed = 2", "norm_eps = 0.5", 'optimizer = "adamw"']
)
def test_an_edited_file_of_settings_does_not_change_what_a_run_must_keep(stopped_run, change):
    path, name = stopped_run / "settings.toml", change.partition(" =")[0]
    path.write_text(re.sub(rf"^{name} = .*$", change, path.read_text(), flags=re.MULTILINE))
    settings = parse(["--resume", str(stopped_run)], "test").settings
    with pytest.raises(UserError, match=r"cannot be resumed: settings.toml is not that of its start"):
        train(settings, stopped_run, resume=True)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_resumed_run_with_another_batch_size_goes_on_with_the_text_where_it_was(flags, stopped_run, size):
    given = parse(flags, "test").settings
    whole = set_up(given, stopped_run, resume=False)
    expected = np.concatenate([whole.batch(step)[0] for step in range(5 + 6)])[5 * 8 :]
    changed = parse(["--resume", str(stopped_run), "--batch-size", str(size), "--steps", "60"], "test").settings
    resumed = set_up(changed, stopped_run, resume=True)
    found = [resumed.batch(step)[0] for step in range(5, 5 + 48 // size)]
    assert np.array_equal(np.concatenate(found), expected[: 48 // size * size])
    next(train_steps(resumed))
    assert np.array_equal(np.concatenate([resumed.batch(step)[0] for step in (5, 6)]), expected[: 2 * size][:48])


def test_a_resumed_run_whose_best_was_deleted_ends_with_its_summary(flags, stopped_run, monkeypatch, capsys):
    shutil.rmtree(stopped_run / "best", ignore_errors=True)
    worse = Evaluation(1e6, 10, 10)  # never better, so that best/ is not written again
    state = checkpoint.read_state(stopped_run / "last")
    (stopped_run / "last" / "state.json").write_text(json.dumps(vars(state) | {"best_validation_loss": 1.0}))
    monkeypatch.setattr("training.loop.evaluate", lambda *_: worse)
    settings = parse(["--resume", str(stopped_run), "--steps", "8"], "test").settings
    assert train(settings, stopped_run, resume=True) == 0
    assert "next: python generate.py" in capsys.readouterr().out


def test_a_run_with_best_and_without_last_keeps_its_model(stopped_run):
    (stopped_run / "last").rename(stopped_run / "best")
    settings = parse(["--resume", str(stopped_run)], "test").settings
    with pytest.raises(UserError, match=rf"only best/ was saved, .* --init-from {stopped_run} .*; start a new run"):
        train(settings, stopped_run, resume=True)
    shutil.rmtree(stopped_run / "best")
    with pytest.raises(UserError, match="cannot be resumed: nothing was saved yet; start a new run"):
        train(settings, stopped_run, resume=True)


def test_a_resumed_run_needs_neither_the_weights_it_started_from_nor_the_cache(flags, stopped_run, tmp_path, cache):
    settings = parse([*flags, "--init-from", str(stopped_run), "--steps", "8", "--norm", "layer"], "test").settings
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        train(settings, tmp_path / "second")
    shutil.rmtree(stopped_run)
    resumed = parse(["--resume", str(tmp_path / "second"), "--cache", str(tmp_path / "new cache")], "test").settings
    assert train(resumed, tmp_path / "second", resume=True) == 0
    assert checkpoint.read_state(tmp_path / "second" / "last").step == 8


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_unless_it_ignores_that(flags, tmp_path, monkeypatch, ignored):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        stop_at(monkeypatch, 5, signal.SIGHUP)
        stopped_by = train(parse(flags, "test").settings, tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert stopped_by == (0 if ignored else signal.SIGHUP)
    assert checkpoint.read_state(tmp_path / "run" / "last").step == (40 if ignored else 5)


def test_lines_after_the_checkpoint_are_removed_on_resume(stopped_run):
    lines = metrics.read(stopped_run)
    with (stopped_run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 6, "validation_loss": 1.0, "perplexity": 2.0, "bits_per_byte": 1.0}) + "\n")
        file.write('{"step": 7, "los')  # and a line that was never finished
    log = metrics.Metrics(stopped_run, after_step=5)
    log.file.close()
    assert metrics.read(stopped_run) == lines


@pytest.mark.parametrize("exists", [True, False])
def test_a_resumed_run_writes_nothing_through_links(stopped_run, tmp_path, exists):
    folder, file = tmp_path / "others" / "folder", tmp_path / "others" / "file"
    if exists:
        folder.mkdir(parents=True)
        file.write_text("kept")
    files = ("settings.toml.new", "metrics.jsonl.new", "loss.png", "loss.png.new")
    for name in ("best", "best.new", "best.old", "last.new", "last.old", *files):
        (stopped_run / name).unlink(missing_ok=True)
        (stopped_run / name).symlink_to(file if name in files else folder)
    train(parse(["--resume", str(stopped_run)], "test").settings, stopped_run, resume=True)
    assert not any(path.is_symlink() for path in stopped_run.iterdir())
    assert checkpoint.read_state(stopped_run / "last").step == 40 and (stopped_run / "best" / "state.json").is_file()
    assert sorted((tmp_path / "others").rglob("*")) == [file, folder] * exists
    assert not exists or file.read_text() == "kept"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file to simulate a full disk with")
def test_a_disk_that_fills_up_during_a_run_leaves_the_last_save_intact(stopped_run):
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["train.py", "--resume", {str(stopped_run)!r}]
from errors import exit_on_user_error
import train
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
with exit_on_user_error():
    train.main()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert out.returncode == 2, out.stderr
    assert out.stderr.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in out.stderr
    assert "note: step 40 is not saved" in out.stdout and "safetensors could not be written" in out.stdout
    assert checkpoint.read_state(stopped_run / "last").step == 5
