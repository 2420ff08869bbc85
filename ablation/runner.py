"""Execute a plan, several runs at a time; each finished run becomes one line of runs.jsonl.

Repeating the command skips finished runs, resumes interrupted ones, and refuses to mix runs on another text, on another
machine or with other settings.
"""

import dataclasses
import functools
import platform
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import kernels
from ablation import report
from ablation.analysis import Study
from ablation.conversion import VARIANTS, convert_norm, losses_at_once
from ablation.effects import MIN_PAIRS_FOR_EQUIVALENCE
from ablation.plan import (
    Arm,
    Plan,
    Run,
    arm_settings,
    default_learning_rate,
    final_runs,
    label,
    load_plan,
    noise_runs,
    pilot_runs,
    run_settings,
    save_plan,
    sweep_runs,
)
from ablation.processes import run_in_processes
from ablation.results import Change, Machine, RunResult, append_lines, read_results, read_timings
from ablation.run import limited_threads, on_device, settings_hash, train_run
from benchmarks.timing import CALLS_PER_BLOCK, Timing, interleaved
from benchmarks.training import PARTS, make_calls, time_together, variants
from errors import UserError, usable_cores
from model.device import (
    choose_device,
    choose_kernels,
    choose_training_dtype,
    device_name,
    keep_freed_memory,
    processor,
)
from training import checkpoint
from training.settings import Settings

TIMING_PROCESSES, TIMING_BLOCKS = 5, 12  # blocks of one process share what slows it: the process is the unit
COMPILE_SECONDS = 30  # a guess, for the time that the plan announces
STEPS_PER_ROUND = 2.5  # time of one call of every timed part, in training steps
FIXED = ("config", "steps", "margin", "evaluations")  # of a plan, once it has results
NOT_FIXED = ("name", "convert", "timing")  # once a pilot has fixed the number of final runs, and there are some
MAX_JOBS = 1000
SAME_MACHINE = ("processor", "torch", "kernels")


@dataclass
class Experiment:
    """A plan, and what has been measured so far."""

    plan: Plan
    folder: Path
    device: str
    """As on the command line: auto, or a torch device."""
    jobs: int
    study: Study

    @property
    def threads(self) -> int | None:
        """CPU threads of each process: the cores divided by the jobs, since more threads than cores are slower."""
        return max(1, usable_cores() // self.jobs) if choose_device(self.device).type == "cpu" else None

    @property
    def devices(self) -> list[str]:
        """The device of each job; with `auto`, all GPUs."""
        if choose_device(self.device).type == "cuda" and self.device == "auto":
            return [f"cuda:{number % torch.cuda.device_count()}" for number in range(self.jobs)]
        return [self.device] * self.jobs

    def machine(self, dtype: str) -> Machine:
        device = choose_device(self.device)
        return Machine(
            device=device_name(device),
            processor=processor(),
            processes=self.jobs,
            threads=self.threads,
            torch=torch.__version__,
            python=platform.python_version(),
            system=platform.system(),
            kernels=kernels.describe(device),
            dtype=str(choose_training_dtype(dtype, device)).removeprefix("torch."),
        )

    def add(self, result: RunResult) -> None:
        """Append a finished run to runs.jsonl; raises `UserError` if it used another text than the runs before it."""
        for before in self.study.results[:1]:
            if before.text.hash != result.text.hash:
                raise UserError(
                    f"the text has changed (hash {before.text.hash} before, {result.text.hash} now), and losses on "
                    f"different texts cannot be compared; give another --out."
                )
        append_lines(self.folder / "runs.jsonl", result)
        self.study = Study(self.plan, [*self.study.results, result], self.study.timings)

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name


def load_or_create(plan: Plan, folder: Path, device: str, jobs: int | None) -> Experiment:
    """Read the finished runs in the folder, or start without any."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; give a folder.")
    results, timings = read_results(folder / "runs.jsonl"), read_timings(folder / "timings.jsonl")
    if (folder / "plan.toml").is_file():
        before = load_plan(str(folder / "plan.toml"))
        sized = before.seeds is None and any(result.phase == "final" for result in results)
        fixed = [name for name in vars(plan) if name not in NOT_FIXED] if sized else FIXED
        changed = [name for name in fixed if getattr(before, name) != getattr(plan, name)]
        if changed and results:
            raise UserError(f"{folder} has results with different settings ({', '.join(changed)}); give another --out.")
    chosen = choose_device(device)
    choose_kernels("auto", chosen)
    if jobs is None:
        gpus = torch.cuda.device_count() if device == "auto" else 1
        jobs = usable_cores() if chosen.type == "cpu" else max(gpus, 1)
    if not 1 <= jobs <= MAX_JOBS:
        raise UserError(f"--jobs is {jobs} and must be between 1 and {MAX_JOBS:,}.")
    experiment = Experiment(plan, folder, device, jobs, Study(plan, results, timings))
    check_machine(experiment)
    check_settings(experiment)
    return experiment


def check_settings(experiment: Experiment) -> None:
    """Raise `UserError` where a finished run of the plan had other settings than it would have now."""
    for result in experiment.study.results:
        if result.phase != "conversion" and result.arm in experiment.plan.arms:
            run = Run(result.arm, result.phase, result.seed, result.learning_rate)
            if settings_hash(run_settings(experiment.plan, run)) != result.settings_hash:
                raise UserError(f"the finished run {run.folder_name} had other settings; give another --out.")


def check_machine(experiment: Experiment) -> None:
    """Raise `UserError` where the finished runs come from another machine."""
    for result in experiment.study.results[:1]:
        now = experiment.machine(result.arm.dtype)
        changed = [name for name in SAME_MACHINE if getattr(result.machine, name) != getattr(now, name)]
        if changed:
            pairs = [f"{name} {getattr(result.machine, name)} before, {getattr(now, name)} now" for name in changed]
            words = f"{experiment.folder} has results from another machine ({'; '.join(pairs)})"
            raise UserError(f"{words}; give another --out.")


def execute(experiment: Experiment) -> bool:
    """Do all remaining work and write the report after each part; False if a signal stopped it."""
    try:
        return _execute(experiment)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f"{experiment.folder} cannot be written ({error}); free some space, then repeat the command."
        ) from error


def _execute(experiment: Experiment) -> bool:
    plan = experiment.plan
    experiment.folder.mkdir(parents=True, exist_ok=True)
    log_changes(experiment)
    save_plan(plan, experiment.folder / "plan.toml")
    with tqdm(unit="run", dynamic_ncols=True) as bar:
        finished = train_stages(experiment, bar)
        report.write(experiment.study, experiment.folder)
    if finished and plan.convert:
        finished = convert_all(experiment)
    if finished and plan.timing:
        finished = time_all(experiment)
    if plan.convert or plan.timing:
        report.write(experiment.study, experiment.folder)
    return finished


def log_changes(experiment: Experiment) -> None:
    """Append to changes.jsonl what differs from the plan under which the finished runs were made."""
    path = experiment.folder / "plan.toml"
    if not (path.is_file() and experiment.study.results):
        return
    before, now = (dataclasses.asdict(plan) for plan in (load_plan(str(path)), experiment.plan))
    changes = [
        Change(name, before[name], now[name], len(experiment.study.results))
        for name in now
        if before[name] != now[name]
    ]
    if changes:
        append_lines(experiment.folder / "changes.jsonl", *changes)


def train_stages(experiment: Experiment, bar: tqdm) -> bool:
    """The sweep until no arm is best at its edge, the pilot, the noise, and the final runs; False when stopped."""
    plan, rates = experiment.plan, experiment.study.rates
    while rates:
        if not train_all(experiment, sweep_runs(plan, rates), bar):
            return False
        rates = [experiment.study.next_rate] if experiment.study.next_rate is not None else []
    study = experiment.study
    rates = study.learning_rates
    before = [*pilot_runs(plan, rates), *noise_runs(plan, study.rates or sorted(set(rates.values())))]
    if not plan.seeds:
        if not train_all(experiment, before, bar):
            return False
        if experiment.study.size is None:  # every arm diverged at every learning rate of the sweep
            return True
        print(f"pilot: {report.describe_size(experiment.study)}", flush=True)
        before = []
    return train_all(experiment, final_runs(plan, rates, experiment.study.size.pairs) + before, bar)


def train_all(experiment: Experiment, runs: list[Run], bar: tqdm) -> bool:
    """Train the runs that are not finished; False when a signal stopped them."""
    bar.total = (bar.total or 0) + len(runs)
    bar.refresh()
    known = {result.key: result for result in experiment.study.results}
    tasks = []
    for run in runs:
        settings = run_settings(experiment.plan, run)
        result = known.get((run.arm, run.phase, run.seed, run.learning_rate, None))
        if result is None:
            keep = weights_needed(experiment.plan, run)
            folder, machine = experiment.run_folder(run.folder_name), experiment.machine(run.arm.dtype)
            task = functools.partial(_train_on, run, settings, folder, machine, experiment.threads, keep)
            tasks.append(task)
        else:
            bar.update()

    def add(result: RunResult) -> None:
        experiment.add(result)
        run = Run(result.arm, result.phase, result.seed, result.learning_rate)
        if not weights_needed(experiment.plan, run):
            shutil.rmtree(experiment.run_folder(run.folder_name), ignore_errors=True)  # its record has all its numbers
        loss = "diverged" if result.validation_loss is None else f"{result.validation_loss:.4f}"
        bar.set_postfix_str(f"{label(experiment.plan, result.arm)}, seed {result.seed}: {loss}")
        bar.update()

    return run_in_processes(experiment.devices, tasks, add)


def _train_on(run, settings, folder, machine, threads, keep_weights, device: str) -> RunResult | None:
    measure = losses_at_once if keep_weights else None  # its weights are kept to be converted
    return train_run(
        run, on_device(settings, device), folder, machine, threads, keep_weights=keep_weights, measure=measure
    )


def weights_needed(plan: Plan, run: Run) -> bool:
    """Whether a run's weights are converted afterwards."""
    return plan.convert and run.arm.norm == "layer" and run.phase == "final"


def convert_all(experiment: Experiment) -> bool:
    """Convert every finished LayerNorm run in every way; False when a signal stopped it."""
    plan = experiment.plan
    done = {(r.variant, r.seed, r.learning_rate) for r in experiment.study.results if r.phase == "conversion"}
    layer = next(arm for arm in plan.arms if arm.norm == "layer")
    bases = [base for base in experiment.study.final(layer).result if base.status == "completed"]
    tasks = []
    for base in bases:
        run = Run(layer, "final", base.seed, base.learning_rate)
        saved = experiment.run_folder(run.folder_name) / "last"
        weights = checkpoint.find_complete(saved)
        todo = [variant for variant in VARIANTS if (variant, base.seed, base.learning_rate) not in done]
        if weights is None and todo:
            print(f"{saved} is missing: seed {base.seed} is not converted ({', '.join(todo)})")
            continue
        for variant in todo:
            folder = conversion_folder(experiment, variant, base.seed)
            machine, settings = experiment.machine(layer.dtype), run_settings(plan, run)
            arguments = base, settings, weights, folder, variant, machine, experiment.threads
            tasks.append(functools.partial(_convert_on, *arguments))
    with tqdm(total=len(tasks), unit="conversion", dynamic_ncols=True) as bar:

        def add(result: RunResult) -> None:
            experiment.add(result)
            shutil.rmtree(conversion_folder(experiment, result.variant, result.seed), ignore_errors=True)
            bar.update()

        return run_in_processes(experiment.devices, tasks, add)


def conversion_folder(experiment: Experiment, variant: str, seed: int) -> Path:
    return experiment.run_folder(f"{variant} {seed}".replace(",", "").replace(" ", "-"))


def _convert_on(base, settings, weights, folder, variant, machine, threads, device: str) -> RunResult | None:
    shutil.rmtree(folder, ignore_errors=True)  # too short to resume
    return convert_norm(base, on_device(settings, device), weights, folder, variant, machine, threads)


def settings_to_time(plan: Plan, arm: Arm) -> Settings:
    """An arm's settings with a learning rate at which nothing diverges; a step costs the same at any."""
    settings = arm_settings(plan, arm)
    return dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, learning_rate=1e-12))


def timed_entries(experiment: Experiment) -> dict[str, dict[tuple[str, str], Settings]]:
    """All arms of every variant of the code in which too few processes have timed all of them together."""
    plan, device = experiment.plan, choose_device(experiment.device)
    arms = {label(plan, arm): settings_to_time(plan, arm) for arm in plan.arms}
    timed: dict[tuple[int, str], set[tuple[str, str]]] = {}
    for timing in experiment.study.timings:
        timed.setdefault((timing.process, timing.variant), set()).add((timing.part, timing.arm))
    wanted = {(part, name) for part in PARTS for name in arms}
    done = Counter(variant for (_, variant), together in timed.items() if wanted <= together)
    few = [variant for variant in variants(device) if done[variant] < TIMING_PROCESSES]
    return {variant: {(variant, name): settings for name, settings in arms.items()} for variant in few}


def time_all(experiment: Experiment) -> bool:
    """Time every arm in every variant of the code in fresh processes, all arms of a variant taking turns."""

    def add(timings: list[Timing]) -> None:
        append_lines(experiment.folder / "timings.jsonl", *timings)
        study = experiment.study
        experiment.study = Study(study.plan, study.results, [*study.timings, *timings])
        bar.update()

    with tqdm(total=TIMING_PROCESSES, unit="process", desc="timing", dynamic_ncols=True) as bar:
        while entries := timed_entries(experiment):
            task = functools.partial(_time_on, list(entries.values()), TIMING_BLOCKS)
            if not run_in_processes([experiment.device], [task], add):
                return False
    return True


def _time_on(entries: list[dict[tuple[str, str], Settings]], blocks: int, device: str) -> list[Timing]:
    chosen = choose_device(device)
    keep_freed_memory()  # as in training
    return [timing for of_variant in entries for timing in time_together(of_variant, PARTS, chosen, blocks)]


def describe(experiment: Experiment) -> str:
    """The plan in words before it runs: arms, runs, tokens, and how long it will take here."""
    plan, device, study = experiment.plan, choose_device(experiment.device), experiment.study
    settings = settings_to_time(plan, plan.arms[0])
    tokens = settings.optimizer.steps * settings.data.batch_size * settings.data.sequence_length
    size, arms, swept = study.size, len(plan.arms), study.rates or [default_learning_rate(plan)]
    sweep, pilot = len(sweep_runs(plan, study.rates)), len(plan.seeds_of_pilot) * arms
    noise = len(noise_runs(plan, swept))
    done = int((study.table.used & (study.table.phase != "conversion")).sum())
    step = seconds_per_step(experiment, settings)
    of_run = step * settings.optimizer.steps / experiment.jobs / 60
    minutes = max(sweep + pilot + noise + (size.pairs * arms if size else 0) - done, 0) * of_run
    rates = ", ".join(f"{rate:g}" for rate in study.rates)
    kinds = [
        f"{sweep} to choose learning rates ({rates})" if sweep else "",
        f"{pilot} of the pilot ({len(plan.seeds_of_pilot)} pairs)" if pilot else "",
        f"{noise} for the noise between equal runs" if noise else "",
        f"{size.pairs * arms} to compare ({size.pairs} paired seeds)" if size else "",
    ]
    about = f"about {minutes:.0f} minutes"
    if size is None:
        most = (plan.hours * 60 - minutes) / arms / of_run
        least = MIN_PAIRS_FOR_EQUIVALENCE * arms * of_run
        about += (
            f", then {least:.0f} or more for the final runs: the pilot fixes their number, at least "
            f"{MIN_PAIRS_FOR_EQUIVALENCE} pairs, and {plan.hours:g} hours allow {max(most, 0):.0f}"
        )
    lines = [
        f"arms: {'; '.join(label(plan, arm) for arm in plan.arms)}",
        f"runs: {', '.join(kind for kind in kinds if kind)}; {done} done; {tokens:,} tokens each",
        f"measure: validation loss; differences within {plan.margin:g} nats per token are treated as equivalent",
        f"training: {about}; {experiment.jobs} at once on {device}"
        + (f", {experiment.threads} threads each" if experiment.threads else ""),
    ]
    entries = timed_entries(experiment) if plan.timing else {}
    if entries:
        calls = STEPS_PER_ROUND * TIMING_BLOCKS * CALLS_PER_BLOCK * step
        compiles = sum(variants(device)[variant][1] for variant in entries)
        minutes = TIMING_PROCESSES * len(plan.arms) * (len(entries) * calls + compiles * COMPILE_SECONDS) / 60
        lines.append(
            f"timing: about {minutes:.0f} minutes, {len(plan.arms)} arms in {len(entries)} variants of the code, in "
            f"{TIMING_PROCESSES} processes"
        )
    return "\n".join(lines)


def seconds_per_step(experiment: Experiment, settings: Settings) -> float:
    """Median seconds of a training step, from finished runs, or from a few steps timed now."""
    done = [
        r.seconds / r.steps for r in experiment.study.results if r.phase != "conversion" and r.status == "completed"
    ]
    if done:
        return statistics.median(done)
    device = choose_device(experiment.device)
    with limited_threads(experiment.threads):
        step = make_calls(settings, False, device)["step"]
        return statistics.median(interleaved({"step": step}, device, 3)["step"])
