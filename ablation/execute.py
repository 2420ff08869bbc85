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
from ablation.records import Row, append, read_rows
from ablation.run import hardware, settings_hash, train_run
from ablation.study import KEY, Study, as_table
from errors import UserError, usable_cores
from model.device import choose_device, choose_kernels, choose_training_dtype
from training.estimate import measure_time

ENOUGH_FAILURES = 3


@dataclass
class Experiment:
    """The folder of a comparison: its plan, and what has been measured so far."""

    plan: Plan
    folder: Path
    device: str = "auto"  # all GPUs, else MPS, else the CPU's cores; or a torch device
    jobs: int | None = None  # runs at once on a CPU, one for each core by default; on GPUs how many of them are used
    rows: list[dict] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)  # of this command; another one tries them again

    @property
    def study(self) -> Study:
        return Study(self.plan, as_table(self.rows))

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
        """The model of all workers."""
        return hardware(self.workers[0])

    def add(self, row: Row) -> None:
        """Append the row of a run. One on another device, or on another text than the runs before, has failed."""
        texts = {before["text_hash"] for before in self.rows if before["text_hash"]} or {row.text_hash}
        if row.status != "failed" and row.device != self.hardware:
            row = failure(row, f"it ran on {row.device}, and the others on {self.hardware}")
        elif row.status != "failed" and row.text_hash not in texts:
            row = failure(row, f"the text has hash {row.text_hash}, and that of the runs before is {texts.pop()}")
        self.rows.append(dataclasses.asdict(row))
        self.failed += [row] * (row.status == "failed")
        append(self.folder / "runs.jsonl", self.rows[-1])


def failure(run: Run, reason: str) -> Row:
    return Row(*(getattr(run, name) for name in KEY), status="failed", reason=reason)


def load_or_create(plan: Plan, folder: Path, device: str = "auto", jobs: int | None = None) -> Experiment:
    """The experiment of a folder with its finished runs; those that failed are forgotten and made again."""
    rows = [row for row in read_rows(folder / "runs.jsonl") if row["status"] != "failed"]
    for row in rows:
        run = Run(*(row[name] for name in KEY))
        if run.arm in plan.compared and settings_hash(run_settings(plan, run)) != row["settings_hash"]:
            raise UserError(f"a finished run ({run}) of {folder} had other settings; give another --out.")
    return Experiment(plan, folder, device, jobs, rows)


def remaining(experiment: Experiment) -> list[Run]:
    """The runs that are wanted and have not ended; none where several have failed and no other has worked."""
    hopeless = ENOUGH_FAILURES <= len(experiment.failed) == len(experiment.rows)
    study = experiment.study
    return [] if hopeless else study.missing(study.wanted)


def execute(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> None:
    """Do all runs that are wanted, and again what unfinished seeds have from another model of hardware.

    start: begins a run on a worker; by default in a process of its own.
    """
    unfinished, here = {(run.phase, run.seed) for run in remaining(experiment)}, experiment.hardware
    rows = experiment.rows
    experiment.rows = [r for r in rows if r["device"] == here or (r["phase"], r["seed"]) not in unfinished]
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
    path, now, count = experiment.folder / "plan.toml", dataclasses.asdict(experiment.plan), len(experiment.rows)
    before = dataclasses.asdict(load_plan(str(path))) if path.is_file() and experiment.rows else now
    for name in (name for name in now if before[name] != now[name]):
        change = {"field": name, "before": str(before[name]), "after": str(now[name]), "finished_runs": count}
        append(experiment.folder / "changes.jsonl", change)
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
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    workers = len(experiment.workers)
    future = pool.submit(train_run, experiment.plan, run, device, threads_of_a_run(experiment), workers)
    signal.signal(signal.SIGINT, handler)
    pool.shutdown(wait=False)
    return future


def end_with_parent() -> None:
    """In a new process: end when the parent has died, so that no run is ever trained twice at once."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def threads_of_a_run(experiment: Experiment) -> int | None:
    """On a CPU its cores divided by the workers, since more threads than cores are slower."""
    workers = experiment.workers
    return max(1, usable_cores() // len(workers)) if workers[0] == "cpu" else None


def time_of_a_run(experiment: Experiment) -> str:
    """How long a run takes, from a few steps of the first arm."""
    settings = arm_settings(experiment.plan, next(iter(experiment.plan.compared.values())))
    device = choose_device(experiment.device)
    choose_kernels(settings.machine.kernels, device)
    torch.set_num_threads(threads_of_a_run(experiment) or torch.get_num_threads())
    return f"a run: {measure_time(settings, device, choose_training_dtype(settings.machine.dtype, device))}"
