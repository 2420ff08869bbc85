"""A small comparison that is really trained, once a session, and studies of made-up rows."""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from ablation import execute
from ablation.execute import Experiment
from ablation.plan import Plan, Run
from ablation.records import Row
from ablation.run import train_run
from ablation.study import Study, as_table

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


@pytest.fixture(scope="session")
def here() -> Callable[[Experiment], Callable[[Run, str], Future]]:
    """Makes the `start` of `execute` that trains in this process, since others would import torch again."""

    def starter(experiment: Experiment) -> Callable[[Run, str], Future]:
        def start(run: Run, device: str) -> Future:
            future = Future()
            try:
                future.set_result(train_run(experiment.plan, run, device, 1, 1))
            except Exception as error:
                future.set_exception(error)
            return future

        return start

    return starter


@pytest.fixture(scope="session")
def trained(config, here, tmp_path_factory) -> Experiment:
    """Three norms: two final pairs, and reruns."""
    plan = Plan(
        config=str(config),
        arms={"layer": {"norm": "layer"}, "rms": {"norm": "rms"}, "none": {"norm": "none"}},
        seeds=2,
        rerun_seeds=1,
        learning_rates=(2e-2,),
    )
    experiment = execute.load_or_create(plan, tmp_path_factory.mktemp("comparison"), "cpu", 1)
    execute.write_plan(experiment)
    execute.execute(experiment, here(experiment))
    return experiment


def made_up(run: Run, loss: float | None, **more: object) -> Row:
    """The row of a run that ended with this loss; None: it diverged."""
    ended = {"status": "diverged"} if loss is None else {"loss": loss, "bits_per_byte": loss / 2}
    return Row(**vars(run), **{"device": "CPU", "batches_hash": f"{run.seed}", "seconds": 1.0} | ended | more)


@pytest.fixture(scope="session")
def row() -> Callable[..., Row]:
    return made_up


@pytest.fixture(scope="session")
def finish() -> Callable[..., Study]:
    """The study of a plan, or of some rows, after all runs that it wants, with losses from a function of the run."""

    def finished(plan: Plan, loss: Callable[[Run], float | None], rows: list[dict] = (), **more: object) -> Study:
        rows = list(rows)
        while missing := (study := Study(plan, as_table(rows))).missing(study.wanted):
            rows += [dataclasses.asdict(made_up(run, loss(run), **more)) for run in missing]
        return study

    return finished


@pytest.fixture
def bowl() -> Callable[[Run], float]:
    """A loss that is lowest at a learning rate of 2e-2, with an offset for each arm, and pairs that differ a little."""

    def loss(run: Run) -> float:
        offset = {"layer": 0.0, "rms": 0.001, "none": 0.5}.get(run.arm, 0.0)
        wobble = math.sin(run.seed * (1 + len(run.arm))) * 1e-4
        return 3 + math.log(run.learning_rate / 2e-2) ** 2 + offset + wobble + math.sin(run.seed) * 0.01

    return loss
