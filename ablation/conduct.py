"""Carry out a plan: run by run, as many at once as there are devices, and everything finished in results.json.

The file is written after every run. A later start reads it, leaves finished runs alone, goes on with those that were
cut, and refuses to mix what cannot be compared: another text, other settings of the same run.
"""

import dataclasses
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import kernels
from ablation import demonstrations, report, speed, summary, switch
from ablation.claims import claims
from ablation.plan import Plan, Run, arms_of, baseline_of, final_runs, rate_runs, settings_from, settings_of
from ablation.processes import in_processes
from errors import UserError
from model.config import num_parameters
from model.device import choose_device, choose_kernels, choose_training_dtype, device_name, processor
from training.checkpoint import settings_hash
from training.settings import Settings, replace_text


@dataclass
class Conduct:
    """A plan on its way."""

    plan: Plan
    folder: Path
    device: str
    jobs: int
    results: dict

    @property
    def rows(self) -> list[dict]:
        """Finished runs."""
        return self.results["runs"]

    def save(self) -> None:
        """Write results.json, whole or not at all."""
        replace_text(self.folder / "results.json", json.dumps(finite(self.results)) + "\n")


def finite(value):
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def begin(plan: Plan, folder: Path, device: str, jobs: int | None) -> Conduct:
    """Read what is finished, or start anew."""
    path = folder / "results.json"
    results = {"plan": asdict(plan), "runs": [], "switched": []}
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; give a folder.")
    if path.exists():
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            before, _, _ = dict(results["plan"]), list(results["runs"]), list(results["switched"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not readable ({error!r}); mend or move it away.") from None
        now = json.loads(json.dumps(asdict(plan)))
        changed = [key for key in ("config", "steps", "bound") if before.get(key) != now[key]]
        if changed:
            raise UserError(f"{path} holds results with another {', '.join(changed)}; give another --out.")
        results["plan"] = asdict(plan)
    chosen = choose_device(device)
    choose_kernels("auto", chosen)
    if jobs is None:
        several = torch.cuda.device_count() if device == "auto" else 1
        jobs = os.cpu_count() or 1 if chosen.type == "cpu" else max(several, 1)
    if jobs < 1:
        raise UserError(f"--jobs is {jobs} and must be at least 1.")
    return Conduct(plan, folder, device, jobs, results)


def execute(conduct: Conduct, command: str) -> bool:
    """Everything that is still to do; False when a signal stopped it. Writes the report after each part."""
    plan = conduct.plan
    default = settings_from(plan.config).optimizer.learning_rate
    describe(conduct, command)
    conduct.folder.mkdir(parents=True, exist_ok=True)
    parts: list[Callable[[], Iterable]] = []
    if len(plan.learning_rates) > 1:
        parts.append(lambda: rate_runs(plan))
    parts.append(lambda: final_runs(plan, summary.chosen_rates(plan, conduct.rows, default)))
    whole = True
    planned = len(arms_of(plan)) * (
        plan.seeds + plan.rate_seeds * len(plan.learning_rates) * (len(plan.learning_rates) > 1)
    )
    with tqdm(total=planned, unit="run", dynamic_ncols=True) as bar:
        for part in parts:
            whole = train_all(conduct, list(part()), bar)
            summarize(conduct)
            if not whole:
                break
    if whole and plan.switch:
        whole = switch_all(conduct)
    if whole and plan.speed and not conduct.results.get("speed"):
        print("timing both norms in interleaved blocks ...", flush=True)
        arm = arms_of(plan)[0]
        settings = settings_of(plan, Run(arm, "final", 1, default))
        conduct.results |= speed.measure(settings, choose_device(conduct.device), blocks=30)
    summarize(conduct)
    return whole


def describe(conduct: Conduct, command: str) -> None:
    """Write down where and how this is made."""
    plan, device = conduct.plan, choose_device(conduct.device)
    settings = settings_of(plan, Run(arms_of(plan)[0], "final", 1, 1e-3))
    config, data = settings.model, settings.data
    tokens = settings.optimizer.steps * data.batch_size * data.sequence_length
    before = conduct.results.get("machine")
    conduct.results |= {
        "name": plan.name,
        "command": command,
        "bound": plan.bound,
        "metric": "validation loss, nats per token",
        "baseline": next((arm.label for arm in arms_of(plan) if baseline_of(arm, arms_of(plan)) is None), None),
        "machine": {
            "device": device_name(device),
            "processor": processor(),
            "processes": conduct.jobs,
            "threads": threads(conduct, device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "kernels": kernels.describe(device),
            "dtype": str(choose_training_dtype(plan.dtypes[0], device)).removeprefix("torch."),
        },
        "shape": {
            "parameters": num_parameters(config),
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "steps": settings.optimizer.steps,
            "tokens": tokens,
        },
    }
    now = conduct.results["machine"]
    changed = [key for key in ("processor", "torch", "kernels", "dtype") if before and before[key] != now[key]]
    if conduct.rows and changed:
        words = "; ".join(f"{key} {before[key]} then, {now[key]} now" for key in changed)
        raise UserError(f"these results are of another machine ({words}); give another --out.")


def threads(conduct: Conduct, device: torch.device) -> int | None:
    """Threads of each process: the cores are shared out, since runs side by side waste less than threads that wait."""
    return max(1, (os.cpu_count() or 1) // conduct.jobs) if device.type == "cpu" else None


def train_all(conduct: Conduct, runs: list[Run], bar: tqdm) -> bool:
    """Train what is not finished, several at once; False when a signal stopped it."""
    todo, device = [], choose_device(conduct.device)
    for run in runs:
        settings = settings_of(conduct.plan, run)
        row = next((row for row in conduct.rows if row["key"] == run.key), None)
        if row is None:
            todo.append((run, settings))
            continue
        if row["settings_hash"] != settings_hash(settings):
            raise UserError(f"the finished run {run.key} had other settings; give another --out.")
        bar.update()

    def finish(task: tuple[Run, Settings], row: dict) -> None:
        run, settings = task
        text = row.pop("text")
        if conduct.results.setdefault("text", text) != text:
            raise UserError(
                f"the text has changed (hash {conduct.results['text']['hash']} then, {text['hash']} now), and losses "
                f"on different texts cannot be compared; give another --out."
            )
        known = {"key": run.key, "arm": run.arm.label, "purpose": run.purpose, "seed": run.seed}
        known |= {"learning_rate": run.learning_rate, "settings_hash": settings_hash(settings)}
        conduct.rows.append(known | row)
        conduct.save()
        if not kept(conduct.plan, run):
            shutil.rmtree(conduct.folder / "runs" / run.key, ignore_errors=True)  # all its numbers are in the file
        bar.set_postfix_str(f"{run.key}: {row['validation_loss'] or float('nan'):.4f}")
        bar.update()

    def start(task: tuple[Run, Settings], name: str) -> tuple:
        run, settings = task
        settings = dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, device=name))
        return settings, conduct.folder / "runs" / run.key, threads(conduct, device), kept(conduct.plan, run)

    names = [conduct.device] * conduct.jobs
    if device.type == "cuda" and conduct.device == "auto":
        names = [f"cuda:{number % torch.cuda.device_count()}" for number in range(conduct.jobs)]
    return in_processes(names, todo, start, finish)


def kept(plan: Plan, run: Run) -> bool:
    """Whether the weights of a run are needed afterwards."""
    return plan.switch and run.arm.norm == "layer" and run.purpose == "final"


def switch_all(conduct: Conduct) -> bool:
    """Switch every finished LayerNorm run in every way."""
    plan, device = conduct.plan, choose_device(conduct.device)
    done = {(row["variant"], row["seed"]) for row in conduct.results["switched"]}
    layer = next(arm for arm in arms_of(plan) if arm.norm == "layer")
    bases = [row for row in summary.rows_of(conduct.rows, layer, "final") if row["status"] == "done"]
    todo = [(row, variant) for row in bases for variant in switch.VARIANTS if (variant, row["seed"]) not in done]
    for row, variant in tqdm(todo, unit="switch", dynamic_ncols=True):
        run = Run(layer, "final", row["seed"], row["learning_rate"])
        folder = conduct.folder / "runs" / run.key
        if not (folder / "last").exists():
            print(f"{folder} has no weights any more: {variant} of seed {run.seed} is left out")
            continue
        name = conduct.folder / "runs" / f"switch-{variant.replace(', ', '-').replace(' ', '-')}-{run.seed}"
        settings = settings_of(plan, run)
        found = switch.carry_out(settings, switch.base_of(folder), name, variant, threads(conduct, device))
        if found is None:
            return False
        found.pop("text", None)
        before = {"seed": run.seed, "before": row["validation_loss"]}
        conduct.results["switched"].append(
            before | {key: found[key] for key in ("variant", "steps", "status", "validation_loss")}
        )
        conduct.save()
        shutil.rmtree(name, ignore_errors=True)
    return True


def summarize(conduct: Conduct) -> None:
    """Work out everything that follows from the rows, and write results.json and both reports."""
    plan, results = conduct.plan, conduct.results
    configs = {arm.label: settings_of(plan, Run(arm, "final", 1, 1e-3)).model for arm in arms_of(plan)}
    default = settings_from(plan.config).optimizer.learning_rate
    rates = summary.chosen_rates(plan, conduct.rows, default)
    results["hours"] = sum(row["seconds"] for row in conduct.rows) / 3600
    results["arms"] = summary.arms(plan, conduct.rows, rates, configs)
    results["comparisons"] = summary.comparisons(plan, conduct.rows, rates)
    results["valleys"] = summary.valleys(plan, conduct.rows)
    results["demonstrations"] = demonstrations.all_of_them()
    results["claims"] = claims(results)
    results["notes"] = notes(results)
    conduct.save()
    report.write(finite(results), conduct.folder)


def notes(results: dict) -> list[str]:
    """What a reader should not conclude."""
    shape = results["shape"]
    return [
        f"One model size ({shape['parameters'] / 1e6:.2f}M parameters), one text and {shape['tokens']:,} tokens a run: "
        f"nothing here says what happens at other scales or after much longer training.",
        "Losses are of a held-out part of the same kind of text; they say nothing about other tasks.",
        "Times hold for this machine, these sizes and these builds.",
        "Rates were chosen from a few values on few seeds; an arm whose valley has its lowest point at the edge may do "
        "better outside it."
        if results["valleys"]
        else "All arms ran at one learning rate, which was chosen for none of them.",
    ]


def headline(results: dict) -> str:
    """The answer in a sentence, for the terminal."""
    found = next(iter(results["comparisons"]), None)
    if found is None:
        return "no comparison is finished yet"
    low, high = found["interval"]
    return (
        f"{found['arm']} minus {found['baseline']}: {found['mean']:+.4f} nats per token [{low:+.4f}, {high:+.4f}], "
        f"{found['n']} pairs: {found['verdict']}"
    )


def go_on(conduct: Conduct) -> None:
    """Say how a stopped comparison is gone on with."""
    print(f"stopped; {len(conduct.rows)} runs are finished and kept. Go on with the same command.", file=sys.stderr)
