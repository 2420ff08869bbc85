"""Do the runs that a study still wants: a fresh process for each, and each device owned by one worker.

A run that raises anything, or whose process is killed, is a row with status "failed" and costs nothing else. Ctrl-C and
SIGTERM reach the processes too: each saves its run and ends. The same command resumes.
"""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ablation.plan import Plan, Run, arm_settings, load_plan, plan_changes, run_settings, save_plan
from ablation.records import Change, Row, append, read_lines
from ablation.run import hardware, limited_threads, settings_hash, train_run
from ablation.study import Study, as_table
from errors import UserError, usable_cores
from model.device import choose_device, choose_kernels, choose_training_dtype
from training.estimate import measure_time

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENOUGH_FAILURES = 3  # without a run that worked: the others would fail as well
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

    def next_runs(self, running: set[Run]) -> list[Run]:
        """The runs that are wanted and not made, at most as many as can start; none after too many failures."""
        hopeless = len(self.failed) >= ENOUGH_FAILURES and all(row["status"] == "failed" for row in self.rows)
        return [] if hopeless else [run for run in self.study.missing(self.study.wanted) if run not in running]

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


def without_mixed_pairs(study: Study, rows: list[dict], device: str) -> list[dict]:
    """The rows without those of unfinished seeds that come from another device: arms of a seed share theirs."""
    unfinished = {(run.phase, run.seed) for run in study.missing(study.wanted)}
    return [row for row in rows if row["device"] == device or (row["phase"], row["seed"]) not in unfinished]


def execute(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> bool:
    """Do all runs that are wanted; False when a signal stopped them.

    start: begins a run on a device; by default in a process of its own on this machine.
    """
    here = hardware(torch.device(experiment.devices[0]))
    experiment.rows = without_mixed_pairs(experiment.study, experiment.rows, here)
    experiment.update()
    begin = start or (lambda run, device: start_process(experiment, run, device))
    free, running = list(experiment.devices), {}
    with stop_by_signals() as stopped, tqdm(unit="run", dynamic_ncols=True) as bar:
        while True:
            waiting = [] if stopped.is_set() else experiment.next_runs({run for run, _ in running.values()})
            while waiting and free and not stopped.is_set():
                run, device = waiting.pop(0), free.pop(0)
                running[begin(run, device)] = run, device
            bar.total = len(experiment.rows) + len(running) + len(waiting)
            if bar.n < len(experiment.rows):
                bar.update(len(experiment.rows) - bar.n)
            if not running:
                return not stopped.is_set()
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                run, device = running.pop(future)
                free.append(device)
                row = result(future, run)
                if row is None:
                    stopped.set()
                else:
                    experiment.add(row)
                    shutil.rmtree(experiment.run_folder(run), ignore_errors=True)  # its row has all its numbers
            if stopped.is_set():
                for process in multiprocessing.active_children():  # Ctrl-C reached them as well, `kill` did not
                    os.kill(process.pid, signal.SIGTERM)


def write_plan(experiment: Experiment) -> None:
    """Write plan.toml; append to changes.jsonl what differs from the plan under which the finished runs were made."""
    experiment.folder.mkdir(parents=True, exist_ok=True)
    path = experiment.folder / "plan.toml"
    if path.is_file() and experiment.rows:
        changes = plan_changes(load_plan(str(path)), experiment.plan)
        append(experiment.folder / "changes.jsonl", *(Change(*each, len(experiment.rows)) for each in changes))
    save_plan(experiment.plan, path)


def result(future: Future, run: Run) -> Row | None:
    """The row of a run that has ended; None if a signal stopped it."""
    try:
        return future.result()
    except BrokenProcessPool:
        return failure(run, "its process was killed, perhaps for lack of memory")
    except Exception as error:
        return failure(run, f"{type(error).__name__}: {error}")


def start_process(experiment: Experiment, run: Run, device: str) -> Future:
    """Begin a run in a fresh process. Signals are ignored while it starts, so that none kills it during its imports."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
        folder, workers = experiment.run_folder(run), len(experiment.devices)
        future = pool.submit(train_run, experiment.plan, run, folder, device, experiment.threads, workers)
        pool.shutdown(wait=False)
        return future
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """In a new process: end when the parent has died, so that no run is ever trained twice at once."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def stop_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets inside the block."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in SIGNALS}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(experiment: Experiment, timed: bool = False) -> str:
    """The plan in words before it runs; `timed`: also the time of a run, from finished ones or from a few steps."""
    plan, study = experiment.plan, experiment.study
    settings = arm_settings(plan, next(iter(plan.compared.values())))
    tokens = settings.optimizer.steps * settings.data.batch_size * settings.data.sequence_length
    waiting, pairs = len(study.missing(study.wanted)), study.pairs or "as many as the pilot asks for"
    rates = ", ".join(f"{rate:g}" for rate in study.rates) or ", ".join(
        f"{rate:g}" for rate in sorted({*study.learning_rates.values()})
    )
    lines = [
        f"arms: {'; '.join(plan.compared)}",
        f"learning rates: {rates}" + (" (a sweep)" if study.rates else ""),
        f"final pairs: {pairs}; at most {plan.hours:g} hours in all",
        f"runs: {len(study.rows)} done, {waiting} that can start now, {len(experiment.devices)} at once; "
        f"{tokens:,} tokens each",
        f"measure: validation loss; differences within {plan.margin:g} nats per token are treated as equivalent",
    ]
    if plan.seeds == 3 and plan.name.endswith("-quick"):
        lines.append(QUICK)
    if timed and len(study.rows):
        lines.append(f"a run took {study.rows.seconds.median():.0f} seconds")
    elif timed:
        device = choose_device(experiment.devices[0])
        choose_kernels(settings.machine.kernels, device)
        with limited_threads(experiment.threads):
            time = measure_time(settings, device, choose_training_dtype(settings.machine.dtype, device))
        lines.append(f"a run: {time}")
    return "\n".join(lines)
