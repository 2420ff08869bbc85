"""RMSNorm or LayerNorm, settled by measurement: `python ablate.py`.

Thin: reads the plan, prints it, and leaves it to ablation/.
"""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ablation.plan import Plan, load_plan
from errors import UserError, exit_on_user_error

DESCRIPTION = """Compare norms, or other choices, over paired seeds, with intervals and a verdict.

python ablate.py: RMSNorm and LayerNorm, five pairs

python ablate.py --arms rms layer none --seeds 3 --learning-rates 5e-4 1e-3 2e-3 4e-3: each at its own best rate

python ablate.py positions: a plan from configs/ablations/

python ablate.py gates --steps 800 --out runs/gates-long: a plan, changed

It can be stopped at any time (Ctrl-C) and goes on with the same command. The folder then holds report.html, report.md
and results.json with every number."""


@dataclass(frozen=True)
class Command:
    """The command line."""

    file: Annotated[str | None, tyro.conf.arg(metavar="[PLAN]"), tyro.conf.Positional] = None
    """A plan: a TOML file, or a name in configs/ablations/. Flags change what it says."""
    out: Path | None = None
    """Folder of the results (default: runs/ablation-NAME)."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a torch device; several GPUs are used side by side."""
    jobs: int | None = None
    """Runs at once: by default one for each GPU, and on a CPU one for each core."""
    dry_run: bool = False
    """Time a few steps, print the plan, and end."""
    plan: Annotated[Plan, tyro.conf.arg(name="")] = field(default_factory=Plan)


def main() -> int:
    """Do what the command line says; returns the exit status."""
    file = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    plan = load_plan(file) if file is not None else Plan()
    command = tyro.cli(
        Command,
        default=Command(plan=plan),
        description=DESCRIPTION,
        prog="ablate.py",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if command.file != file:
        raise UserError(f"the plan comes first: python ablate.py {command.file} ...")
    from ablation import conduct, preview  # import torch, which --help does not wait for

    folder = command.out or Path("runs") / f"ablation-{command.plan.name}"
    work = conduct.begin(command.plan, folder, command.device, command.jobs)
    print(preview.text(work))
    if command.dry_run:
        return 0
    whole = conduct.execute(work, shlex.join(["python", "ablate.py", *sys.argv[1:]]))
    print(conduct.headline(work.results))
    print(f"report: {folder / 'report.html'}, {folder / 'report.md'}; every number: {folder / 'results.json'}")
    if not whole:
        conduct.go_on(work)
        return 130
    return 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
