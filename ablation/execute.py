"""Do the runs that a study still wants: a fresh process for each, and each device owned by one worker.

A run that raises anything, or whose process is killed, is a row with status "failed" and costs nothing else. However
this process ends, the others end with it; the same command resumes, from saves that are at most half a minute old.
"""

import dataclasses
import functools
import multiprocessing
import os
import shutil
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
from ablation.study import Study, as_table
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

    @property
    def devices(self) -> list[str]:
        """The device of each worker: GPUs of one model, so that arms of a seed share it."""
        chosen = choose_device(self.device)
        if chosen.type == "cpu":
            return ["cpu"] * (self.jobs or usable_cores())
        if chosen.type == "cuda" and self.device == "auto":
            names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
            return [f"cuda:{number}" for number, name in enumerate(names) if name == names[0]][: self.jobs]
        return [str(chosen)]

    @property
    def threads(self) -> int | None:
        """CPU threads of each run: the cores divided by the workers, since more threads than cores are slower."""
        return max(1, usable_cores() // len(self.devices)) if self.devices[0] == "cpu" else None

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

    def run_folder(self, run: Run) -> Path:
        """Where a run keeps its state while it trains."""
        return self.folder / "runs" / run.folder_name


def failure(run: Run, reason: str) -> Row:
    """The row of a run that did not end by itself."""
    key = {name.name: getattr(run, name.name) for name in dataclasses.fields(Run)}
    return Row(**key, status="failed", reason=reason)


def load_or_create(plan: Plan, folder: Path, device: str = "auto", jobs: int | None = None) -> Experiment:
    """The experiment of a folder with its finished runs; those that failed are forgotten and made again.

    Raises `UserError` where runs had other settings than the plan gives them now.
    """
    rows = [row for row in read_lines(folder / "runs.jsonl") if row["status"] != "failed"]
    experiment = Experiment(plan, folder, device, jobs, rows)
    names = [f.name for f in dataclasses.fields(Run)]
    for row in rows:
        run = Run(*(row[name] for name in names))
        if run.arm in plan.compared and settings_hash(run_settings(plan, run)) != row["settings_hash"]:
            raise UserError(f"the finished run {run.folder_name} of {folder} had other settings; give another --out.")
    return experiment


def remaining(experiment: Experiment) -> list[Run]:
    """The runs that are wanted and have not ended; none where several have failed and no other has worked."""
    hopeless = len(experiment.failed) >= ENOUGH_FAILURES and len(experiment.failed) == len(experiment.rows)
    return [] if hopeless else experiment.study.missing(experiment.study.wanted)


def without_mixed_pairs(study: Study, rows: list[dict], device: str) -> list[dict]:
    """The rows without those of unfinished seeds that come from another device: arms of a seed share theirs."""
    unfinished = {(run.phase, run.seed) for run in study.missing(study.wanted)}
    return [row for row in rows if row["device"] == device or (row["phase"], row["seed"]) not in unfinished]


def execute(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> None:
    """Do all runs that are wanted. start: begins one on a device; by default in a process of its own."""
    here = hardware(torch.device(experiment.devices[0]))
    experiment.rows = without_mixed_pairs(experiment.study, experiment.rows, here)
    experiment.update()
    begin = start or functools.partial(start_process, experiment)
    free, running = list(experiment.devices), {}
    bar = tqdm(unit="run", dynamic_ncols=True)
    try:
        while True:
            started = {run for run, _ in running.values()}
            waiting = [run for run in remaining(experiment) if run not in started]
            bar.total = len(experiment.rows) + len(running) + len(waiting)
            for run in waiting[: len(free)]:
                device = free.pop()
                running[begin(run, device)] = run, device
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, device = running.pop(future)
                free.append(device)
                experiment.add(result(future, run))
                shutil.rmtree(experiment.run_folder(run), ignore_errors=True)  # its row has all its numbers
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
        return failure(run, f"{type(error).__name__}: {error}")


def start_process(experiment: Experiment, run: Run, device: str) -> Future:
    """Begin a run in a fresh process, which inherits that Ctrl-C is ignored: this one ends the others."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    arguments = experiment.plan, run, experiment.run_folder(run), device, experiment.threads, len(experiment.devices)
    future = pool.submit(train_run, *arguments)
    signal.signal(signal.SIGINT, handler)
    pool.shutdown(wait=False)
    return future


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
        f"runs: {len(study.rows)} done, {len(remaining(experiment))} can start, {len(experiment.devices)} at once",
        f"measure: validation loss; differences within {plan.margin:g} are treated as equivalent",
        "Ctrl-C stops it, and the same command resumes it",
    ]
    if plan.name.endswith("-quick"):
        lines.append(QUICK)
    if timed:
        settings = arm_settings(plan, next(iter(plan.compared.values())))
        device = choose_device(experiment.devices[0])
        choose_kernels(settings.machine.kernels, device)
        torch.set_num_threads(experiment.threads or torch.get_num_threads())
        lines.append(f"a run: {measure_time(settings, device, choose_training_dtype(settings.machine.dtype, device))}")
    return "\n".join(lines)
