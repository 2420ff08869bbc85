"""Compare any settings of train.py over paired seeds: `python ablate.py`. Thin: parses, and calls ablation/."""

import signal

from errors import UserError, end, exit_on_user_error, fit_terminal, interrupt, printable

if __name__ == "__main__":  # so that Ctrl-C in the imports ends in one line
    signal.signal(signal.SIGINT, interrupt)

import contextlib
import dataclasses
import hashlib
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ablation.plan import JUDGED_PAIRS, Plan, find_plan, load_plan, quick
from flags import optional

DESCRIPTION = """Compare any settings of train.py over paired seeds, with intervals and a verdict.

python ablate.py                   RMSNorm or LayerNorm; --quick: in minutes

python ablate.py --vary norm=layer,dyt    values of a setting, or of several

python ablate.py factorial         repeat a study of studies/

python ablate.py judge --a "" --b "qk_norm=true"    keep or discard a change

python ablate.py report FOLDER     write the report of a comparison again

Ctrl-C stops it and the same command resumes it. Its folder gets runs.jsonl, and report.md, which is derived from it."""
QUICK = """quick: few pairs show only large differences, fewer than five never equivalence; 300 steps are the start of a
run; all arms share a learning rate, which may suit one of them better. More pairs: the same command with --seeds 8"""


RUNS_DEPEND_ON = ("steps", "learning_rates", "perturbations")  # flags that make other runs, for another folder


@dataclass(frozen=True)  # comments and docstrings of fields are the help of the flags
class Command:
    plan_file: Annotated[str | None, optional("[PLAN]"), tyro.conf.Positional] = None
    """A TOML file, or a study in studies/, whose plan is run again; flags override what it says"""
    varied: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, optional("SETTING=V,V", name="vary")] = ()
    """Values of a setting to compare, the first as baseline; several times: a grid"""
    a: Annotated[str | None, optional('"S=V ..."')] = None
    """Settings of the baseline, such as "norm=layer steps=600"; "" is the config as it is"""
    b: Annotated[str | None, optional('"S=V ..."')] = None  # Settings of what is compared with it
    quick: bool = False  # Three pairs of 300 steps at one learning rate
    out: Annotated[Path | None, optional("FOLDER")] = None  # Folder of the results (default: runs/ablation-NAME)
    device: str = "auto"  # auto (all GPUs, else MPS, else the cores of the CPU) or a torch device
    jobs: Annotated[int | None, optional("INT")] = None  # Runs at once; by default one for each GPU, or core of a CPU
    ray: Annotated[str | None, optional("ADDRESS")] = None  # Use a Ray cluster: auto, or the address of its head
    dry_run: bool = False  # Only print the plan, and what a run needs
    plan: Annotated[Plan, tyro.conf.arg(name="")] = field(default_factory=Plan)


def parse(arguments: list[str]) -> Command:
    """The command line; read twice, since the plan that it names gives the defaults of the flags."""
    options = {"description": DESCRIPTION, "prog": "ablate.py", "config": (tyro.conf.OmitArgPrefixes,)}
    first = tyro.cli(Command, args=arguments, **options)
    plan = starting_plan(first)
    start = dataclasses.replace(Command(), plan=quick(plan) if first.quick else plan)
    command = tyro.cli(Command, args=arguments, default=start, **options)
    others = [name for name in RUNS_DEPEND_ON if getattr(command.plan, name) != getattr(start.plan, name)]
    suffix = "".join(f"-{name}-{getattr(command.plan, name)}" for name in others)
    name = command.plan.name + re.sub(r"[^\w.]+", "-", suffix).rstrip("-")
    return dataclasses.replace(command, plan=dataclasses.replace(command.plan, name=name))


def starting_plan(command: Command) -> Plan:
    """The plan of the file, of --vary, or of --a and --b; with a name that tells it from others."""
    arms = {text or "default": values(text) for text in (command.a, command.b) if text is not None}
    if len(arms) == 1:
        raise UserError("--a and --b need each other, and differ: settings of the baseline, and of the other arm.")
    vary = {name: value.split(",") for name, value in values(" ".join(command.varied)).items()}
    if not arms and not vary:
        return load_plan(find_plan(command.plan_file or "norms"))
    plan = load_plan(find_plan(command.plan_file)) if command.plan_file else Plan(config=command.plan.config)
    given = (command.plan_file, command.a, command.b, *command.varied)
    text = re.sub(r"[^\w.]+", "-", " ".join(filter(None, given))).strip("-")
    name = f"{text[:48]}-{hashlib.blake2b(repr(given).encode(), digest_size=3).hexdigest()}"
    return dataclasses.replace(plan, name=name, arms=arms or plan.arms, vary=plan.vary | vary)


def values(text: str) -> dict[str, str]:
    """The settings in a text such as `weight_decay=0.5 qk_norm=true`."""
    found = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"{part} must be SETTING=VALUE.")
        if name in found:
            raise UserError(f"{name} is given twice; --vary takes all values of a setting at once: {name}=V,V,V.")
        found[name] = value
    return found


def compare(command: Command, *, judged: bool) -> int:
    """Train the runs of a comparison that are missing, and report; returns the exit status."""
    from ablation import execute, judge, report  # import torch
    from files import locked

    folder = command.out or Path("runs") / f"ablation-{command.plan.name}"
    plan = command.plan
    if judged:  # no pilot: `seeds` is the most pairs that there will be
        plan = dataclasses.replace(plan, seeds=plan.seeds or JUDGED_PAIRS, rerun_seeds=0)
        judge.check(plan)
    plan.compared.keys()  # refuses what cannot be compared, before there is a folder
    with contextlib.nullcontext() if command.dry_run else locked(folder):
        experiment = execute.load_or_create(plan, folder, command.device, command.jobs)
        start = None
        if command.ray is not None:
            from ablation import cluster

            start = cluster.join(experiment, command.ray)
        print(report.describe(experiment.study, len(experiment.workers)), flush=True)
        if command.quick:
            print(QUICK, flush=True)
        if command.dry_run:
            print("one run:", flush=True)
            execute.estimate_run(experiment)
            return 0
        if judged:
            said = judge.judge(experiment, start)
        else:
            execute.write_plan(experiment)
            execute.execute(experiment, start)
            said = report.headline(experiment.study)
        written = report.write(experiment.study, folder)
    for row in experiment.failed:
        print(printable(f"failed: {row}: {row.reason}"), file=sys.stderr)
    print(printable(f"report: {written[0]}"), *said, sep="\n")
    return 1 if experiment.failed else 0


def write_report(folder: tyro.conf.Positional[str]) -> None:
    """Write the report of a comparison again, from its plan.toml, runs.jsonl and machine.toml.

    Args:
        folder: Folder of the comparison, or a study in studies/.
    """
    from ablation import report, study

    path = find_plan(folder).parent
    written = report.write(study.load(path), path)
    print(printable("written: " + ", ".join(map(str, written))))


def main() -> int:
    """Do what the command line says; returns the exit status."""
    os.environ["MPLBACKEND"] = "agg"  # figures are only saved, and a backend that is not there would fail
    write = sys.stdout.write
    sys.stdout.write = lambda text: write(fit_terminal(text, sys.stdout))
    name, *others = sys.argv[1:] or [""]
    if name == "report":
        tyro.cli(write_report, args=others, prog="ablate.py report")
        return 0
    judged = name == "judge"
    command = parse(others if judged else sys.argv[1:])
    try:
        return compare(command, judged=judged)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the process has ended
        end(f"stopped; the same command resumes it: python {shlex.join(sys.argv)}", 130)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
