"""Compare norms over paired seeds: `python ablate.py`. Thin: parses the plan, prints it, and calls ablation/."""

import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

import lock
from ablation.plan import Plan, load_plan
from errors import UserError, exit_on_user_error, open_streams
from flags import optional

DESCRIPTION = """Compare norms, or other choices, over paired seeds, with intervals and a verdict for every arm.

python ablate.py: RMSNorm and LayerNorm, eight pilot pairs and as many final ones as they ask for

python ablate.py --norms rms layer none --seeds 3 --learning-rates 5e-4 1e-3 2e-3 4e-3: each at its best learning rate

python ablate.py placement: a plan from configs/ablations/

python ablate.py mlp --steps 800 --out runs/mlp-long: a plan, with changes

python ablate.py --report runs/ablation-norms: only rewrite that folder's report

Ctrl-C stops it and the same command resumes it. The folder has runs.jsonl, every finished run, and report.html,
report.md and results.json, which are derived from it."""


@dataclass(frozen=True)
class Command:
    """The command line."""

    plan_file: Annotated[str | None, optional("[PLAN]"), tyro.conf.Positional] = None
    """A plan: a TOML file, or a name in configs/ablations/. Flags override what it says."""
    out: Annotated[Path | None, optional("FOLDER")] = None
    """Folder of the results (default: runs/ablation-NAME, or runs/ablation-NORMS where --norms changes the plan's)."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a torch device; with auto all GPUs are used side by side."""
    jobs: Annotated[int | None, optional("INT")] = None
    """Runs at once: by default one for each GPU, and on a CPU one for each core."""
    dry_run: bool = False
    """Only time a few steps and print the plan."""
    report: Annotated[Path | None, optional("FOLDER")] = None
    """Only rewrite the report of this folder, from its runs.jsonl."""
    claims: Annotated[tuple[Path, ...] | None, optional("FOLDER ...")] = None
    """Only print one table of claims; each claim is judged from the first of these folders that measured it."""
    cells: Annotated[tuple[Path, ...] | None, optional("FOLDER ...")] = None
    """Only print one table of how RMSNorm and LayerNorm differ in each of these folders, at every learning rate."""
    picture: Annotated[Path | None, optional("FILE")] = None
    """With --report: also draw the differences into this PNG or SVG file. With --cells: every pair, and beside it in
    NAME-noise how far pairs and equal runs scatter."""
    plan: Annotated[Plan, tyro.conf.arg(name="")] = field(default_factory=Plan)


def parse(arguments: list[str]) -> Command:
    """The command line; read twice when it names a plan, which then gives the defaults of the flags."""
    options = {"description": DESCRIPTION, "prog": "ablate.py", "config": (tyro.conf.OmitArgPrefixes,)}
    command = tyro.cli(Command, args=arguments, **options)
    if command.plan_file is None:
        return command
    return tyro.cli(Command, args=arguments, default=Command(plan=load_plan(command.plan_file)), **options)


def named(command: Command) -> Plan:
    """The plan; with other norms than the one it started from, it gets their names and so a folder of its own."""
    base = Plan() if command.plan_file is None else load_plan(command.plan_file)
    if command.plan.norms == base.norms or command.plan.name != base.name:
        return command.plan
    return replace(command.plan, name="-".join(command.plan.norms))


def main() -> int:
    """Do what the command line says; returns the exit status."""
    open_streams()
    command = parse(sys.argv[1:])
    from ablation import cells, plots, report, runner  # import torch, which --help does not wait for

    if command.picture is not None and command.report is None and command.cells is None:
        raise UserError("--picture needs --report or --cells.")
    if command.claims is not None:
        if not command.claims:
            raise UserError("--claims needs the folders of one comparison or more.")
        print(report.claims_table(command.claims))
        return 0
    if command.cells is not None:
        found = cells.cells([report.load_study(folder) for folder in command.cells])
        if not found:
            raise UserError("--cells needs folders of finished comparisons of rms and layer.")
        print(report.cells_table(found))
        if command.picture is not None:
            cells.save_pictures(found, command.picture)
        return 0
    if command.report is not None:
        study = report.load_study(command.report)
        report.write(study, command.report)
        if command.picture is not None:
            plots.save_differences(study, command.picture)
        print(f"written: {', '.join(str(command.report / name) for name in report.FILES)}")
        return 0
    plan = named(command)
    folder = command.out or Path("runs") / f"ablation-{plan.name}"
    if command.dry_run:
        print(runner.describe(runner.load_or_create(plan, folder, command.device, command.jobs)))
        return 0
    with lock.locked(folder):
        experiment = runner.load_or_create(plan, folder, command.device, command.jobs)
        print(runner.describe(experiment), flush=True)
        completed = runner.execute(experiment)
    for line in report.headline(experiment.study):
        print(f"{line['arm']}: {line['verdict']} ({line['detail']})")
    print(f"report: {folder / 'report.html'}, {folder / 'report.md'}; records of all runs: {folder / 'runs.jsonl'}")
    if not completed:
        again = shlex.join(["python", "ablate.py", *sys.argv[1:]])
        print(
            f"stopped; {len(experiment.study.results)} runs are finished and kept. Resume with: {again}",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
