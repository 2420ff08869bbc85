"""A small comparison that is really trained, once a session, and studies of made-up rows."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from ablation import execute
from ablation.execute import Experiment, open_experiment
from ablation.plan import Plan, Run
from ablation.records import Row, as_table
from ablation.run import train_run
from ablation.study import Study

CONFIG = """optimizer = {{ steps = 12, learning_rate = 5e-3, warmup_steps = 2 }}
[model]
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
"""


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    """A configuration that trains in less than a second, with its text beside it."""
    folder = tmp_path_factory.mktemp("words")
    for i in range(40):
        words = " ".join(f"word{(i * j) % 23} runs over {j}" for j in range(120))
        (folder / f"{i}.txt").write_text(words, encoding="utf-8")
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(CONFIG.format(data=folder.as_posix()), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def start_of() -> Iterator[Callable[[Callable[[Run, str], Row]], Callable[[Experiment, Run, str], Future]]]:
    """Makes the `start` of workers from the function of run and device that makes a row, one run after another."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda make: lambda experiment, run, device: pool.submit(make, run, device)


def carry_out(experiment: Experiment, start: Callable[[Experiment, Run, str], Future]) -> None:
    experiment.workers.start = start
    execute.execute(experiment)


@pytest.fixture(scope="session")
def here() -> Iterator[Callable[[Experiment, Run, str], Future]]:
    """The `start` of workers that trains in this process, since others would import torch again."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda experiment, *of_run: pool.submit(train_run, experiment.plan, *of_run, 1, 1)


@pytest.fixture(scope="session")
def trained(config, here, tmp_path_factory) -> Experiment:
    """Three norms: two final pairs, and reruns."""
    norms = {"norm": ["layer", "rms", "none"]}
    plan = Plan(config=str(config), vary=norms, seeds=2, rerun_seeds=1, learning_rates=(2e-2,))
    experiment = open_experiment(plan, tmp_path_factory.mktemp("comparison"), "cpu", 1)
    execute.write_plan(experiment)
    carry_out(experiment, here)
    return experiment


@pytest.fixture(scope="session")
def row() -> Callable[..., Row]:
    """The row of a run that ended with this loss; None: it diverged."""

    def made_up(run: Run, loss: float | None, **more: object) -> Row:
        ended = {"status": "diverged"} if loss is None else {"loss": loss, "bits_per_byte": loss / 2}
        return Row(**vars(run), **{"device": "CPU", "batches_hash": f"{run.seed}", "seconds": 1.0} | ended | more)

    return made_up


@pytest.fixture(scope="session")
def finish(row) -> Callable[..., Study]:
    """The study of a plan after all runs that it wants, with losses from a function of the run."""

    def finished(plan: Plan, loss: Callable[[Run], float | None], **more: object) -> Study:
        rows = []
        while remaining := (study := Study(plan, as_table(rows))).remaining:
            rows += [row(run, loss(run), **more) for run in remaining]
        return study

    return finished
