"""What studies that train in their own way share: the command that fills a study's folder and writes its report."""

from collections.abc import Callable, Iterator
from pathlib import Path

import tyro

from ablation import report, study
from ablation.plan import Plan, load_plan
from ablation.records import Row, append_rows, read_rows
from errors import exit_on_user_error, printable
from files import locked

Train = Callable[[Plan, list[Row], str], Iterator[list[Row]]]
"""Trains what a plan asks for and the earlier rows lack, on a device, and yields rows to append."""


def fill(train: Train, folder: Path, device: str) -> None:
    """Add the runs to runs.jsonl, as soon as they are there, and write the report."""
    with locked(folder):
        for rows in train(load_plan(folder / "plan.toml"), read_rows(folder), device):
            append_rows(folder, *rows)
        finished = study.load(folder)
        paths = report.write(finished, folder)
    print(*report.headline(finished), printable(f"report: {paths[0]}"), sep="\n")


def run_command(train: Train, name: str) -> None:
    """The command line: `python -m studies.NAME FOLDER [--device DEVICE]`."""

    def main(folder: tyro.conf.Positional[Path], device: str = "auto") -> None:
        fill(train, folder, device)

    with exit_on_user_error():
        tyro.cli(main, prog=f"python -m studies.{name}", description=train.__doc__)
