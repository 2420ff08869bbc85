"""From a plan and its finished runs: which runs are still wanted, and what the finished ones show. Imports no torch.

The seed is the unit: runs of one seed that differ in another choice are averaged before they are counted.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ablation.plan import MAX_SEEDS, Arm, Plan, Run, load_plan
from ablation.records import Row, read_rows
from ablation.stats import Comparison, Effect, equivalence_p, final_pairs, holm, mean_effect
from errors import UserError

KEY = [field.name for field in dataclasses.fields(Run)]  # the columns that make a row that of one particular run


@dataclass(frozen=True)
class Study:
    """A plan and its rows (see `as_table`); all conclusions are properties."""

    plan: Plan
    rows: pd.DataFrame

    @property
    def arms(self) -> dict[str, Arm]:
        return self.plan.compared

    def missing(self, runs: list[Run]) -> list[Run]:
        """The runs that have not ended, well or not."""
        ended = set(self.rows[KEY].itertuples(index=False, name=None))
        return [run for run in runs if dataclasses.astuple(run) not in ended]

    def runs(self, phase: str, seeds: Sequence[int], rates: dict | None = None, changes: tuple = (0.0,)) -> list[Run]:
        """Runs seed by seed. rates: learning rates by arm, by default its own; changes: of the initial weights."""
        rates = {arm: [rate] for arm, rate in self.learning_rates.items()} if rates is None else rates
        choices = itertools.product(seeds, changes, rates)
        return [Run(arm, phase, seed, rate, change) for seed, change, arm in choices for rate in rates[arm]]

    @functools.cached_property
    def rates(self) -> list[float]:
        """Learning rates of the sweep, ascending: those of the plan, and those that it had before it was changed."""
        swept = self.rows[(self.rows.phase == "sweep") & self.rows.arm.isin([*self.arms])]
        return sorted({*self.plan.rates, *swept.learning_rate}) if self.plan.rates else []

    @functools.cached_property
    def sweep(self) -> pd.DataFrame:
        """Mean loss of every swept arm (rows) at every learning rate (columns); NaN: a run diverged, or is missing."""
        arms = [name for name, arm in self.arms.items() if self.plan.fixed_rate(arm) is None]
        seeds = self.plan.phase_seeds["sweep"]
        rows = self.rows[(self.rows.phase == "sweep") & self.rows.seed.isin(seeds)]
        losses = rows.pivot_table(self.measure, ["arm", "learning_rate"], "seed", dropna=False, observed=True)
        complete = losses.reindex(columns=[*seeds]).mean(axis=1, skipna=False)
        return complete.unstack().reindex(index=arms, columns=self.rates)

    @functools.cached_property
    def sweep_runs(self) -> list[Run]:
        return self.runs("sweep", self.plan.phase_seeds["sweep"], dict.fromkeys(self.sweep.index, self.rates))

    @functools.cached_property
    def best_rates(self) -> dict[str, float]:
        """The best learning rate of every swept arm that has one at which no run diverged."""
        return self.sweep.dropna(how="all").idxmin(axis=1).to_dict()

    @functools.cached_property
    def learning_rates(self) -> dict[str, float]:
        """Each arm's learning rate; no entry before the sweep is finished, or if it diverged at every one."""
        fixed = {name: self.plan.fixed_rate(arm) for name, arm in self.arms.items()}
        chosen = {} if self.missing(self.sweep_runs) else self.best_rates
        return {name: rate or chosen[name] for name, rate in fixed.items() if rate is not None or name in chosen}

    @property
    def shares_rate(self) -> bool:
        """Whether arms have a learning rate in common because none was chosen for each."""
        return not self.plan.rates and len({*self.learning_rates.values()}) == 1

    @functools.cached_property
    def pairs(self) -> int | None:
        """Final pairs that the plan or its pilot asks for; None before the pilot has finished."""
        if self.plan.seeds is not None:
            return self.plan.seeds
        if self.missing(self.sweep_runs) or self.missing(self.runs("pilot", self.plan.phase_seeds["pilot"])):
            return None
        compared = [name for name, arm in self.arms.items() if arm.baseline is not None]
        differences = [self.paired("pilot", name).difference.dropna().to_numpy() for name in compared]
        return min(final_pairs([found for found in differences if len(found) > 1], self.plan.margin), MAX_SEEDS)

    @functools.cached_property
    def wanted(self) -> list[Run]:
        """Every run that the plan asks for, as far as that is known; without unfinished seeds beyond its hours."""
        wanted, seeds = self.sweep_runs, self.plan.phase_seeds
        if not self.missing(wanted):
            baselines = {arm: [rate] for arm, rate in self.learning_rates.items() if self.arms[arm].baseline is None}
            again = (seeds["pilot"] or seeds["final"])[: self.plan.rerun_seeds]
            wanted = wanted + self.runs("pilot", seeds["pilot"])
            wanted += self.runs("rerun", again, baselines, self.plan.perturbations)
            wanted += self.runs("final", seeds["final"][: self.pairs or 0])
        hours = self.rows[["seconds", "all_seconds"]].max(axis=1) / self.rows.workers / 3600
        end, chosen = hours.sum(), []
        for _, of_seed in itertools.groupby(wanted, lambda run: (run.phase, run.seed)):
            runs = [*of_seed]
            missing = self.missing(runs)
            end += len(missing) * hours.mean() if len(hours) else 0.0
            if not missing or end <= self.plan.hours:
                chosen += runs
        return chosen

    @property
    def remaining(self) -> list[Run]:
        """The runs that are wanted and have not ended."""
        return self.missing(self.wanted)

    @functools.cached_property
    def final_seeds(self) -> set[int]:
        """The seeds that count: none before all final runs are there, since stopping at a good moment is a bias."""
        final = [run for run in self.wanted if run.phase == "final"]
        return set() if self.pairs is None or self.missing(final) else {run.seed for run in final}

    def of(self, phase: str, arm: str) -> pd.DataFrame:
        """The rows of an arm in a phase by seed, in a sweep at all learning rates, else at its own."""
        rates = self.rates if phase == "sweep" else [self.learning_rates.get(arm)]
        rows = self.rows[(self.rows.phase == phase) & (self.rows.arm == arm) & self.rows.learning_rate.isin(rates)]
        return rows[rows.seed.isin(self.plan.phase_seeds[phase])].sort_values("seed")

    def final(self, arm: str) -> pd.DataFrame:
        """The final rows of an arm that count, by seed."""
        rows = self.of("final", arm)
        return rows[rows.seed.isin(self.final_seeds)]

    def paired(self, phase: str, arm: str) -> pd.DataFrame:
        """Rows of an arm beside those of its baseline with equal seed and device, and the `difference` in loss."""
        rows = self.final if phase == "final" else functools.partial(self.of, phase)
        both = rows(arm).merge(rows(self.arms[arm].baseline), on=["seed", "device"], suffixes=("", "_base"))
        return both.assign(difference=both[self.measure] - both[f"{self.measure}_base"])

    @functools.cached_property
    def measure(self) -> str:
        """The column of losses; in bits where arms of a seed have other batches: another length or tokenizer."""
        trained = self.rows[(self.rows.batches_hash != "") & (self.rows.status == "completed")]  # others were converted
        batches = trained.groupby(["phase", "seed"]).batches_hash.nunique()
        return "bits_per_byte" if (batches > 1).any() else "loss"

    @property
    def unit(self) -> str:
        return "nats per token" if self.measure == "loss" else "bits per byte"

    def mean_loss(self, name: str, weights: dict[str, float]) -> Effect | None:
        """Mean over the final seeds of a weighted sum of the losses of arms; None where a run of them is missing."""
        losses = pd.concat({arm: self.final(arm).set_index("seed")[self.measure] for arm in weights}, axis=1)
        if not len(losses) or losses.isna().any(axis=None):
            return None
        return mean_effect(name, losses @ np.array([*weights.values()]), self.unit)

    @property
    def spread(self) -> pd.DataFrame:
        """How far runs of a baseline from changed initial weights end from those that they repeat, nats per token."""
        same, again = ["arm", "learning_rate", "seed", "device"], self.rows.phase == "rerun"
        first = self.rows[~again].drop_duplicates(same)[[*same, "loss"]]
        both = self.rows[again].merge(first, on=same, suffixes=("", "_before"))
        groups = (both.loss - both.loss_before).pow(2).groupby([both.arm, both.learning_rate, both.perturbation])
        root = ("root mean square difference", lambda squares: squares.mean(skipna=False) ** 0.5)
        return groups.agg([root, ("runs", "size")])

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """Every arm with its baseline, in order of the difference, where all their final runs completed."""
        margin, bases = self.plan.margin, {name: arm.baseline for name, arm in self.arms.items() if arm.baseline}
        pairs = {arm: self.paired("final", arm).difference.to_numpy() for arm in bases}
        pairs = {arm: values for arm, values in pairs.items() if len(values) > 1 and np.isfinite(values).all()}
        effects = {arm: mean_effect(f"{arm} minus {bases[arm]}", values, self.unit) for arm, values in pairs.items()}
        different = holm([effect.p for effect in effects.values()])
        # A family of its own, since an arm cannot pass the tests of a difference and of equivalence both wrongly.
        equivalent = holm([equivalence_p(values, margin) for values in pairs.values()])
        compared = [
            Comparison(arm, bases[arm], pairs[arm].tolist(), effects[arm], margin, p, q, len(pairs))
            for arm, p, q in zip(pairs, different, equivalent, strict=True)
        ]
        return sorted(compared, key=lambda comparison: comparison.effect.estimate)

    @functools.cached_property
    def effects(self) -> list[Effect]:
        """A grid's main effects against the first value of a setting, means over all others, and interactions."""
        grid = {name: [self.plan.value(arm, name) for arm in self.arms.values()] for name in self.plan.varied}
        if len(grid) < 2 or len(self.arms) != math.prod(len({*values}) for values in grid.values()):
            return []
        levels = [(name, value) for name, of in grid.items() for value in dict.fromkeys(of) if value != of[0]]
        pairs = [pair for pair in itertools.combinations(levels, 2) if pair[0][0] != pair[1][0]]
        found = []
        for choice in [*itertools.combinations(levels, 1), *pairs]:
            title = " x ".join(f"{name}: {value} minus {grid[name][0]}" for name, value in choice)
            signs = np.ones(len(self.arms))
            for name, value in choice:
                sign = {value: 1, grid[name][0]: -1}
                signs *= [sign.get(of, 0) for of in grid[name]]
            weights = signs * 2 ** (len(choice) - 1) / (signs > 0).sum()  # as many arms are positive as negative
            found.append(self.mean_loss(title, dict(zip(self.arms, weights, strict=True))))
        return [effect for effect in found if effect is not None]


def as_table(rows: list[Row]) -> pd.DataFrame:
    """One row for each run, with the fields of `Row` as columns: of rows of the same run the last."""
    fields = dataclasses.fields(Row)
    numbers = [field.name for field in fields if field.type in (float, float | None)]
    table = pd.DataFrame(rows, columns=[field.name for field in fields]).astype(dict.fromkeys(numbers, float))
    return table.drop_duplicates(KEY, keep="last", ignore_index=True)


def load(folder: Path) -> Study:
    """The study of a folder of results."""
    if not (folder / "plan.toml").is_file() or not (folder / "runs.jsonl").is_file():
        raise UserError(f"{folder} has no plan.toml and runs.jsonl; give the folder of a comparison.")
    return Study(load_plan(folder / "plan.toml"), as_table(read_rows(folder)))
