"""Compare norms over paired seeds: `python ablate.py`. Thin: parses the plan, prints it, and calls ablation/."""

import os
import shlex
import sys

from errors import UserError, exit_on_user_error


def main() -> int:
    """Do what the command line says; returns the exit status."""
    os.environ["MPLBACKEND"] = "agg"  # figures are only saved, and a backend that is not there would fail
    from pathlib import Path  # imported here, so that Ctrl-C at any time ends in one line

    from ablation.command import named, parse
    from errors import locked

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
    with locked(folder):
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
