"""What tests do with runs: start them from flags, stop and resume them, and compare what they leave."""

import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from training import checkpoint, metrics
from training.loop import save, train, train_steps
from training.session import Session, set_up
from training.settings import Settings, parse, save_settings


def settings_of(*flags: str) -> Settings:
    return parse(list(flags), "test").settings


def train_run(folder: Path, *flags: str) -> Path:
    """Train in the folder, which is returned."""
    train(settings_of(*flags), folder)
    return folder


def resume(folder: Path, *flags: str) -> int:
    return train(settings_of("--resume", str(folder), *flags), folder, resume=True)


def open_session(folder: Path, *flags: str, resume: bool = False) -> Session:
    with contextlib.redirect_stdout(None):
        return set_up(settings_of(*flags), folder, resume=resume)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics.read(run) if "loss" in line]


def evaluations(run: Path) -> list[dict]:
    return [line for line in metrics.read(run) if "validation_loss" in line]


def assert_equal_tensors(actual: Path, expected: Path) -> None:
    """The tensors of two files are equal bit for bit."""
    left, right = load_file(actual), load_file(expected)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_equal_runs(actual: Path, expected: Path) -> None:
    """Weights, moments, tokenizers, progress and every logged number are equal bit for bit; times are not."""
    last = [checkpoint.find_last(run) for run in (actual, expected)]  # a kill may have left it as last.new
    for file in ("model.safetensors", "training_state.safetensors"):
        assert_equal_tensors(*(directory / file for directory in last))
    left, right = ({p.name: p.read_bytes() for p in directory.glob("*token*")} for directory in last)
    assert left == right and len(left) >= 3
    states = [json.loads((directory / "state.json").read_text()) for directory in last]
    lines = [metrics.read(run) for run in (actual, expected)]
    for values in (*states, *lines[0], *lines[1]):
        values.pop("seconds", None)
        values.pop("step_seconds", None)
    assert lines[0] == lines[1] and states[0] == states[1]


def after_step(monkeypatch, number: int, action: Callable[[], object]) -> None:
    """Let something happen when a step has been logged."""
    write = metrics.write

    def write_and_act(run_dir: Path, step: int, **values: float) -> None:
        write(run_dir, step, **values)
        if step == number and "loss" in values:
            action()

    monkeypatch.setattr(metrics, "write", write_and_act)


def assert_parts_equal_a_run(folder: Path, stops: Sequence[int], *flags: str) -> None:
    """A run that is saved at each of the steps and resumed from there equals, bit for bit, one that is not."""
    straight, run, seen_losses = train_run(folder / "straight", *flags), folder / "run", []
    for number, stop in enumerate(stops):
        session = open_session(run, *flags, resume=number > 0)
        seen_losses += [result.loss for result in itertools.islice(train_steps(session), stop - session.state.step)]
        save(session)
        save_settings(session.settings, run / "settings.toml")
    assert seen_losses == losses(straight)
    for path in (straight / "last").glob("*.safetensors"):
        assert_equal_tensors(run / "last" / path.name, path)
