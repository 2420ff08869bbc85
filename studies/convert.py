"""What a trained LayerNorm model loses when it becomes an RMSNorm model: `python -m studies.convert FOLDER`.

FOLDER has a copy of a study's plan.toml. In each seed, `init_from` says what the model of an arm starts from:

    nothing      random weights
    "layer"      the trained model of the arm `layer`, converted; if the arm has steps, it trains on other batches
    "quarter 2"  a run of the first kind after two quarters of its steps, converted; it continues with the same batches

Measured is the loss at the end. With ", centered" behind it, the weights that write to the stream are centered whatever
the norm. With bias and centered weights nothing is lost, unless the embedding is tied to the head.
"""

if __name__ == "__main__":
    from errors import run_main

    run_main("studies.convert")

import contextlib
import dataclasses
import tempfile
from pathlib import Path

import tyro
from tqdm import tqdm

from ablation import report, study
from ablation.plan import Plan, Run, load_plan, replace_settings, run_settings
from ablation.records import Row, append_rows, read_rows
from ablation.run import make_row
from errors import printable
from files import locked
from model.decoder import center_residual_writers
from training.checkpoint import load_moments, read_state
from training.loop import save, train_steps
from training.session import Session, set_up

SEED_OFFSET = 5000  # added for converted models that train again: their batches differ from those of the run
QUARTERS = {f"quarter {number}": number for number in (1, 2, 3)}
CENTERED = ", centered"  # behind any of them


def train_models(plan: Plan, seed: int, device: str, folder: Path) -> list[Row]:
    """The rows of a seed's models, arm by arm. `folder` gets the checkpoints that later arms start from."""
    origins = {name: arm.changes.get("init_from", "") for name, arm in plan.all_arms.items()}
    starts = {name: origin.removesuffix(CENTERED) for name, origin in origins.items()}
    quarters = [quarter for quarter in QUARTERS if quarter in starts.values()]
    rows = []  # without a hash of settings, as ablate.py cannot make them again
    for name, start in starts.items():
        run = Run(name, "final", seed, plan.candidate_learning_rates[name][0])
        last = folder / start / "last"
        changes = {"device": device}
        if start:
            changes["init_from"] = str(last)
        if start and start not in QUARTERS:
            changes["seed"] = seed + SEED_OFFSET
        with contextlib.redirect_stdout(None):
            session = set_up(replace_settings(run_settings(plan, run), changes), folder, resume=False)
        if origins[name].endswith(CENTERED):
            center_residual_writers(session.model)
        if not start:
            rows.append(train_with_saves(session, run, quarters, folder))
        elif start in QUARTERS:  # converted in the middle of that run: the rest of its steps
            load_moments(last, session.model, session.optimizer)
            session.state = dataclasses.replace(read_state(last), seconds=0.0)
            rows.append(make_row(session, run))
        else:  # converted at the end: as it is, or after the steps of the arm
            row = make_row(session, run, train="steps" in plan.all_arms[name].changes)
            rows.append(dataclasses.replace(row, batches_hash=""))
    return rows


def train_with_saves(session: Session, run: Run, quarters: list[str], folder: Path) -> Row:
    """The row of a run, with a checkpoint after each of these quarters, that others start from, and at the end."""
    for quarter in quarters:
        end = QUARTERS[quarter] * session.steps // 4
        next(result for result in train_steps(session) if result.step == end)
        save(dataclasses.replace(session, run_dir=folder / quarter))
    row = make_row(session, run)
    save(dataclasses.replace(session, run_dir=folder / run.arm))
    return row


def main(folder: tyro.conf.Positional[Path], device: str = "auto") -> None:
    """Train and convert the models of all seeds without runs: each seed's rows are added to runs.jsonl. Then report."""
    plan = load_plan(folder / "plan.toml")
    with locked(folder):
        seeds = {*plan.phase_seeds["final"]} - {row.seed for row in read_rows(folder)}
        for seed in tqdm(sorted(seeds), unit="model", disable=None):
            with tempfile.TemporaryDirectory() as checkpoints:
                append_rows(folder, *train_models(plan, seed, device, Path(checkpoints)))
        finished = study.load(folder)
        path = report.write(finished, folder)
    print(*report.headline(finished), printable(f"report: {path}"), sep="\n")
