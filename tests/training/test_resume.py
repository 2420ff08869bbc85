"""A run that was stopped or killed and then resumed equals, bit for bit, the run that was not."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from errors import UserError
from tests.training import runs
from training import checkpoint, metrics
from training.evaluate import Evaluation
from training.loop import train, train_steps


def step_of(run: Path) -> int:
    return checkpoint.read_state(run / "last").step


@pytest.mark.parametrize(
    ("dtype", "number", "optimizer"), [("float32", signal.SIGINT, "adamw"), ("bfloat16", signal.SIGTERM, "muon")]
)
def test_16_steps_equal_8_and_8_resumed(flags, tmp_path, monkeypatch, capsys, dtype, number, optimizer):
    growing = ["--first-sequence-length", "8"] if optimizer == "muon" else []
    flags = [*flags, "--steps", "16", "--evaluate-every", "6", "--dtype", dtype, "--optimizer", optimizer, *growing]
    straight = runs.train_run(tmp_path / "straight", *flags)
    runs.after_step(monkeypatch, 8, lambda: signal.raise_signal(number))
    assert train(runs.settings_of(*flags), tmp_path / "run") == number
    monkeypatch.undo()
    assert f"resume with:\n  python train.py --resume {tmp_path / 'run'}\n" in capsys.readouterr().out
    assert step_of(tmp_path / "run") == 8
    assert runs.resume(tmp_path / "run") == 0
    runs.assert_equal_runs(tmp_path / "run", straight)


@pytest.fixture(scope="module")
def run_of_five_steps(flags, tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        runs.after_step(patch, 5, lambda: signal.raise_signal(signal.SIGTERM))
        return runs.train_run(tmp_path_factory.mktemp("stopped") / "run", *flags)


@pytest.fixture
def stopped_run(run_of_five_steps, tmp_path) -> Path:
    """A run that was stopped after five of forty steps."""
    return shutil.copytree(run_of_five_steps, tmp_path / "run")


def test_resuming_with_another_text_tokenizer_model_or_optimizer_says_what_differs(stopped_run, tmp_path):
    (tmp_path / "other.txt").write_text("".join(f"something else number {number}\n" * 40 for number in range(60)))
    for flag, value, message in (
        ("--data", str(tmp_path / "other.txt"), "the text differs"),
        ("--norm", "layer", "norm: rms -> layer"),
        ("--optimizer", "adamw", "optimizer: muon -> adamw"),
        ("--sequence-length", "8", "sequence_length: 32 -> 8"),
        ("--tokenizer", str(stopped_run / "last"), "tokenizer: None -> "),
    ):
        with pytest.raises(UserError, match=f"cannot be resumed: {message}"):
            runs.resume(stopped_run, flag, value)
    assert step_of(stopped_run) == 5


@pytest.mark.parametrize(
    "change", ["document_mask = true", "validation_salt = 9", "validation_fraction = 0.6", "seed = 2", "norm_eps = 0.5"]
)
def test_an_edited_file_of_settings_does_not_change_what_a_run_must_keep(stopped_run, change):
    path, name = stopped_run / "settings.toml", change.partition(" =")[0]
    path.write_text(re.sub(rf"^{name} = .*$", change, path.read_text(), flags=re.MULTILINE))
    with pytest.raises(UserError, match=rf"cannot be resumed: .*{name}: .* -> "):
        runs.resume(stopped_run)


def test_a_resumed_run_lists_other_changes_and_ends_at_its_own_number_of_steps_or_the_given_one(stopped_run, capsys):
    runs.resume(stopped_run, "--steps", "7", "--learning-rate", "0.001")
    out = capsys.readouterr().out
    assert step_of(stopped_run) == 7 and "learning_rate: 0.003 -> 0.001" in out and "steps: 40 -> 7" in out
    with pytest.raises(UserError, match=r"has already done 7 steps; for more, raise --steps"):
        runs.resume(stopped_run)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_resumed_run_with_another_batch_size_goes_on_with_the_text_where_it_was(flags, stopped_run, size):
    whole = runs.open_session(stopped_run, *flags)
    expected = np.concatenate([whole.batch(step)[0] for step in range(5 + 6)])[5 * 8 :]
    changed = ["--resume", str(stopped_run), "--batch-size", str(size), "--steps", "60"]
    resumed = runs.open_session(stopped_run, *changed, resume=True)
    inputs = [resumed.batch(step)[0] for step in range(5, 5 + 48 // size)]
    assert np.array_equal(np.concatenate(inputs), expected[: 48 // size * size])
    next(train_steps(resumed))
    assert np.array_equal(np.concatenate([resumed.batch(step)[0] for step in (5, 6)]), expected[: 2 * size][:48])


def test_a_resumed_run_whose_best_was_deleted_ends_with_its_summary(stopped_run, monkeypatch, capsys):
    state = checkpoint.read_state(stopped_run / "last")
    (stopped_run / "last" / "state.json").write_text(json.dumps(vars(state) | {"best_validation_loss": 1.0}))
    monkeypatch.setattr("training.loop.evaluate", lambda *_: Evaluation(1e6, 10, 10))  # never better: no best/
    assert runs.resume(stopped_run, "--steps", "8") == 0
    assert "next: python generate.py" in capsys.readouterr().out


def test_a_run_with_best_and_without_last_keeps_its_model(stopped_run):
    (stopped_run / "last").rename(stopped_run / "best")
    with pytest.raises(UserError, match=rf"only best/ was saved, .* --init-from {stopped_run} .*; start a new run"):
        runs.resume(stopped_run)
    shutil.rmtree(stopped_run / "best")
    with pytest.raises(UserError, match=r"cannot be resumed: nothing was saved yet, .*; start a new run"):
        runs.resume(stopped_run)


def test_a_resumed_run_needs_neither_the_weights_it_started_from_nor_the_cache(flags, stopped_run, tmp_path):
    start = ["--init-from", str(stopped_run), "--norm", "layer", "--steps", "3"]
    second = runs.train_run(tmp_path / "second", *flags, *start)
    shutil.rmtree(stopped_run)
    assert runs.resume(second, "--steps", "5", "--cache", str(tmp_path / "new cache")) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_unless_it_ignores_that(flags, tmp_path, monkeypatch, ignored):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        runs.after_step(monkeypatch, 5, lambda: signal.raise_signal(signal.SIGHUP))
        stopped_by = train(runs.settings_of(*flags, "--steps", "7"), tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert stopped_by == (0 if ignored else signal.SIGHUP)
    assert step_of(tmp_path / "run") == (7 if ignored else 5)


def test_lines_after_the_checkpoint_are_removed_on_resume(stopped_run):
    lines = metrics.read(stopped_run)
    metrics.write(stopped_run, 6, validation_loss=1.0, bits_per_byte=None)
    assert metrics.read(stopped_run) == [*lines, {"step": 6, "validation_loss": 1.0}]
    with (stopped_run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 7, "los')  # a line that was never finished
    metrics.keep_until(stopped_run, 5)
    assert metrics.read(stopped_run) == lines


def test_a_resumed_run_writes_no_file_through_a_link(stopped_run, tmp_path):
    file = tmp_path / "file of others"
    file.write_text("kept")
    for name in ("settings.toml.new", "metrics.jsonl.new", "loss.png", "loss.png.new"):
        (stopped_run / name).unlink(missing_ok=True)
        (stopped_run / name).symlink_to(file)
    runs.resume(stopped_run, "--steps", "7")
    assert not any(path.is_symlink() for path in stopped_run.iterdir())
    assert step_of(stopped_run) == 7 and file.read_text() == "kept"


def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_last_save_intact(stopped_run):
    resource = pytest.importorskip("resource")  # Windows has no limit on the size of a file
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"step 7 cannot be saved \(.*safetensors .*\); the last save is kept: "):
            runs.resume(stopped_run, "--steps", "7")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert step_of(stopped_run) == 5 and runs.resume(stopped_run, "--steps", "7") == 0
    assert {path.name for path in stopped_run.iterdir()} >= {"best", "last"} and not [*stopped_run.glob("*.new")]
