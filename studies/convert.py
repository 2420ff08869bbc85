"""What a trained LayerNorm model loses when it becomes an RMSNorm model: `python -m studies.convert FOLDER`.

FOLDER has a copy of a study's plan.toml. An arm with `init_from = "layer"` is the trained model of the arm `layer`,
converted; if it has steps, it trains again, on other batches. With `init_from = "quarter 2"` it is converted after two
quarters of the steps, and continues the run with the same batches and moments; `init_from = "quarter 2, centered"` also
centers the weights that write to the stream, whatever the norm. With bias and centered weights nothing is lost, unless
the embedding is tied to the head.
"""

import contextlib
import dataclasses
import tempfile
from pathlib import Path

import tyro
from tqdm import tqdm

from ablation import report, study
from ablation.plan import Plan, Run, load_plan, replace_settings, run_settings
from ablation.records import Row, append_rows, read_rows
from ablation.run import measure
from errors import exit_on_user_error, printable
from files import locked
from flags import call_with_flags
from model.decoder import center_residual_writers
from training.checkpoint import load_moments, read_state
from training.loop import save, train_steps
from training.session import set_up

SEED_OFFSET = 5000  # added for converted models that train again: their batches differ from those of the run


def train_models(plan: Plan, seed: int, device: str, folder: Path) -> list[Row]:
    """Train the models of a seed, with checkpoints in `folder`: those that others start from, then those others."""
    origins = {arm.name: arm.settings.get("init_from", "").partition(", centered") for arm in plan.all_arms.values()}
    starts = {start for start, *_ in origins.values()}
    rows = []
    for arm in plan.all_arms.values():
        start, centered, _ = origins[arm.name]
        run = Run(arm.name, "final", seed, plan.candidate_learning_rates[arm.name][0])
        is_branch = start.startswith("quarter")
        is_converted = start != "" and not is_branch
        changes = {"device": device, "seed": seed + SEED_OFFSET if is_converted else seed}
        if start:
            changes["init_from"] = str(folder / start / "last")
        with contextlib.redirect_stdout(None):
            session = set_up(replace_settings(run_settings(plan, run), changes), folder, resume=False)
        if centered:
            center_residual_writers(session.model)
        if is_branch:
            load_moments(folder / start / "last", session.model, session.optimizer)
            session.state = dataclasses.replace(read_state(folder / start / "last"), seconds=0.0)
        for quarter in (1, 2, 3):
            if not start and f"quarter {quarter}" in starts:
                next(result for result in train_steps(session) if result.step == quarter * session.steps // 4)
                save(dataclasses.replace(session, run_dir=folder / f"quarter {quarter}"))
        # No settings hash: these rows cannot be made again by ablate.py.
        row = measure(session, run, "", 1, train=not is_converted or "steps" in arm.settings)
        rows.append(dataclasses.replace(row, batches_hash="") if is_converted else row)
        if not start:
            save(dataclasses.replace(session, run_dir=folder / arm.name))
    return rows


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


if __name__ == "__main__":
    with exit_on_user_error():
        call_with_flags(main, prog="python -m studies.convert")
