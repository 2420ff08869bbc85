"""What a trained LayerNorm model loses when it becomes an RMSNorm model, as a folder for `python ablate.py --report`.

With bias and centered weights nothing is lost, unless the embedding is tied to the head. The control keeps LayerNorm.
With --branches, models are converted partway, and their training continues with the same batches and moments.
"""

import dataclasses
import itertools
import tempfile
from pathlib import Path

import tyro
from tqdm import tqdm

from ablation import report, study
from ablation.plan import Plan, Run, base_settings, load_plan, replace_settings, run_settings, save_plan
from ablation.records import Row, append, read_lines
from ablation.run import measure
from errors import UserError, exit_on_user_error, printable
from files import locked
from training.checkpoint import load_moments
from training.loop import save, train_steps
from training.session import no_log, set_up

LR_MULTIPLIER = 0.25  # of converted models that are trained: the learning rate of their run has already decayed
SEED_OFFSET = 5000  # so that the batches differ from those of the run
QUARTERS = (1, 2, 3)  # of the steps, after which branches begin


def make_plan(config: str, steps: int | None, learning_rate: float | None, **seeds: int) -> Plan:
    """A comparison of every conversion with the LayerNorm models; some train afterwards, for an eighth of the steps."""
    settings = base_settings(config).optimizer
    steps, rate = steps or settings.steps, learning_rate or settings.learning_rate
    after = {"steps": max(steps // 8, 1), "learning_rate": LR_MULTIPLIER * rate}
    layer, rms = ({"norm": norm, "init_from": "layer", "center_weights": False} for norm in ("layer", "rms"))
    arms = {
        "layer": {"norm": "layer"},
        "rms with bias and centered weights at once": rms | {"norm_bias": True, "center_weights": True},
        "rms with bias at once": rms | {"norm_bias": True},
        "rms at once": rms | {"norm_bias": False},
        "layer without bias at once": layer | {"norm_bias": False},
        "rms, norms trained": rms | {"norm_bias": False, "train_only": "norms"} | after,
        "rms, all trained": rms | {"norm_bias": False} | after,
        "layer, all trained": layer | {"norm_bias": True} | after,
    }
    return Plan("conversion", arms, config=config, steps=steps, rerun_seeds=0, learning_rates=(rate,), **seeds)


def make_branch_plan(config: str, steps: int | None, learning_rate: float | None, **seeds: int) -> Plan:
    """A comparison of LayerNorm with models that were converted after a part of the steps; at most a bias is lost."""
    rate, arms = learning_rate or base_settings(config).optimizer.learning_rate, {"layer": {"norm": "layer"}}
    if (steps or base_settings(config).optimizer.steps) < 4:
        raise UserError("--branches divides a run into quarters; give it --steps of at least 4.")
    kinds = {"layer without bias": ("layer", False), "rms with bias": ("rms", True), "rms": ("rms", False)}
    for quarter, (kind, (norm, bias)) in itertools.product(QUARTERS, kinds.items()):
        begin = {"init_from": f"quarter {quarter}", "center_weights": norm == "rms"}
        arms[f"{kind} from {quarter}/4"] = {"norm": norm, "norm_bias": bias} | begin
    return Plan("branches", arms, config=config, steps=steps, rerun_seeds=0, learning_rates=(rate,), **seeds)


def train_models(plan: Plan, seed: int, device: str, folder: Path, branches: bool) -> list[Row]:
    """Train one LayerNorm model in `folder`, and all that start from its weights; `branches`: those of each quarter."""
    rows = []
    for arm in plan.compared.values():
        run, begin = Run(arm.name, "final", seed, plan.fixed_rate(arm)), arm.settings.get("init_from")
        converted = begin is not None and not branches
        changes = {"init_from": str(folder / begin / "last")} if begin else {}
        changes |= {"device": device, "seed": seed + SEED_OFFSET * converted}
        session = set_up(replace_settings(run_settings(plan, run), changes), folder, resume=False, log=no_log)
        if begin and branches:
            before = load_moments(folder / begin / "last", session.model, session.optimizer)
            session.state = dataclasses.replace(before, seconds=0.0)
        for quarter in QUARTERS if branches and not begin else ():
            next(result for result in train_steps(session) if result.step == quarter * session.steps // 4)
            save(dataclasses.replace(session, run_dir=folder / f"quarter {quarter}"))
        row = measure(session, run, "", 1, train=not converted or "steps" in arm.settings)
        rows.append(dataclasses.replace(row, batches_hash="") if converted else row)
        if not begin:
            save(dataclasses.replace(session, run_dir=folder / arm.name))
    return rows


def main(
    out: Path,
    config: str = "ablation",
    steps: int | None = None,
    learning_rate: float | None = None,
    seeds: int = 5,
    first_seed: int = 1,
    device: str = "auto",
    branches: bool = False,
) -> None:
    """Train LayerNorm models and convert each in several ways; at least five can show that a conversion is free."""
    make, file = make_branch_plan if branches else make_plan, out / "runs.jsonl"
    plan = make(config, steps, learning_rate, seeds=seeds, first_seed=first_seed)
    with locked(out):
        if (path := out / "plan.toml").exists() and dataclasses.replace(load_plan(str(path)), seeds=seeds) != plan:
            raise UserError(f"{out} has runs of another plan; give another --out.")
        save_plan(plan, path)
        done = {row.seed for row in read_lines(file, Row)}
        for seed in tqdm(sorted({*plan.phase_seeds["final"]} - done), unit="model", disable=None):
            with tempfile.TemporaryDirectory() as folder:
                append(file, *train_models(plan, seed, device, Path(folder), branches))
        found = study.load(out)
        written = report.write(found, out)
    print(*report.headline(found), printable(f"report: {written[0]}"), sep="\n")


if __name__ == "__main__":
    with exit_on_user_error():
        tyro.cli(main, prog="python -m ablation.convert")
