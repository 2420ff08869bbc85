"""Carry out a comparison: do the runs that its schedule wants, and report. Each run has a process of its own, and each
device one run at a time. A run that raises or is killed is a row with status "failed" and costs nothing else.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ablation import report
from ablation.judge import LOOKS, pairs_of_looks, summary
from ablation.plan import Plan, Run, arm_settings, load_plan, run_settings, save_plan
from ablation.records import Row, append, append_rows, as_table, read_rows
from ablation.run import commit, device_model, settings_hash, train_run
from ablation.settings import replace_settings
from ablation.study import Study
from errors import UserError, printable, usable_cores
from files import locked, replace_text
from model.decoder import Decoder
from model.device import choose_device
from training.estimate import estimate, format_time
from training.optimizer import freeze_parameters


@dataclass
class Experiment:
    """A comparison: its plan, what has been measured so far, and what its runs are made on."""

    plan: Plan
    folder: Path
    workers: list[str]  # a torch device each, or a node of a cluster
    device: str  # the model of all workers, as in `Row`
    threads: int | None  # of a run on a CPU: those of this process divided by the workers
    rows: list[Row]  # failed ones only of this command: the next command repeats them

    @property
    def study(self) -> Study:
        return Study(self.plan, as_table(self.rows))

    def add(self, run: Run, future: Future) -> None:
        """Append the row of a run that has ended. One on another device or text than earlier runs has failed."""
        texts, reason = {row.text_hash for row in self.rows} - {""}, None
        try:
            row = future.result()
            row = dataclasses.replace(row, commit=row.commit or commit())  # a cluster gets the code without git
            if row.device != self.device:
                reason = f"it ran on {row.device}, and the others on {self.device}"
            elif texts and row.text_hash not in texts:
                reason = f"the text has hash {row.text_hash}, and that of the runs before is {texts.pop()}"
        except BrokenProcessPool:
            reason = "its process was killed, perhaps for lack of memory"
        except Exception as error:
            error = getattr(error, "cause", error)  # Ray's own error has the one that was raised
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            row = Row(**vars(run), status="failed", reason=reason)
        self.rows.append(row)
        append_rows(self.folder, row)


def local_workers(torch_device: str, jobs: int | None) -> list[str]:
    """The torch device of each. For auto: GPUs of one model, as arms of a seed share it, else MPS, else the cores. With
    more jobs than GPUs, several share one: a small model leaves it mostly idle.
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs} must be at least 1.")
    chosen = choose_device(torch_device)
    if chosen.type == "cpu":
        return ["cpu"] * (jobs or usable_cores())
    devices = [str(chosen)]
    if chosen.type == "cuda" and torch_device == "auto":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = [gpu for gpu in gpus if device_model(gpu) == device_model(gpus[0])]
    return [devices[index % len(devices)] for index in range(jobs or len(devices))]


def load_experiment(plan: Plan, folder: Path, torch_device: str = "auto", jobs: int | None = None) -> Experiment:
    """The experiment of a folder with its finished runs; those that failed are forgotten and made again."""
    rows = [row for row in read_rows(folder) if row.status != "failed"]
    if rows and not {row.arm for row in rows} & {*plan.all_arms}:
        raise UserError(f"{folder} has the runs of another comparison; give another --out.")
    for row in rows:
        if row.arm in plan.all_arms and settings_hash(run_settings(plan, row)) != row.settings_hash:
            raise UserError(f"a finished run ({row}) of {folder} had other settings; give another --out.")
    workers = local_workers(torch_device, jobs)
    threads = max(1, torch.get_num_threads() // len(workers)) if workers[0] == "cpu" else None
    return Experiment(plan, folder, workers, device_model(workers[0]), threads, rows)


def execute(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> None:
    """Do all runs that are wanted, each begun by `start`, and again those of unfinished seeds on other hardware."""
    start, here = start or functools.partial(start_process, experiment), experiment.device
    unfinished = {(run.phase, run.seed) for run in experiment.study.schedule.remaining}
    experiment.rows = [r for r in experiment.rows if r.device == here or (r.phase, r.seed) not in unfinished]
    free, running = [*experiment.workers], {}
    bar = tqdm(unit="run", initial=len(experiment.rows), dynamic_ncols=True, disable=None)
    try:
        while True:
            started = {run for run, _ in running.values()}
            waiting = [run for run in experiment.study.schedule.remaining if run not in started]
            bar.total = len(experiment.rows) + len(running) + len(waiting)
            bar.refresh()
            for run in waiting[: len(free)]:
                worker = free.pop()
                running[start(run, worker)] = run, worker
            if not running:
                return
            for future in wait(running, timeout=5, return_when=FIRST_COMPLETED).done:  # the bar shows that time passes
                run, worker = running.pop(future)
                free.append(worker)
                experiment.add(run, future)
                bar.update()
                if bar.disable:
                    print(f"{len(experiment.rows)} of {bar.total} runs ended: {run}", file=sys.stderr)
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


def prepare_process() -> None:
    """Let this process be killed, and end it, in whatever it is doing, when the one that started it has died."""
    tqdm.set_lock(threading.RLock())  # instead of a semaphore of the system, which would outlive it with a warning

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_process(experiment: Experiment, run: Run, torch_device: str) -> Future:
    """Begin a run in a fresh process, to which no Ctrl-C comes, as this one ends it; one that comes meanwhile waits."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=prepare_process)
    with interrupts_blocked():  # the process inherits that
        future = pool.submit(train_run, experiment.plan, run, torch_device, experiment.threads, len(experiment.workers))
    pool.shutdown(wait=False)
    return future


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Let a Ctrl-C wait until this block has ended. On Windows, which cannot, it does not wait."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    multiprocessing.resource_tracker.ensure_running()  # before, as its start lets Ctrl-C through again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def judge(experiment: Experiment, level: float, start: Callable[[Run, str], Future] | None = None) -> dict:
    """Train pairs, as `execute` does, until the verdict at a two-sided level; looks before it are printed as JSON."""
    plan, looks = experiment.plan, pairs_of_looks(experiment.plan.seeds)
    for look, pairs in enumerate(looks, 1):
        experiment.plan = dataclasses.replace(plan, seeds=pairs)
        execute(experiment, start)
        result = summary(experiment.study, look, looks, level)
        if result["verdict"] != "inconclusive" or result["pairs"] < pairs or look == len(looks):
            break
        print(json.dumps(result), flush=True)
    write_plan(experiment)  # with the pairs that there are
    return result


def estimate_run(experiment: Experiment, torch_device: str) -> None:
    """Print what a run of the first arm needs, its time from a few steps, and that of all runs that remain."""
    settings = arm_settings(experiment.plan, next(iter(experiment.plan.all_arms.values())))
    torch.set_num_threads(experiment.threads or torch.get_num_threads())
    runs, workers = len(experiment.study.schedule.remaining), len(experiment.workers)
    print("one run:", flush=True)
    seconds = estimate(replace_settings(settings, {"device": torch_device})) * runs / workers
    print(f"all runs that can start: {runs}, {workers} at once, about {format_time(seconds)} of training")


def compare(
    plan: Plan, folder: Path, device: str, jobs: int | None, ray: str | None, level: float | None, dry_run: bool
) -> int:
    """Train the runs that are missing, and report, or judge at a level; returns the exit status. ray: an address."""
    if level is not None:
        arms, pairs = len(plan.all_arms), 2 * LOOKS
        if arms != 2 or plan.seeds < pairs:
            raise UserError(f"judge needs 2 arms and --seeds {pairs} or more; here are {arms}, --seeds {plan.seeds}.")
    for settings in (arm_settings(plan, arm) for arm in plan.all_arms.values()):
        with torch.device("meta"):  # no memory
            freeze_parameters(Decoder(settings.model), settings.run.freeze)
    with contextlib.nullcontext() if dry_run else locked(folder):
        experiment, start = load_experiment(plan, folder, device, jobs), None
        if ray is not None:
            from ablation import cluster

            start = cluster.join(experiment, ray)
        print(report.describe(experiment.study, len(experiment.workers)), flush=True)
        if dry_run:
            estimate_run(experiment, device)
            return 0
        if level is not None:
            lines = [json.dumps(judge(experiment, level, start))]
            replace_text(folder / report.VERDICT, f"{lines[0]}\n")
        else:
            (folder / report.VERDICT).unlink(missing_ok=True)  # of fewer pairs
            write_plan(experiment)
            execute(experiment, start)
            lines = report.headline(experiment.study)
        path = report.write(experiment.study, folder)
    failed = [row for row in experiment.rows if row.status == "failed"]
    for row in failed:
        print(printable(f"failed: {row}: {row.reason}"), file=sys.stderr)
    print(printable(f"report: {path}"), *lines, sep="\n")
    return 1 if failed else 0
