"""Do the runs that a study still wants: a fresh process for each, and each device owned by one worker.

A run that raises anything, or whose process is killed, is a row with status "failed" and costs nothing else. However
this process ends, the others end with it; the same command repeats the runs that had not finished, and no other. On a
Ray cluster (`cluster`) only the workers and what starts a run differ.
"""

import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ablation.plan import Plan, Run, arm_settings, load_plan, run_settings, save_plan
from ablation.records import Change, Row, append, read_lines
from ablation.run import hardware, settings_hash, train_run
from ablation.study import KEY, Study, as_table
from errors import UserError, usable_cores
from model.device import choose_device, choose_kernels, choose_training_dtype
from training.estimate import measure_time

ENOUGH_FAILURES = 3
QUICK = (
    "quick: three pairs show only large differences, and never equivalence; 300 steps are the start of a run; all arms "
    "share a learning rate, which may suit one of them better"
)


@dataclass
class Experiment:
    """The folder of a comparison: its plan, and what has been measured so far."""

    plan: Plan
    folder: Path
    device: str = "auto"
    """auto (all GPUs, else MPS, else the CPU's cores), or a torch device."""
    jobs: int | None = None
    """Runs at once on a CPU, one for each core by default; on GPUs how many of them are used."""
    rows: list[dict] = field(default_factory=list)
    study: Study = field(init=False)
    failed: list[Row] = field(default_factory=list)
    """Of this command; another one tries them again."""

    def __post_init__(self) -> None:
        self.update()

    def update(self) -> None:
        self.study = Study(self.plan, as_table(self.rows))

    @functools.cached_property
    def workers(self) -> list[str]:
        """The device of each: GPUs of one model, so that arms of a seed share it."""
        chosen = choose_device(self.device)
        if chosen.type == "cpu":
            return ["cpu"] * (self.jobs or usable_cores())
        if chosen.type == "cuda" and self.device == "auto":
            every = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
            return [device for device in every if hardware(device) == hardware(every[0])][: self.jobs]
        return [str(chosen)]

    @functools.cached_property
    def hardware(self) -> str:
        """The model of all workers' GPUs or CPUs."""
        return hardware(self.workers[0])

    def add(self, row: Row) -> None:
        """Append the row of a run; one on another text than those before it has failed."""
        texts = {before["text_hash"] for before in self.rows if before["text_hash"]}
        if row.status != "failed" and not texts <= {row.text_hash}:
            row = failure(row, f"the text has hash {row.text_hash}, and that of the runs before is {texts.pop()}")
        append(self.folder / "runs.jsonl", row)
        if row.status == "failed":
            self.failed.append(row)
        self.rows.append(dataclasses.asdict(row))
        self.update()


def failure(run: Run, reason: str) -> Row:
    """The row of a run that did not end by itself."""
    return Row(*(getattr(run, name) for name in KEY), status="failed", reason=reason)


def load_or_create(plan: Plan, folder: Path, device: str = "auto", jobs: int | None = None) -> Experiment:
    """The experiment of a folder with its finished runs; those that failed are forgotten and made again.

    Raises `UserError` where runs had other settings than the plan gives them now.
    """
    rows = [row for row in read_lines(folder / "runs.jsonl") if row["status"] != "failed"]
    experiment = Experiment(plan, folder, device, jobs, rows)
    for row in rows:
        run = Run(*(row[name] for name in KEY))
        if run.arm in plan.compared and settings_hash(run_settings(plan, run)) != row["settings_hash"]:
            raise UserError(f"a finished run ({run}) of {folder} had other settings; give another --out.")
    return experiment


def remaining(experiment: Experiment) -> list[Run]:
    """The runs that are wanted and have not ended; none where several have failed and no other has worked."""
    hopeless = len(experiment.failed) >= ENOUGH_FAILURES and len(experiment.failed) == len(experiment.rows)
    return [] if hopeless else experiment.study.missing(experiment.study.wanted)


def execute(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> None:
    """Do all runs that are wanted. start: begins one on a worker; by default in a process of its own.

    Arms of a seed share a model of hardware: what unfinished seeds have from another one is trained again.
    """
    unfinished = {(run.phase, run.seed) for run in remaining(experiment)}
    experiment.rows = [
        row
        for row in experiment.rows
        if row["device"] == experiment.hardware or (row["phase"], row["seed"]) not in unfinished
    ]
    experiment.update()
    begin, free, running = start or functools.partial(start_process, experiment), [*experiment.workers], {}
    bar = tqdm(unit="run", dynamic_ncols=True)
    try:
        while True:
            started = {run for run, _ in running.values()}
            waiting = [run for run in remaining(experiment) if run not in started]
            bar.total = len(experiment.rows) + len(running) + len(waiting)
            for run in waiting[: len(free)]:
                worker = free.pop()
                running[begin(run, worker)] = run, worker
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, worker = running.pop(future)
                free.append(worker)
                experiment.add(result(future, run))
                bar.update()
    finally:
        bar.close()
        for process in multiprocessing.active_children():  # after Ctrl-C
            process.kill()


def write_plan(experiment: Experiment) -> None:
    """Write plan.toml; append to changes.jsonl what differs from the plan under which the finished runs were made."""
    experiment.folder.mkdir(parents=True, exist_ok=True)
    path, now = experiment.folder / "plan.toml", dataclasses.asdict(experiment.plan)
    before = dataclasses.asdict(load_plan(str(path))) if path.is_file() and experiment.rows else now
    changed = [name for name in now if before[name] != now[name]]
    changes = [Change(name, str(before[name]), str(now[name]), len(experiment.rows)) for name in changed]
    append(experiment.folder / "changes.jsonl", *changes)
    save_plan(experiment.plan, path)


def result(future: Future, run: Run) -> Row:
    """The row of a run that has ended."""
    try:
        return future.result()
    except BrokenProcessPool:
        return failure(run, "its process was killed, perhaps for lack of memory")
    except Exception as error:
        error = getattr(error, "cause", error)  # Ray's own error has the one that was raised
        return failure(run, f"{type(error).__name__}: {error}")


def start_process(experiment: Experiment, run: Run, device: str) -> Future:
    """Begin a run in a fresh process, which inherits that Ctrl-C is ignored: this one ends the others."""
    workers = len(experiment.workers)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    future = pool.submit(train_run, experiment.plan, run, device, threads(device, workers), workers)
    signal.signal(signal.SIGINT, handler)
    pool.shutdown(wait=False)
    return future


def threads(device: str, workers: int) -> int | None:
    """CPU threads of each run: the cores divided by the workers, since more threads than cores are slower."""
    return max(1, usable_cores() // workers) if device == "cpu" else None


def end_with_parent() -> None:
    """In a new process: end when the parent has died, so that no run is ever trained twice at once."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def describe(experiment: Experiment, timed: bool = False) -> str:
    """The plan in words before it runs; `timed`: also the time of a run, from a few steps."""
    plan, study = experiment.plan, experiment.study
    rates = study.rates or sorted({*study.learning_rates.values()})
    lines = [
        f"arms: {'; '.join(plan.compared)}",
        f"learning rates: {', '.join(f'{rate:g}' for rate in rates)}" + (" (a sweep)" if study.rates else ""),
        f"final pairs: {study.pairs or 'as many as the pilot asks for'}; at most {plan.hours:g} hours in all",
        f"runs: {len(study.rows)} done, {len(remaining(experiment))} can start, {len(experiment.workers)} at once",
        f"measure: validation loss; differences within {plan.margin:g} are treated as equivalent",
        "Ctrl-C stops it, and the same command resumes it",
    ]
    if plan.name.endswith("-quick"):
        lines.append(QUICK)
    if timed:
        settings = arm_settings(plan, next(iter(plan.compared.values())))
        device = choose_device(experiment.device)
        choose_kernels(settings.machine.kernels, device)
        torch.set_num_threads(threads(device.type, len(experiment.workers)) or torch.get_num_threads())
        lines.append(f"a run: {measure_time(settings, device, choose_training_dtype(settings.machine.dtype, device))}")
    return "\n".join(lines)
