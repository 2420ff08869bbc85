"""Train studies that `ablate.py` cannot, and write their reports: `python -m studies.train FOLDER`, with its plan.toml.

Where arms have `init_from`, trained models are converted (`convert`). Else all seeds train as one stack on a GPU
(`many_seeds`).
"""

from pathlib import Path

import tyro

from ablation import report, study
from ablation.plan import load_plan
from ablation.records import append_rows, read_rows
from errors import exit_on_user_error, printable
from files import locked
from studies import convert, many_seeds


def main(folder: tyro.conf.Positional[Path], device: str = "auto") -> None:
    """Add the runs that a study lacks to runs.jsonl, as soon as they are there, and write its report."""
    plan = load_plan(folder / "plan.toml")
    with locked(folder):
        converts = any("init_from" in arm.settings for arm in plan.all_arms.values())
        for rows in (convert if converts else many_seeds).train(plan, read_rows(folder), device):
            append_rows(folder, *rows)
        finished = study.load(folder)
        path = report.write(finished, folder)
    print(*report.headline(finished), printable(f"report: {path}"), sep="\n")


if __name__ == "__main__":
    with exit_on_user_error():
        tyro.cli(main, prog="python -m studies.train")
