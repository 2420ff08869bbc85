"""What a run leaves behind, and what it says when it cannot go on."""

import dataclasses
import json
import math
import platform

import pytest
import torch
from safetensors.torch import load_file

from errors import UserError
from training import loop, metrics
from training.evaluate import Evaluation
from training.loop import train
from training.settings import load, parse


def test_a_run_leaves_settings_metrics_a_picture_and_two_checkpoints(run, settings):
    assert {path.name for path in run.iterdir() if not path.name.startswith("events.")} == {
        *("settings.toml", "metrics.jsonl", "loss.png", "last", "best")
    }
    assert any(path.name.startswith("events.") for path in run.iterdir())
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = load(run / "settings.toml")
    assert dataclasses.replace(saved, run=settings.run) == settings
    assert metrics.read(run)[0]["text"].endswith(platform.python_version())
    lines = metrics.read(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert [line["step"] for line in lines if "validation_loss" in line] == [10, 20, 30, 40]
    state = json.loads((run / "last" / "state.json").read_text())
    assert state["step"] == 40 and state["tokens"] == 40 * 8 * 32
    assert state["best_validation_loss"] == min(line.get("validation_loss", 9e9) for line in lines)
    assert all(state[f"{what}_hash"] for what in ("text", "tokenizer", "settings", "weights"))


def test_the_model_learns(run):
    lines = metrics.read(run)
    assert lines[1]["loss"] == pytest.approx(math.log(400), rel=0.02)  # a fresh model knows nothing
    last = next(line for line in reversed(lines) if "validation_loss" in line)
    assert last["validation_loss"] < 4.5
    assert last["perplexity"] == pytest.approx(math.exp(last["validation_loss"]))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(flags, tmp_path):
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        train(parse([*flags, "--steps", "6", "--seed", seed], "test").settings, tmp_path / name)
    a, b, c = (load_file(tmp_path / name / "last" / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if a[name].ndim == 2)


def test_micro_batches_change_nothing_but_rounding(flags, tmp_path):
    for name, size in (("whole", "8"), ("cut", "2")):
        train(parse([*flags, "--steps", "10", "--micro-batch-size", size], "test").settings, tmp_path / name)
    whole, cut = (
        [line["loss"] for line in metrics.read(tmp_path / name) if "loss" in line] for name in ("whole", "cut")
    )
    # Adam divides by the gradient's size, so that the rounding of tiny gradients shows after some steps
    assert cut == pytest.approx(whole, rel=1e-4)


def test_activation_checkpointing_changes_no_bit(flags, tmp_path):
    for name in ("off", "on"):
        extra = ["--activation-checkpointing"] if name == "on" else []
        train(parse([*flags, "--steps", "6", *extra], "test").settings, tmp_path / name)
    off, on = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("off", "on"))
    assert all(torch.equal(off[name], on[name]) for name in off)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(flags, tmp_path, monkeypatch):
    write = metrics.Metrics.write

    def poison(self, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == 13:
            settings_of_step.append(step)

    settings_of_step = []
    monkeypatch.setattr(metrics.Metrics, "write", poison)
    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda *args: float("nan") if settings_of_step else rate(*args))
    with pytest.raises(UserError, match=r"step 15: the loss is nan and the largest gradient nan in .*learning-rate"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text())["step"] == 10
    weights = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_slow_machine_does_fewer_steps_and_says_so(flags, tmp_path, capsys):
    train(parse([*flags, "--steps", "100000", "--max-minutes", "1e-6"], "test").settings, tmp_path / "run")
    assert "doing 80 (--max-minutes None does them all)" in capsys.readouterr().out
    lines = [line for line in metrics.read(tmp_path / "run") if "loss" in line]
    assert len(lines) == 80
    assert lines[-1]["learning_rate"] == 0  # the schedule was shortened with the run


def test_float16_skips_steps_that_overflow_and_remembers_the_scale(flags, tmp_path, monkeypatch, capsys):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: scaler(*args, init_scale=2.0**30, **kwargs))
    train(parse([*flags, "--dtype", "float16", "--steps", "20"], "test").settings, tmp_path / "run")
    assert "float16 overflow, update skipped" in capsys.readouterr().out
    state = json.loads((tmp_path / "run" / "last" / "state.json").read_text())
    assert 1 < state["scaler"]["scale"] < 2.0**30
    assert any(line.get("gradient_norm") == "inf" for line in metrics.read(tmp_path / "run"))


def test_an_evaluation_that_is_not_finite_saves_nothing(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(math.nan, 10, 10))
    with pytest.raises(UserError, match=r"step 10: the validation loss is nan; .*had not been saved yet"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert not (tmp_path / "run" / "last").exists()


def test_cosine_runs_too(flags, tmp_path):
    train(parse([*flags, "--schedule", "cosine", "--steps", "6"], "test").settings, tmp_path / "run")
    rates = [line["learning_rate"] for line in metrics.read(tmp_path / "run") if "loss" in line]
    assert rates[4] == pytest.approx(3e-3) and rates[5] == pytest.approx(0, abs=1e-12)
