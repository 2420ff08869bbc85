"""The command line of `ablate.py`: its flags, and the plan that they give. Imports no torch, so `--help` is fast."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from ablation.plan import Plan, load_plan
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
