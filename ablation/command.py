"""The command line of `ablate.py`: its flags, and the plan that they give. Imports no torch, so `--help` is fast."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ablation.plan import JUDGED_PAIRS, Plan, load_plan, quick
from errors import UserError
from flags import optional

DESCRIPTION = """Compare any settings of train.py over paired seeds, with intervals and a verdict.

python ablate.py                        RMSNorm or LayerNorm in hours; --quick: in minutes, and what that cannot show

python ablate.py --vary norm=layer,dyt  each at its best learning rate of a sweep; several --vary: effects of a grid

python ablate.py --a "" --b "weight_decay=0.5 qk_norm=true" --judge   keep or discard a change: stops as soon as it can

Ctrl-C stops it and the same command resumes it. Its folder gets runs.jsonl, and report.md, which is derived from it."""
QUICK = """quick: three pairs show only large differences, and never equivalence; 300 steps are the start of a run; all
arms share a learning rate, which may suit one of them better"""


@dataclass(frozen=True)  # comments and docstrings of fields are the help of the flags
class Command:
    plan_file: Annotated[str | None, optional("[PLAN]"), tyro.conf.Positional] = None
    """A TOML file, or a name in configs/comparisons/; flags override what it says"""
    varied: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, optional("SETTING=V,V", name="vary")] = ()
    """Values of a setting to compare, the first as baseline; several times: a grid"""
    a: Annotated[str | None, optional('"S=V ..."')] = None
    """Settings of the baseline, such as "norm=layer steps=600"; "" is the config as it is"""
    b: Annotated[str | None, optional('"S=V ..."')] = None  # Settings of what is compared with it
    quick: bool = False  # Three pairs of 300 steps at one learning rate
    judge: bool = False  # Of two arms: add pairs until it can say keep, discard or inconclusive; ends with a JSON line
    out: Annotated[Path | None, optional("FOLDER")] = None  # Folder of the results (default: runs/ablation-NAME)
    device: str = "auto"  # auto (all GPUs, else MPS, else the cores of the CPU) or a torch device
    jobs: Annotated[int | None, optional("INT")] = None  # Runs at once; by default one for each GPU, or core of a CPU
    ray: Annotated[str | None, optional("ADDRESS")] = None  # Use a Ray cluster: auto, or the address of its head
    dry_run: bool = False  # Only print the plan, and what a run needs
    report: Annotated[Path | None, optional("FOLDER")] = None  # Only rewrite the report of this folder
    claims: Annotated[tuple[Path, ...] | None, optional("FOLDER ...")] = None
    """Only print one table of published claims; each is judged from the first of these folders that measured it"""
    effects: Annotated[tuple[Path, ...] | None, optional("FOLDER ...")] = None
    """Only draw what the mean and the bias do in each of these folders, as effects.png beside them"""
    plan: Annotated[Plan, tyro.conf.arg(name="")] = field(default_factory=Plan)


def parse(arguments: list[str]) -> Command:
    """The command line; read twice, since the plan that it names gives the defaults of the flags."""
    options = {"description": DESCRIPTION, "prog": "ablate.py", "config": (tyro.conf.OmitArgPrefixes,)}
    first = tyro.cli(Command, args=arguments, **options)
    start = quick(starting_plan(first)) if first.quick else starting_plan(first)
    command = tyro.cli(Command, args=arguments, default=dataclasses.replace(Command(), plan=start), **options)
    if not command.judge:
        return command
    judged = dataclasses.replace(command.plan, seeds=command.plan.seeds or JUDGED_PAIRS, rerun_seeds=0)
    return dataclasses.replace(command, plan=judged)  # no pilot; `seeds` is the most that there will be


def starting_plan(command: Command) -> Plan:
    """The plan of the file, of --vary, or of --a and --b; with a name that tells it from others."""
    arms = {text or "default": values(text) for text in (command.a, command.b) if text is not None}
    vary = {name: value.split(",") for text in command.varied for name, value in values(text).items()}
    if len(arms) == 1:
        raise UserError("--a and --b need each other, and differ: settings of the baseline, and of the other arm.")
    if not arms and not vary:
        return load_plan(command.plan_file or "norms")
    plan = load_plan(command.plan_file) if command.plan_file else Plan(config=command.plan.config)
    text = " ".join(filter(None, (command.plan_file, command.a, command.b, *command.varied)))
    name = re.sub(r"[^\w.]+", "-", text).strip("-")[:64]
    return dataclasses.replace(plan, name=name, arms=arms or plan.arms, vary=plan.vary | vary)


def values(text: str) -> dict[str, str]:
    """The settings in a text such as `weight_decay=0.5 qk_norm=true`."""
    if wrong := [part for part in text.split() if "=" not in part]:
        raise UserError(f"{wrong[0]} must be SETTING=VALUE.")
    return dict(part.split("=", 1) for part in text.split())
