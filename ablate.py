"""Compare any settings of train.py over paired seeds: `python ablate.py`. Thin: parses, and calls ablation/."""

import contextlib
import functools
import os
import sys

from errors import exit_on_user_error, printable
from files import replacing


def main() -> int:
    """Do what the command line says; returns the exit status."""
    os.environ["MPLBACKEND"] = "agg"  # figures are only saved, and a backend that is not there would fail
    from pathlib import Path  # imported here, so that Ctrl-C at any time ends in one line

    from ablation.command import QUICK, parse
    from files import locked

    command = parse(sys.argv[1:])
    if command.claims is not None:
        from ablation import claims

        print(claims.claims_table(command.claims))
        return 0
    from ablation import plots, report, study

    if command.effects is not None:
        figure = plots.parts([study.load(folder) for folder in command.effects])
        path = command.effects[0].parent / "effects.png"
        with replacing(path) as file:
            figure.savefig(file)
        print(printable(f"written: {path}"))
        return 0
    if command.report is not None:
        print(printable("written: " + ", ".join(map(str, report.write(study.load(command.report), command.report)))))
        return 0
    from ablation import execute, judge  # import torch

    folder = command.out or Path("runs") / f"ablation-{command.plan.name}"
    with contextlib.nullcontext() if command.dry_run else locked(folder):
        experiment = execute.load_or_create(command.plan, folder, command.device, command.jobs)
        start = None
        if command.ray is not None:
            from ablation import cluster

            start = cluster.join(experiment, command.ray)
        described = report.describe(experiment.study, len(experiment.workers))
        print(described, *[QUICK] * command.quick, sep="\n", flush=True)
        if command.dry_run:
            print("one run:", flush=True)
            execute.estimate_run(experiment)
            return 0
        if command.judge:
            said = judge.judge(experiment, functools.partial(execute.execute, start=start))
        else:
            execute.write_plan(experiment)
            execute.execute(experiment, start)
            said = report.headline(experiment.study)
        written = report.write(experiment.study, folder)
    for row in experiment.failed:
        print(printable(f"failed: {row}: {row.reason}"), file=sys.stderr)
    print(printable(f"report: {written[0]}"), *said, sep="\n")
    return 1 if experiment.failed else 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
