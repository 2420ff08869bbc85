"""Do the runs that a study still wants: a fresh process for each, and each device owned by one worker.

A run that raises or is killed is a row with status "failed" and costs nothing else. All processes end with this one.
"""

import dataclasses
import functools
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ablation.plan import Plan, Run, arm_settings, load_plan, replace_settings, run_settings, save_plan
from ablation.records import Row, append, append_rows, read_rows
from ablation.run import hardware, settings_hash, train_run
from ablation.study import Study, as_table
from data.tokens import end_with_parent
from errors import UserError, usable_cores
from model.device import choose_device
from training.estimate import estimate, format_time


@dataclass
class Experiment:
    """The folder of a comparison: its plan, and what has been measured so far."""

    plan: Plan
    folder: Path
    device: str = "auto"  # all GPUs, else MPS, else the CPU's cores; or a torch device
    jobs: int | None = None  # runs at once on a CPU, one for each core by default; on GPUs how many of them are used
    rows: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)  # runs that failed in this command; another one tries them again

    @property
    def study(self) -> Study:
        return Study(self.plan, as_table(self.rows))

    @functools.cached_property
    def workers(self) -> list[str]:
        """The device of each: GPUs of one model, so that arms of a seed share it."""
        if self.jobs is not None and self.jobs < 1:
            raise UserError(f"--jobs {self.jobs} must be at least 1.")
        chosen = choose_device(self.device)
        if chosen.type == "cpu":
            return ["cpu"] * (self.jobs or usable_cores())
        all_gpus = chosen.type == "cuda" and self.device == "auto"
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if all_gpus else [str(chosen)]
        return [device for device in devices if hardware(device) == hardware(devices[0])][: self.jobs]

    @functools.cached_property
    def hardware(self) -> str:
        """The model of all workers."""
        return hardware(self.workers[0])

    @property
    def threads(self) -> int | None:
        """Threads of a run: on a CPU those of this process (OMP_NUM_THREADS, or its cores) divided by the workers."""
        return max(1, torch.get_num_threads() // len(self.workers)) if self.workers[0] == "cpu" else None

    def add(self, run: Run, future: Future) -> None:
        """Append the row of a run that has ended. On another device or text than the runs before it has failed."""
        texts, reason = {row.text_hash for row in self.rows} - {""}, None
        try:
            row = future.result()
            if row.device != self.hardware:
                reason = f"it ran on {row.device}, and the others on {self.hardware}"
            elif texts and row.text_hash not in texts:
                reason = f"the text has hash {row.text_hash}, and that of the runs before is {texts.pop()}"
        except BrokenProcessPool:
            reason = "its process was killed, perhaps for lack of memory"
        except Exception as error:
            error = getattr(error, "cause", error)  # Ray's own error has the one that was raised
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            row = Row(**vars(run), status="failed", reason=reason)
            self.failed.append(row)
        self.rows.append(row)
        append_rows(self.folder, row)


def load_or_create(plan: Plan, folder: Path, device: str = "auto", jobs: int | None = None) -> Experiment:
    """The experiment of a folder with its finished runs; those that failed are forgotten and made again."""
    rows = [row for row in read_rows(folder) if row.status != "failed"]
    if rows and not {row.arm for row in rows} & {*plan.compared}:
        raise UserError(f"{folder} has the runs of another comparison; give another --out.")
    for row in rows:
        if not row.settings_hash:
            raise UserError(f"the runs of {folder} did not record their settings; give another --out to repeat them.")
        if row.arm in plan.compared and settings_hash(run_settings(plan, row)) != row.settings_hash:
            raise UserError(f"a finished run ({row}) of {folder} had other settings; give another --out.")
    return Experiment(plan, folder, device, jobs, rows)


def execute(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> None:
    """Do all runs that are wanted, each begun by `start`, and again those of unfinished seeds on other hardware."""
    unfinished, here = {(run.phase, run.seed) for run in experiment.study.remaining}, experiment.hardware
    experiment.rows = [r for r in experiment.rows if r.device == here or (r.phase, r.seed) not in unfinished]
    begin, free, running = start or functools.partial(start_process, experiment), [*experiment.workers], {}
    bar = tqdm(unit="run", initial=len(experiment.rows), dynamic_ncols=True, disable=None)
    try:
        while True:
            started = {run for run, _ in running.values()}
            waiting = [run for run in experiment.study.remaining if run not in started]
            bar.total = len(experiment.rows) + len(running) + len(waiting)
            bar.refresh()
            for run in waiting[: len(free)]:
                worker = free.pop()
                running[begin(run, worker)] = run, worker
            if not running:
                return
            for future in wait(running, timeout=5, return_when=FIRST_COMPLETED).done:  # the bar shows that time passes
                run, worker = running.pop(future)
                free.append(worker)
                experiment.add(run, future)
                bar.update()
    finally:
        bar.close()
        for process in multiprocessing.active_children():  # after Ctrl-C
            process.kill()


def write_plan(experiment: Experiment) -> None:
    """Write plan.toml; append to changes.jsonl what differs from the plan under which the finished runs were made."""
    experiment.folder.mkdir(parents=True, exist_ok=True)
    path, now, count = experiment.folder / "plan.toml", dataclasses.asdict(experiment.plan), len(experiment.rows)
    before = dataclasses.asdict(load_plan(path)) if path.is_file() else {}
    changed = [name for name in before if before[name] != now[name]]
    for name in changed if experiment.rows else ():
        change = {"field": name, "before": str(before[name]), "after": str(now[name]), "finished_runs": count}
        append(experiment.folder / "changes.jsonl", change)
    if changed or not before:  # else it keeps its comments
        save_plan(experiment.plan, path)


def start_process(experiment: Experiment, run: Run, device: str) -> Future:
    """Begin a run in a fresh process, which inherits that Ctrl-C is ignored: this one ends the others."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    future = pool.submit(train_run, experiment.plan, run, device, experiment.threads, len(experiment.workers))
    signal.signal(signal.SIGINT, handler)
    pool.shutdown(wait=False)
    return future


def estimate_run(experiment: Experiment) -> None:
    """Print what a run of the first arm needs, its time from a few steps, and that of all runs that remain."""
    settings = arm_settings(experiment.plan, next(iter(experiment.plan.compared.values())))
    torch.set_num_threads(experiment.threads or torch.get_num_threads())
    runs, workers = len(experiment.study.remaining), len(experiment.workers)
    seconds = estimate(replace_settings(settings, {"device": experiment.device})) * runs / workers
    print(f"all runs that can start: {runs}, {workers} at once, about {format_time(seconds)} of training")
