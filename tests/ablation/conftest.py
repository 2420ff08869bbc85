"""A small comparison that is really trained, once a session, and ways to change its records."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from ablation import effects, plots, runner
from ablation.analysis import Study
from ablation.plan import Plan, Run, save_plan
from ablation.plots import Picture, Style
from ablation.results import RunResult
from ablation.runner import Experiment

CONFIG = """[model]
vocab_size = 300
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 32
[data]
data = ["{data}"]
cache = "{data}/.cache"
sequence_length = 32
batch_size = 4
[optimizer]
steps = 12
learning_rate = 5e-3
warmup_steps = 2
"""


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    """A configuration that trains in less than a second, with its text beside it."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        words = " ".join(f"word{(i * j) % 23} runs over {j}" for j in range(120))
        (folder / f"{i}.txt").write_text(words, encoding="utf-8")
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(CONFIG.format(data=folder.as_posix()), encoding="utf-8")
    return path


def in_this_process(devices: list[str], tasks: list[Callable], on_result: Callable[[RunResult], object]) -> bool:
    """Instead of `run_in_processes`, whose processes would import torch again."""
    for task in tasks:
        result = task(devices[0])
        if result is None:
            return False
        on_result(result)
    return True


def fields_of(loss: float | None) -> dict:
    """What a record says about this loss; None: diverged."""
    if loss is not None:
        return {"status": "completed", "validation_loss": loss, "bits_per_byte": loss / 2.2}
    return {"status": "diverged", "validation_loss": None, "bits_per_byte": None, "probes": None, "reason": "it is nan"}


def with_known_loss(train_run: Callable) -> Callable:
    """`train_run` with a loss that does not depend on the processor: lowest at 2e-2, and `center` diverges at 0.5."""

    def train(run: Run, *arguments, **options) -> RunResult | None:
        result = train_run(run, *arguments, **options)
        if result is None or result.status == "diverged":
            return result
        loss = 3 + 2 * math.log(run.learning_rate / 2e-2) ** 2 + random.Random(str(run)).uniform(0, 0.005)
        diverges = (run.arm.norm, run.learning_rate) == ("center", 0.5)
        return dataclasses.replace(result, **fields_of(None if diverges else loss))

    return train


@pytest.fixture
def one_process(monkeypatch) -> None:
    """Let the runner train in this process, with known losses."""
    monkeypatch.setattr(runner, "run_in_processes", in_this_process)
    monkeypatch.setattr(runner, "train_run", with_known_loss(runner.train_run))


@pytest.fixture(scope="session")
def train_plan(tmp_path_factory) -> Callable[[Plan], Experiment]:
    """Train all runs of a plan into a new folder, one thread each, without a report."""

    def train(plan: Plan, known_losses: bool = True) -> Experiment:
        experiment = runner.load_or_create(plan, tmp_path_factory.mktemp("comparison"), "cpu", None)
        save_plan(plan, experiment.folder / "plan.toml")
        with pytest.MonkeyPatch.context() as patch, tqdm(disable=True) as bar:
            patch.setattr(runner, "run_in_processes", in_this_process)
            if known_losses:
                patch.setattr(runner, "train_run", with_known_loss(runner.train_run))
            runner.train_stages(experiment, bar)
            if plan.convert:
                runner.convert_all(experiment)
        return experiment

    return train


@pytest.fixture(scope="session")
def experiment(train_plan, config) -> Experiment:
    """Three norms at three learning rates, of which the middle one is the best of each arm."""
    rates = (5e-3, 2e-2, 0.5)
    plan = Plan(
        norms=("rms", "layer", "center"),
        seeds=3,
        noise_seeds=2,
        sweep_seeds=2,
        learning_rates=rates,
        config=str(config),
        timing=False,
    )
    return train_plan(plan)


@pytest.fixture
def study(experiment) -> Study:
    return experiment.study


@pytest.fixture
def few_pairs_suffice(monkeypatch) -> None:
    """Let the three seeds of the comparisons here be enough for equivalence."""
    monkeypatch.setattr(effects, "MIN_PAIRS_FOR_EQUIVALENCE", 2)


@pytest.fixture(scope="session")
def change() -> Callable[..., Study]:
    """A copy of a study: `fields` gives the fields of each record that differ."""

    def changed(study: Study, fields: Callable[[RunResult], dict]) -> Study:
        return dataclasses.replace(study, results=[dataclasses.replace(r, **fields(r)) for r in study.results])

    return changed


@pytest.fixture(scope="session")
def with_losses(change) -> Callable[..., Study]:
    """A study whose final runs have the given losses, a list of seeds for each norm; None: diverged."""

    def changed(study: Study, losses: dict[str, Sequence[float | None]]) -> Study:
        def fields(result: RunResult) -> dict:
            used = result.phase == "final" and result.arm.norm in losses
            return fields_of(losses[result.arm.norm][result.seed - 1]) if used else {}

        return change(study, fields)

    return changed


@pytest.fixture(scope="session")
def with_sweep(change) -> Callable[..., Study]:
    """A study whose arms have these losses at the learning rates of the sweep, in their order; None: diverged.

    Their final runs are at the learning rate that is then the best.
    """

    def changed(study: Study, losses: dict[str, Sequence[float | None]]) -> Study:
        rates = sorted(study.plan.learning_rates)

        def fields(result: RunResult) -> dict:
            if result.arm.norm not in losses:
                return {}
            of_arm = losses[result.arm.norm]
            if result.phase == "final":
                best = min((loss, rate) for loss, rate in zip(of_arm, rates, strict=True) if loss is not None)
                return {"learning_rate": best[1]}
            return fields_of(of_arm[rates.index(result.learning_rate)])

        return change(study, fields)

    return changed


@pytest.fixture
def panels(monkeypatch) -> dict[str, Axes]:
    """Replace SVG by the axes themselves, which are quick to draw: the axes of every picture by its caption."""
    drawn = {}

    def render(draw, caption: str, alt: str, width: float = 4.8, height: float = 3.2) -> Picture:
        axes = Figure(figsize=(width, height)).add_subplot()
        draw(axes, Style("light"))
        drawn[caption] = axes
        return Picture(caption, alt, f"<svg><!-- {points(axes)} --></svg>", "<svg></svg>")

    monkeypatch.setattr(plots, "render", render)
    return drawn


def points(axes: Axes) -> list[list[list[float]]]:
    """All that is plotted as lines or markers, to two decimals."""
    return [np.round(line.get_xydata().astype(float), 2).tolist() for line in axes.lines]
