"""The files that a run leaves, the steps it takes, and the errors that end it."""

import dataclasses
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoints import pretrained
from data.tokenizer import Tokenizer
from errors import UserError
from training import commands, loop, metrics
from training.evaluate import Evaluation
from training.loop import train, train_steps
from training.session import set_up
from training.settings import load_settings, parse


def test_a_run_leaves_settings_metrics_a_plot_and_two_checkpoints(run, settings):
    assert {path.name for path in run.iterdir()} == {"settings.toml", "metrics.jsonl", "loss.png", "last", "best"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = load_settings(run / "settings.toml")
    assert dataclasses.replace(saved, run=settings.run) == settings
    lines = metrics.read(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert [line["step"] for line in lines if "validation_loss" in line] == [10, 20, 30, 40]
    state = json.loads((run / "last" / "state.json").read_text())
    assert state["step"] == 40 and state["tokens"] == 40 * 8 * 32
    assert state["best_validation_loss"] == min(line.get("validation_loss", 9e9) for line in lines)
    assert state["text_hash"]


def test_the_model_learns(run):
    lines = metrics.read(run)
    assert lines[0]["loss"] == pytest.approx(math.log(400), rel=0.02)  # an untrained model predicts every token alike
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
    for name, size in (("one", "8"), ("four", "2")):
        train(parse([*flags, "--steps", "10", "--micro-batch-size", size], "test").settings, tmp_path / name)
    one, four = ([line["loss"] for line in metrics.read(tmp_path / name) if "loss" in line] for name in ("one", "four"))
    # Adam divides by the size of the gradient, so the rounding of tiny gradients shows after some steps
    assert four == pytest.approx(one, rel=1e-4)


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
            poisoned.append(step)

    poisoned = []
    monkeypatch.setattr(metrics.Metrics, "write", poison)
    learning_rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda *args: float("nan") if poisoned else learning_rate(*args))
    with pytest.raises(UserError, match=r"step 15: the loss is nan .*; the last save is kept: .*learning-rate"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text())["step"] == 10
    weights = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_float16_skips_updates_that_overflow_and_saves_the_loss_scale(flags, tmp_path, monkeypatch, capsys):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: scaler(*args, init_scale=2.0**30, **kwargs))
    train(parse([*flags, "--dtype", "float16", "--steps", "20"], "test").settings, tmp_path / "run")
    assert "float16 overflow, update skipped" in capsys.readouterr().out
    state = json.loads((tmp_path / "run" / "last" / "state.json").read_text())
    assert 1 < state["scaler"]["scale"] < 2.0**30
    assert any(line.get("gradient_norm") == "inf" for line in metrics.read(tmp_path / "run"))


def test_the_steps_report_what_the_run_logs_and_neither_print_nor_write(flags, tmp_path, capfd):
    extended = [*flags, "--steps", "6", *"--embedding-lr-multiplier 5 --norm-lr-multiplier 3".split()]
    settings = parse(extended, "test").settings
    train(settings, tmp_path / "run")
    capfd.readouterr()
    lines, seconds = [], 0.0
    session = set_up(settings, tmp_path / "steps", resume=False, log=lines.append)
    for result, logged in zip(train_steps(session), metrics.read(tmp_path / "run")[:6], strict=True):
        assert result.step == session.state.step == logged["step"]
        seconds += result.seconds
        assert session.state.tokens == logged["tokens"] and session.state.seconds == seconds >= result.seconds > 0
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert getattr(result, name) == logged[name]
        rates = {group["lr"] for group in session.optimizer.param_groups}
        assert rates == {multiplier * result.learning_rate for multiplier in (1, 3, 5)}
    assert session.state.step == 6
    assert [line.split(":")[0] for line in lines] == ["text", "model"]
    assert capfd.readouterr() == ("", "") and not (tmp_path / "steps").exists()


def test_training_draws_nothing_from_the_global_random_generators(flags, tmp_path):
    settings = parse([*flags, "--steps", "12"], "test").settings
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    train(settings, tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.array_equal(np.random.get_state()[1], before[2])


def test_an_evaluation_that_is_not_finite_saves_nothing(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(math.nan, 10, 10))
    with pytest.raises(UserError, match=r"step 10: the validation loss is nan; nothing was saved yet"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert not (tmp_path / "run" / "last").exists()


def test_a_model_whose_save_failed_is_not_the_best(flags, tmp_path, monkeypatch, capsys):
    found, writes = iter([20.0, 10.0, 15.0]), iter([None, OSError(28, "No space left on device")])
    write = pretrained.save_pretrained

    def save_pretrained(*arguments, **options) -> None:
        write(*arguments, **options)
        if arguments[1].name == "best.new" and (error := next(writes, None)):
            raise error

    monkeypatch.setattr(pretrained, "save_pretrained", save_pretrained)
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(next(found), 10, 10))
    train(parse([*flags, "--steps", "12", "--evaluate-every", "4"], "test").settings, tmp_path / "run")
    out = capsys.readouterr().out
    assert out.count("note: step 8 is not saved ([Errno 28] No space left on device") == 1
    assert "best/ has the weights with the lowest validation loss, 1.5000" in out
    states = [json.loads((tmp_path / "run" / name / "state.json").read_text()) for name in ("best", "last")]
    assert [(state["step"], state["best_validation_loss"]) for state in states] == [(12, 1.5)] * 2
    assert not [*(tmp_path / "run").glob("*.new")]


def test_a_sample_cannot_send_commands_to_the_terminal(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: "\x1b]0;title\x07\nnext")
    train(parse([*flags, "--steps", "2"], "test").settings, tmp_path / "run")
    out = capsys.readouterr().out
    assert "  | \u241b]0;title\u2407\n  | next" in out and "\x1b" not in out


def test_a_prompt_of_a_sample_that_is_longer_than_the_context_is_cut(flags, tmp_path, capsys):
    long = " ".join(map(str, range(200)))
    train(parse([*flags, "--steps", "2", "--sample-prompts", long, "one"], "test").settings, tmp_path / "run")
    out = capsys.readouterr().out
    assert "198 199" in out and " 150 " not in out and "\n  | one" in out and "next: " in out


def test_a_run_whose_folder_is_deleted_ends_and_does_not_make_it_again(flags, tmp_path, monkeypatch):
    write = metrics.Metrics.write

    def delete(self, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == 13:
            shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(metrics.Metrics, "write", delete)
    with pytest.raises(UserError, match=r"run was deleted or moved, so the run ends at step 14"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_file_gets_plain_lines(settings, tmp_path, capsys):
    train(settings, tmp_path / "run")
    out, err = capsys.readouterr()
    steps = [line.split(":")[0] for line in out.splitlines() if "tok/s" in line]
    assert steps == [f"step {step} of 40" for step in range(1, 41)]
    assert "\r" not in out + err


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize(("error", "where"), [*zip(OUT_OF_MEMORY, ("set_up", "train_step", "train_step"), strict=True)])
def test_too_little_memory_is_one_line(flags, tmp_path, monkeypatch, error, where):
    def fail(*_, **__) -> None:
        raise error

    monkeypatch.setattr(loop, where, fail)
    with pytest.raises(UserError, match="too little memory; use a smaller --micro-batch-size"):
        commands.run(parse([*flags, "--out", str(tmp_path / "run")], "test"))
