"""What studies that train in their own way share: fill a study's folder with runs, then write its report."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ablation import report, study
from ablation.plan import Plan, load_plan
from ablation.records import Row, append_rows, read_rows
from errors import printable
from files import locked


def fill(folder: Path, train: Callable[[Plan, list[Row]], Iterator[list[Row]]]) -> None:
    """Add the runs that `train` yields to runs.jsonl, as soon as they are there. It gets the plan and earlier runs."""
    with locked(folder):
        for rows in train(load_plan(folder / "plan.toml"), read_rows(folder)):
            append_rows(folder, *rows)
        finished = study.load(folder)
        paths = report.write(finished, folder)
    print(*report.headline(finished), printable(f"report: {paths[0]}"), sep="\n")
