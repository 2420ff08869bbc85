"""From a plan and its finished runs: which runs are still wanted, and what the finished ones show.

The seed is the unit: runs of one seed that differ in another choice are averaged before they are counted. Nothing is
trained here, and no torch imported.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd

from ablation.plan import MAX_SEEDS, Arm, Plan, Run, load_plan
from ablation.records import Row, read_rows
from ablation.stats import Comparison, Effect, equivalence_p, final_pairs, holm, mean_effect
from errors import UserError

KEY = [field.name for field in dataclasses.fields(Run)]  # the columns that make a row that of one particular run
RERUNS = (1e-6, 0.05)  # relative changes of the initial weights: rounding, and a change that means nothing


@dataclass(frozen=True)
class Study:
    """A plan and its rows (see `as_table`); all conclusions are properties."""

    plan: Plan
    rows: pd.DataFrame

    @property
    def arms(self) -> dict[str, Arm]:
        return self.plan.compared

    # Which runs.

    def missing(self, runs: list[Run]) -> list[Run]:
        """Those that have not ended, well or not."""
        ended = set(self.rows[KEY].itertuples(index=False, name=None))
        return [run for run in runs if dataclasses.astuple(run) not in ended]

    def runs(
        self,
        phase: str,
        rates: dict[str, Sequence[float]] | None = None,
        seeds: Sequence[int] | None = None,
        perturbations: Sequence[float] = (0.0,),
    ) -> list[Run]:
        """Runs seed by seed; without `rates` of every arm that has a learning rate, without `seeds` of all of them."""
        rates = {arm: [rate] for arm, rate in self.learning_rates.items()} if rates is None else rates
        seeds = self.plan.phase_seeds[phase] if seeds is None else seeds
        choices = itertools.product(seeds, perturbations, rates)
        return [Run(arm, phase, seed, rate, size) for seed, size, arm in choices for rate in rates[arm]]

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
        return self.runs("sweep", dict.fromkeys(self.sweep.index, self.rates))

    @functools.cached_property
    def best_rates(self) -> dict[str, float]:
        """Of every arm that is swept and has a learning rate at which no run diverged, the best."""
        return self.sweep.dropna(how="all").idxmin(axis=1).to_dict()

    @functools.cached_property
    def at_edge(self) -> set[str]:
        """Arms that are best at the lowest or highest learning rate of the sweep."""
        return {arm for arm, rate in self.best_rates.items() if rate in (self.rates[0], self.rates[-1])}

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
        if self.missing(self.sweep_runs) or self.missing(self.runs("pilot")):
            return None
        compared = [name for name, arm in self.arms.items() if arm.baseline is not None]
        differences = [self.paired("pilot", name).difference.dropna().to_numpy() for name in compared]
        return min(final_pairs([found for found in differences if len(found) > 1], self.plan.margin), MAX_SEEDS)

    @functools.cached_property
    def wanted(self) -> list[Run]:
        """Every run that the plan asks for, as far as the finished ones determine it, in order.

        Seeds that are not finished and do not fit into the hours of the plan are left out.
        """
        wanted, seeds = self.sweep_runs, self.plan.phase_seeds
        if not self.missing(wanted):
            baselines = {arm: [rate] for arm, rate in self.learning_rates.items() if self.arms[arm].baseline is None}
            again = (seeds["pilot"] or seeds["final"])[: self.plan.rerun_seeds]
            wanted = [*wanted, *self.runs("pilot"), *self.runs("rerun", baselines, again, RERUNS)]
            wanted += self.runs("final", seeds=seeds["final"][: self.pairs or 0])
        hours = self.rows.seconds / self.rows.workers / 3600
        left, each, chosen = self.plan.hours - hours.sum(), hours.mean() if len(hours) else 0.0, []
        for _, of_seed in itertools.groupby(wanted, attrgetter("phase", "seed")):
            runs = [*of_seed]
            missing = len(self.missing(runs))
            left -= each * missing
            chosen += runs if not missing or left >= 0 else []
        return chosen

    @functools.cached_property
    def final_seeds(self) -> set[int]:
        """The seeds of the final runs that count: none before all wanted ones are there, since who sees results earlier
        may stop at one that he likes.
        """
        final = [run for run in self.wanted if run.phase == "final"]
        return set() if self.pairs is None or self.missing(final) else {run.seed for run in final}

    # What they show.

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
        """The rows of an arm, those of its baseline with the same seed and device beside them as `NAME_base`, and the
        `difference` of their losses in `unit`; NaN: one of the two did not complete.
        """
        rows = self.final if phase == "final" else functools.partial(self.of, phase)
        both = rows(arm).merge(rows(self.arms[arm].baseline), on=["seed", "device"], suffixes=("", "_base"))
        return both.assign(difference=both[self.measure] - both[f"{self.measure}_base"])

    @functools.cached_property
    def trained(self) -> pd.DataFrame:
        """The completed rows of models that were trained; those that were only converted have no batches."""
        return self.rows[(self.rows.batches_hash != "") & (self.rows.status == "completed")]

    @functools.cached_property
    def measure(self) -> str:
        """The column of losses; in bits where arms of a seed have other batches: another length or tokenizer."""
        batches = self.trained.groupby(["phase", "seed"]).batches_hash.nunique()
        return "bits_per_byte" if (batches > 1).any() else "loss"

    @property
    def unit(self) -> str:
        return "nats per token" if self.measure == "loss" else "bits per byte"

    def mean_loss(self, name: str, weights: dict[str, float]) -> Effect | None:
        """Mean over the final seeds of a weighted sum of the losses of arms; None where a run of them did not complete,
        and before the final runs are there.
        """
        losses = pd.concat({arm: self.final(arm).set_index("seed")[self.measure] for arm in weights}, axis=1)
        if not len(losses) or losses.isna().any(axis=None):
            return None
        return mean_effect(name, losses @ np.array([*weights.values()]), self.unit)

    def warning(self, arm: str) -> str | None:
        """Why another learning rate may suit an arm better: its own is at the edge of the sweep, or the sweep's few
        seeds misled, since another one's mean there is below the 95% interval of the final loss.
        """
        rate, loss = self.best_rates.get(arm), self.mean_loss(arm, {arm: 1.0})
        if arm in self.at_edge:
            return f"its learning rate, {rate:g}, is at the edge of the sweep"
        others = self.sweep.loc[arm].drop(rate) if rate else pd.Series(dtype=float)
        if loss is None or not others.min() < loss.interval[0]:
            return None
        return f"not well tuned: at {others.idxmin():g} the sweep ended lower than these runs at {rate:g}"

    @property
    def spread(self) -> pd.DataFrame:
        """How far runs of a baseline from changed initial weights end from those that they repeat, nats per token."""
        same = ["arm", "learning_rate", "seed", "device"]
        first = self.rows[self.rows.phase != "rerun"].drop_duplicates(same)[[*same, "loss"]]
        both = self.rows[self.rows.phase == "rerun"].merge(first, on=same, suffixes=("", "_before"))
        groups = (both.loss - both.loss_before).pow(2).groupby([both.arm, both.learning_rate, both.perturbation])
        root = ("root mean square difference", lambda squares: squares.mean(skipna=False) ** 0.5)
        return groups.agg([root, ("runs", "size")])

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """Every arm with its baseline, in order of the difference, Holm-adjusted.

        Tests of a difference and tests of equivalence are two families: an arm cannot pass both wrongly. Absent are
        arms with a run that did not complete, and all of them before the final runs are there.
        """
        margin, found = self.plan.margin, []
        for arm, base in ((name, arm.baseline) for name, arm in self.arms.items() if arm.baseline is not None):
            differences = self.paired("final", arm).difference.to_numpy()
            if len(differences) > 1 and np.isfinite(differences).all():
                found.append((arm, base, differences, mean_effect(f"{arm} minus {base}", differences, self.unit)))
        found.sort(key=lambda each: each[-1].estimate)
        different = holm([effect.p for *_, effect in found])
        equivalent = holm([equivalence_p(differences, margin) for *_, differences, _ in found])
        return [
            Comparison(arm, base, differences.tolist(), effect, margin, p, q, len(found))
            for (arm, base, differences, effect), p, q in zip(found, different, equivalent, strict=True)
        ]

    @functools.cached_property
    def effects(self) -> list[Effect]:
        """Of a grid of two settings or more: each setting's main effects, and the interactions of each two.

        Against the setting's first value, averaged over all other settings within a seed.
        """
        grid = {name: [self.plan.value(arm, name) for arm in self.arms.values()] for name in self.plan.varied}
        if len(grid) < 2 or len(self.arms) != math.prod(len({*values}) for values in grid.values()):
            return []
        levels = [(name, value) for name, of in grid.items() for value in dict.fromkeys(of) if value != of[0]]
        pairs = [pair for pair in itertools.combinations(levels, 2) if pair[0][0] != pair[1][0]]
        found = []
        for choice in [*((level,) for level in levels), *pairs]:
            title = " x ".join(f"{name}: {value} minus {grid[name][0]}" for name, value in choice)
            signs = math.prod(np.array([(v == value) - (v == grid[n][0]) for v in grid[n]]) for n, value in choice)
            weights = signs * 2 ** (len(choice) - 1) / (signs > 0).sum()  # of the arms; the positive ones are as many
            found.append(self.mean_loss(title, dict(zip(self.arms, weights, strict=True))))
        return [effect for effect in found if effect is not None]


def as_table(rows: list[dict]) -> pd.DataFrame:
    """One row for each run, with the fields of `Row` as columns: of rows of the same run the last."""
    fields = dataclasses.fields(Row)
    numbers = [field.name for field in fields if field.type in (float, float | None)]
    table = pd.DataFrame(rows, columns=[field.name for field in fields]).astype(dict.fromkeys(numbers, float))
    return table.drop_duplicates(KEY, keep="last", ignore_index=True)


def load(folder: Path) -> Study:
    """The study of a folder of results."""
    if not (folder / "plan.toml").is_file() or not (folder / "runs.jsonl").is_file():
        raise UserError(f"{folder} has no plan.toml and runs.jsonl; give the folder of a comparison.")
    return Study(load_plan(str(folder / "plan.toml")), as_table(read_rows(folder / "runs.jsonl")))
