"""Carry out a plan: do the runs that are still wanted, and report. Each run has its own process, each worker one run.
A run that raises or is killed is a row with status "failed" and costs nothing else.
"""

import dataclasses
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ablation import report
from ablation.judge import judge_study, pairs_of_looks
from ablation.plan import Plan, Run, as_settings, load_plan, replace_settings, run_settings, save_plan
from ablation.records import JUDGEMENT, Judgement, Row, append, append_rows, as_table, read_judgement, read_rows
from ablation.run import CODE, code_hash, settings_hash, train_run
from ablation.study import Study
from checkpoints.find import find_checkpoint
from data.conversations import find_conversations
from data.corpus import check_conversations
from data.sources import HUB_TEXTS, resolve
from data.tokenizer import load_tokenizer
from errors import UserError, printable
from files import replace_text
from model.decoder import Decoder
from model.device import choose_device
from model.machine import commit, device_model
from training.estimate import estimate, format_time
from training.optimizer import freeze_parameters

OVERHEAD = 20  # seconds of a run beside training: medians of studies are 13, 24 and 31


@dataclass
class Workers:
    """What makes runs, on this machine or a cluster: one at a time in each slot."""

    device: str  # model of the hardware of all slots, as in `Row`
    slots: list[str]  # which `start` alone reads
    threads: int | None  # of a run on a CPU
    start: Callable[["Experiment", Run, str], Future]  # begins a run in a slot


@dataclass
class Experiment:
    """A plan in its folder: the runs that have ended, and what makes further ones."""

    plan: Plan
    folder: Path
    workers: Workers
    rows: list[Row]  # failed ones only of this command: the next command repeats them

    @property
    def study(self) -> Study:
        return Study(self.plan, as_table(self.rows))

    @property
    def exit_status(self) -> int:
        return int(any(row.status == "failed" for row in self.rows))

    def add(self, run: Run, future: Future) -> Row:
        """Append the row of a run that has ended, which is returned."""
        try:
            row = future.result()
            row = dataclasses.replace(row, commit=row.commit or commit())  # a cluster gets the code without git
            reason = None
        except BrokenProcessPool:
            reason = "its process was killed, perhaps for lack of memory, or ended by an error at its start"
        except Exception as error:
            error = getattr(error, "cause", error)  # Ray's own error has the one that was raised
            reason = f"{type(error).__name__}: {as_settings(str(error))}"
        else:
            self.check_comparable(row)
            if row.device != self.workers.device:
                reason = f"it ran on {row.device}, and the others on {self.workers.device}"
        if reason is not None:
            row = Row(**vars(run), status="failed", reason=reason)
        self.rows.append(row)
        append_rows(self.folder, row)
        return row

    def check_comparable(self, row: Row) -> None:
        """`UserError` if text or code are not those of the rows before: further runs would not be either."""
        for what in ("text", "code"):
            if {getattr(earlier, f"{what}_hash") for earlier in self.rows} - {"", getattr(row, f"{what}_hash")}:
                fix = "restore it, and the same command goes on; or begin in another folder"
                raise UserError(f"the {what} was changed since the first runs of {self.folder}; {fix}.")


def local_workers(torch_device: str, jobs: int | None) -> Workers:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs} must be at least 1.")
    chosen = choose_device(torch_device)
    devices, threads = [str(chosen)], None
    if chosen.type == "cpu":
        # `taskset`, Slurm and cpusets may allow fewer cores than the machine has.
        jobs = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        threads = max(1, torch.get_num_threads() // jobs)
    if chosen.type == "cuda" and torch_device == "auto":  # GPUs of one model, as all arms of a seed are made on it
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = [gpu for gpu in gpus if device_model(gpu) == device_model(gpus[0])]
    # Several jobs may share a GPU: a small model leaves it mostly idle.
    slots = [devices[index % len(devices)] for index in range(jobs or len(devices))]
    return Workers(device_model(devices[0]), slots, threads, start_process)


def open_experiment(
    plan: Plan, folder: Path, torch_device: str = "auto", jobs: int | None = None, ray: str | None = None
) -> Experiment:
    """Print a plan, and return its experiment in a folder, without runs that failed: they are made again. `UserError`:
    further runs would fail, or be no pairs of finished ones."""
    check_arms(plan)
    rows = [row for row in read_rows(folder) if row.status != "failed"]
    if rows and not {row.arm for row in rows} & {*plan.all_arms}:
        raise UserError(f"{folder} has the runs of another plan; give another --out.")
    code = code_hash()
    for row in rows:
        if row.code_hash not in ("", code):
            fix = "restore it, or use another folder; if it computes the same, delete each code_hash in machine.toml"
            packages = f"{', '.join(CODE[:-1])} or {CODE[-1]}"
            raise UserError(f"the code in {packages} was changed since the runs of {folder}; {fix}.")
        if row.arm in plan.all_arms and settings_hash(run_settings(plan, row)) != row.settings_hash:
            difference = "had other settings" if row.settings_hash else "does not say which settings it had"
            raise UserError(f"a finished run ({row}) of {folder} {difference}; give another --out.")
    if ray is None:
        workers = local_workers(torch_device, jobs)
    elif jobs is not None or torch_device != "auto":
        raise UserError("--ray uses every device of the cluster; leave out --jobs and --device.")
    else:
        from ablation import cluster

        workers = Workers(*cluster.join(ray))
    experiment = Experiment(plan, folder, workers, rows)
    print(report.plan_in_words(experiment.study, len(workers.slots)), flush=True)
    return experiment


def execute(experiment: Experiment) -> None:
    """Do all runs that are wanted, and again those of unfinished seeds on other hardware."""
    unfinished = {(run.phase, run.seed) for run in experiment.study.remaining}
    here = experiment.workers.device
    experiment.rows = [row for row in experiment.rows if row.device == here or (row.phase, row.seed) not in unfinished]
    free = [*experiment.workers.slots]
    running: dict[Future, tuple[Run, str]] = {}
    bar = tqdm(unit="run", initial=len(experiment.rows), dynamic_ncols=True, disable=None)
    try:
        while True:
            started = {run for run, _ in running.values()}
            waiting = [run for run in experiment.study.remaining if run not in started]
            bar.total = len(experiment.rows) + len(running) + len(waiting)
            bar.refresh()
            for run in waiting[: len(free)]:
                slot = free.pop()
                running[experiment.workers.start(experiment, run, slot)] = run, slot
            if not running:
                return
            for future in wait(running, timeout=5, return_when=FIRST_COMPLETED).done:  # the bar shows that time passes
                run, slot = running.pop(future)
                free.append(slot)
                row = experiment.add(run, future)
                bar.update()
                if row.status == "failed":
                    tqdm.write(printable(f"failed: {run}: {row.reason}"), sys.stderr)
                elif bar.disable:
                    print(f"{len(experiment.rows)} of {bar.total} runs ended: {run}", file=sys.stderr)
    finally:
        bar.close()
        for process in multiprocessing.active_children():  # after Ctrl-C
            process.kill()


def write_plan(experiment: Experiment, unrecorded: Collection[str] = ()) -> list[str]:
    """Write plan.toml. If runs are finished, the fields that were changed after them, but for `unrecorded` ones, are
    appended to changes.jsonl and returned."""
    experiment.folder.mkdir(parents=True, exist_ok=True)
    path = experiment.folder / "plan.toml"
    after = dataclasses.asdict(experiment.plan)
    before = dataclasses.asdict(load_plan(path)) if path.is_file() else {}
    changed = [name for name in before if before[name] != after[name]]
    recorded = [name for name in changed if name not in unrecorded] if experiment.rows else []
    for name in recorded:
        change = {"field": name, "before": str(before[name]), "after": str(after[name])}
        append(experiment.folder / "changes.jsonl", change | {"finished_runs": len(experiment.rows)})
    if changed or not before:  # else it keeps its comments
        save_plan(experiment.plan, path)
    return recorded


def prepare_process(is_first: bool) -> None:
    """For a process that trains: it ends with the one that started it; only the first of a comparison prints notes."""
    if not is_first:
        sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    tqdm.set_lock(threading.RLock())  # instead of a semaphore of the system, which would outlive it with a warning

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_process(experiment: Experiment, run: Run, torch_device: str) -> Future:
    """Begin a run in a new process, which ignores Ctrl-C and SIGTERM: this process gets them, and ends the others."""
    is_first = not experiment.rows and not multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, initializer=prepare_process, initargs=(is_first,))
    stops = {signal.SIGINT, signal.SIGTERM}
    can_block = hasattr(signal, "pthread_sigmask")  # not on Windows
    if can_block:  # which the process inherits
        multiprocessing.resource_tracker.ensure_running()  # before, as its start would let them through again
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    workers = experiment.workers
    future = pool.submit(train_run, experiment.plan, run, torch_device, workers.threads, len(workers.slots))
    if can_block:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    pool.shutdown(wait=False)
    return future


def estimate_runs(experiment: Experiment, torch_device: str) -> None:
    """Print what a run of each arm needs, and the time of all runs that can start."""
    plan, study, workers = experiment.plan, experiment.study, len(experiment.workers.slots)
    torch.set_num_threads(experiment.workers.threads or torch.get_num_threads())
    runs = Counter(run.arm for run in study.remaining)
    seconds = 0.0
    for name, arm in plan.all_arms.items():
        print(f"a run of {name}:", flush=True)
        settings = replace_settings(arm.settings, {"device": torch_device})
        seconds += runs[name] * estimate(settings, advises=False) / workers
    print(f"all runs that can start: {runs.total()}, {workers} at once, about {format_time(seconds)} of training,")
    more = ""
    if seconds > 3600 * plan.hours:
        more = f"; but it ends after {plan.hours:g} hours (--hours), before all have run"
    elif study.pairs is None or study.missing(study.sweep_runs):
        reruns = "reruns (--rerun-seeds) and " if plan.rerun_seeds and study.missing(study.sweep_runs) else ""
        more = f"; then {reruns}the final pairs, within {plan.hours:g} hours in all"
    print(f"  and {format_time(OVERHEAD * runs.total() / workers)} of start-up and evaluations{more}")


def check_arms(plan: Plan) -> None:
    """`UserError` for arms that cannot be trained."""
    evaluated = set()  # on which tokens, in conversations, where there are no bits per byte
    for arm in plan.all_arms.values():
        run, data = arm.settings.run, arm.settings.data
        if run.init_from is not None:
            find_checkpoint(run.init_from)
        is_download = any(name in HUB_TEXTS or name.startswith("hub:") for name in data.data)
        files = [] if is_download else resolve(data)
        source = data.tokenizer or run.init_from
        chat_file = find_conversations(files)
        check_conversations(chat_file, source)
        if chat_file is not None:
            tokenizer = load_tokenizer(source)
            evaluated.add((tokenizer.hash, tokenizer.chat_template, data.sequence_length))
        with torch.device("meta"):  # no memory
            freeze_parameters(Decoder(arm.settings.model), run.freeze)
    if len(evaluated) > 1:
        why = "with another tokenizer, chat template or sequence_length, conversations become other tokens"
        raise UserError(f"{why}, whose losses cannot be compared; give all arms the same.")


def compare(experiment: Experiment) -> None:
    """Train the runs that are missing, and report."""
    (experiment.folder / JUDGEMENT).unlink(missing_ok=True)  # of fewer pairs
    for name in write_plan(experiment):
        if name in report.CHANGED_LATE:
            print(f"note: {report.CHANGED_LATE[name]}")
    execute(experiment)
    print_report(experiment, *report.headline(experiment.study))


def judge(experiment: Experiment, level: float) -> Judgement:
    """Train the pairs of one look after another until one decides at this two-sided level, and report; print each
    judgement, and return the last."""
    plan = experiment.plan
    looks = pairs_of_looks(plan.seeds)
    earlier = read_judgement(experiment.folder)
    if earlier is not None and [*earlier.looks] != looks[: len(earlier.looks)]:
        fix = "other looks at the same pairs would be no test: give another --out and --first-seed"
        raise UserError(f"{experiment.folder} has a verdict after {earlier.looks[-1]} pairs, and {fix}.")
    for pairs in looks:
        experiment.plan = dataclasses.replace(plan, seeds=pairs)
        write_plan(experiment, unrecorded=["seeds"])
        execute(experiment)
        judgement = judge_study(experiment.study, looks, level)
        if judgement.verdict != "inconclusive" or judgement.pairs < pairs or pairs == looks[-1]:
            break
        print(judgement, flush=True)
    replace_text(experiment.folder / JUDGEMENT, f"{judgement}\n")
    print_report(experiment, judgement)
    return judgement


def print_report(experiment: Experiment, *last_lines: object) -> None:
    path = report.write(experiment.study, experiment.folder)
    print(f"report: {path}", *last_lines, sep="\n")
