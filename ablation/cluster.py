"""The runs of a comparison on a Ray cluster: `python ablate.py --ray auto`, or with the address of its head.

A task is one seed's arms in turn, so that pairs share a machine. Each row is sent as soon as its run is done, and only
this process writes. Ray would repeat all of a task whose worker was killed; here the driver starts a task again with
the runs that are left, so that it costs only the run that it was at.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ray
import torch

from ablation.execute import Experiment, failure, remaining
from ablation.plan import Plan, Run
from ablation.records import Row
from ablation.run import hardware, train_run

ROOT = Path(__file__).parent.parent
EXCLUDED = [".git", ".cache", "runs", "tests", "docs", "benchmarks/results"]  # of the code that workers get
MAX_RETRIES = 3  # of a task whose worker was killed


def connect(address: str) -> None:
    """Join the cluster; its workers get this code."""
    ray.init(address, runtime_env={"working_dir": str(ROOT), "excludes": EXCLUDED}, log_to_driver=False)


@ray.remote(max_retries=0)
def train_seed(plan: Plan, runs: list[Run], left: list[Run], made_on: str | None, workers: int) -> Iterator[Row]:
    """The rows of the runs that are `left` of a seed; of all its `runs`, where the others were made on other hardware.

    made_on: what that was; None if there are none.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for run in left if made_on in (None, hardware(torch.device(device))) else runs:
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield train_run(plan, run, Path(folder), device, 1 if device == "cpu" else None, workers)
            except Exception as error:
                yield failure(run, f"{type(error).__name__}: {error}")


def execute_on_cluster(experiment: Experiment) -> None:
    """Do all runs that are wanted, a task for each GPU of the cluster, or for each CPU if it has none."""
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU") else "CPU"
    workers = int(resources[kind])
    options = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1}
    start, tasks, retries = train_seed.options(num_returns="streaming", **options), {}, Counter()
    while True:
        left = by_seed(remaining(experiment))
        for key in [key for key in left if key not in tasks.values()][: workers - len(tasks)]:
            runs = by_seed(experiment.study.wanted)[key]
            before = [row["device"] for row in experiment.rows if (row["phase"], row["seed"]) == key and row["device"]]
            made_on = before[0] if before else None
            tasks[start.remote(experiment.plan, runs, left[key], made_on, workers)] = key
        if not tasks:
            return
        for task in ray.wait([*tasks])[0]:
            try:
                experiment.add(ray.get(next(task)))
            except StopIteration:
                del tasks[task]
            except ray.exceptions.RayError as error:
                key = tasks.pop(task)
                retries[key] += 1
                for run in left.get(key, []) if retries[key] > MAX_RETRIES else []:
                    experiment.add(failure(run, f"its worker was lost: {type(error).__name__}"))


def by_seed(runs: list[Run]) -> dict[tuple[str, int], list[Run]]:
    """The runs by phase and seed."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        found.setdefault((run.phase, run.seed), []).append(run)
    return found
