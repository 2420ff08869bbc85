"""From a plan and its finished runs: which runs are still wanted, and what the finished ones show.

The seed is the unit: runs of one seed that differ in another choice are averaged before they are counted. Nothing is
trained here, and no torch imported.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd

from ablation.plan import MAX_SEEDS, Arm, Plan, Run, load_plan, three_digits
from ablation.records import Row, read_lines
from ablation.stats import Comparison, Effect, equivalence_p, final_pairs, holm, mean_effect
from errors import UserError

MAX_EXTENSIONS = 4  # of a sweep in each direction, beyond the learning rates of its plan
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

    @functools.cached_property
    def finished(self) -> set[tuple]:
        """The keys of the runs that have ended, well or not."""
        return set(self.rows[KEY].itertuples(index=False, name=None))

    # Which runs.

    @functools.cached_property
    def rates(self) -> list[float]:
        """Learning rates of the sweep, ascending: those of the plan, and those by which it was extended."""
        if not self.plan.rates:
            return []
        swept = self.rows[(self.rows.phase == "sweep") & self.rows.arm.isin([*self.arms])]
        return sorted({*self.plan.rates, *swept.learning_rate})

    @functools.cached_property
    def sweep(self) -> pd.DataFrame:
        """Mean loss of the sweep, a row for each arm that is swept and a column for each learning rate.

        NaN: a run diverged, or is missing.
        """
        arms = [name for name, arm in self.arms.items() if self.plan.fixed_rate(arm) is None]
        seeds = self.plan.phase_seeds["sweep"]
        rows = self.rows[(self.rows.phase == "sweep") & self.rows.seed.isin(seeds)]
        losses = rows.pivot_table("loss", ["arm", "learning_rate"], "seed", dropna=False, observed=True)
        complete = losses.reindex(columns=[*seeds]).mean(axis=1, skipna=False)
        return complete.unstack().reindex(index=arms, columns=self.rates)

    @functools.cached_property
    def best_rates(self) -> dict[str, float]:
        """Of every arm that is swept and has a learning rate at which no run diverged, the best."""
        return self.sweep.dropna(how="all").idxmin(axis=1).to_dict()

    @functools.cached_property
    def at_edge(self) -> set[str]:
        """Arms that are best at the lowest or highest learning rate of the sweep."""
        return {arm for arm, rate in self.best_rates.items() if rate in (self.rates[0], self.rates[-1])}

    @functools.cached_property
    def sweep_runs(self) -> list[Run]:
        """All runs of the sweep; when they are finished and an arm is best at an edge, also those beyond the edge."""
        rates, planned = self.rates, self.plan.rates
        runs = self.runs("sweep", dict.fromkeys(self.sweep.index, rates))
        if not self.at_edge or self.missing(runs):
            return runs
        beyond, best = [], {*self.best_rates.values()}
        if rates[0] in best and sum(rate < planned[0] for rate in rates) < MAX_EXTENSIONS:
            beyond = [three_digits(rates[0] ** 2 / rates[1])]
        elif rates[-1] in best and sum(rate > planned[-1] for rate in rates) < MAX_EXTENSIONS:
            beyond = [three_digits(rates[-1] ** 2 / rates[-2])]
        return runs + self.runs("sweep", dict.fromkeys(self.sweep.index, beyond))

    @functools.cached_property
    def learning_rates(self) -> dict[str, float]:
        """Each arm's learning rate; no entry before the sweep is finished, or if it diverged at every one."""
        chosen = {} if self.missing(self.sweep_runs) else self.best_rates
        fixed = {name: self.plan.fixed_rate(arm) for name, arm in self.arms.items()}
        rates = {name: chosen.get(name) if rate is None else rate for name, rate in fixed.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

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
        wanted = self.sweep_runs
        if not self.missing(wanted):
            seeds = self.plan.phase_seeds
            baselines = {arm: [rate] for arm, rate in self.learning_rates.items() if self.arms[arm].baseline is None}
            again = (seeds["pilot"] or seeds["final"])[: self.plan.rerun_seeds]
            wanted = [
                *wanted,
                *self.runs("pilot"),
                *self.runs("rerun", baselines, again, RERUNS),
                *self.runs("final", seeds=seeds["final"][: self.pairs or 0]),
            ]
        hours = self.rows.seconds / self.rows.workers / 3600
        left, each = self.plan.hours - hours.sum(), hours.mean() if len(hours) else 0.0
        chosen = []
        for _, seed in itertools.groupby(wanted, attrgetter("phase", "seed")):
            runs = [*seed]
            missing = len(self.missing(runs))
            left -= each * missing
            chosen += runs if not missing or left >= 0 else []
        return chosen

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

    def missing(self, runs: list[Run]) -> list[Run]:
        return [run for run in runs if dataclasses.astuple(run) not in self.finished]

    @functools.cached_property
    def is_finished(self) -> bool:
        """Whether all wanted final runs are there; only then they count, as in `final`."""
        final = [run for run in self.wanted if run.phase == "final"]
        return bool(final) and self.pairs is not None and not self.missing(final)

    # What they show.

    def of(self, phase: str, arm: str) -> pd.DataFrame:
        """The rows of an arm in a phase, in a sweep at all learning rates, else at its own."""
        rates = self.rates if phase == "sweep" else [self.learning_rates.get(arm)]
        rows = self.rows[(self.rows.phase == phase) & (self.rows.arm == arm) & self.rows.learning_rate.isin(rates)]
        return rows[rows.seed.isin(self.plan.phase_seeds[phase])].sort_values("seed")

    def final(self, arm: str) -> pd.DataFrame:
        """The final rows of an arm, of the seeds that all arms have, by seed.

        None until all arms have all of theirs: who sees results earlier may stop at one that he likes.
        """
        rows = self.of("final", arm)
        return rows[rows.seed.isin(self.common_seeds)]

    @functools.cached_property
    def common_seeds(self) -> set[int]:
        """The final seeds of which every arm has its row; none until all wanted ones are there."""
        seeds = (set(self.of("final", name).seed) for name in self.learning_rates)
        return set.intersection(*seeds) if self.is_finished else set()

    def paired(self, phase: str, arm: str) -> pd.DataFrame:
        """The rows of an arm, those of its baseline with the same seed and device beside them as `NAME_base`, and the
        `difference` of their losses in `unit`; NaN: one of the two did not complete.
        """
        rows = self.final if phase == "final" else functools.partial(self.of, phase)
        both = rows(arm).merge(rows(self.arms[arm].baseline), on=["seed", "device"], suffixes=("", "_base"))
        measure = "loss" if self.unit == "nats per token" else "bits_per_byte"
        return both.assign(difference=both[measure] - both[f"{measure}_base"])

    @functools.cached_property
    def unit(self) -> str:
        """bits per byte where arms of a seed have other batches than each other: another length or tokenizer."""
        trained = self.rows[(self.rows.batches_hash != "") & (self.rows.status == "completed")]
        batches = trained.groupby(["phase", "seed"]).batches_hash.nunique()
        return "bits per byte" if (batches > 1).any() else "nats per token"

    @functools.cached_property
    def losses(self) -> pd.DataFrame:
        """Losses of the final runs: a row for each seed, a column for each arm."""
        return pd.concat({arm: self.final(arm).set_index("seed").loss for arm in self.arms}, axis=1)

    def final_loss(self, arm: str) -> Effect | None:
        """Mean over an arm's final runs, nats per token; None where one did not complete or none is finished."""
        losses = self.losses[arm]
        return mean_effect(arm, losses, "nats per token") if len(losses) and losses.notna().all() else None

    def better_rate(self, arm: str) -> float | None:
        """The best other learning rate of the sweep, if its mean lies below the 95% interval of the arm's final loss.

        The few seeds of the sweep may then have chosen a learning rate that does not suit others. The error of the
        sweep's own mean is not counted: this is a warning and not a test.
        """
        loss = self.final_loss(arm)
        if arm not in self.best_rates or loss is None or loss.interval is None:
            return None
        others = self.sweep.loc[arm].drop(self.best_rates[arm])
        return others.idxmin() if others.min() < loss.interval[0] else None

    @functools.cached_property
    def untuned(self) -> set[str]:
        """Arms that another learning rate may suit better: those at the edge, and those with a `better_rate`."""
        return self.at_edge | {arm for arm in self.arms if self.better_rate(arm) is not None}

    def spread(self, arm: str, rate: float, perturbation: float) -> list[float]:
        """Losses of perturbed runs of an arm minus those of the runs they repeat, nats per token; NaN: diverged."""
        rows = self.rows[(self.rows.arm == arm) & (self.rows.learning_rate == rate)]
        first = rows[rows.phase.isin(["sweep", "pilot", "final"])].drop_duplicates("seed")
        again = rows[(rows.phase == "rerun") & (rows.perturbation == perturbation)]
        both = again.merge(first, on=["seed", "device"], suffixes=("", "_before"))
        return (both.loss - both.loss_before).tolist()

    def spreads(self, arm: str) -> list[float | None]:
        """Root mean squares of `spread` at the arm's learning rate, for rounding and for 5%; None: not measured."""
        found = [self.spread(arm, self.learning_rates[arm], perturbation) for perturbation in RERUNS]
        return [math.inf if np.isnan(d).any() else float(np.sqrt(np.mean(np.square(d)))) if d else None for d in found]

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """Every arm with its baseline, in order of the difference, Holm-adjusted.

        Tests of a difference and tests of equivalence are two families: an arm cannot pass both wrongly. Absent are
        arms with a run that did not complete, and all of them before the final runs are there.
        """
        found = [self.compare(name) for name, arm in self.arms.items() if arm.baseline is not None]
        found = sorted((each for each in found if each is not None), key=lambda each: each.effect.estimate)
        different = holm([each.effect.p for each in found])
        equivalent = holm([equivalence_p(np.array(each.differences), each.margin) for each in found])
        return [
            dataclasses.replace(each, p_holm=p, p_equivalence=q, comparisons=len(found))
            for each, p, q in zip(found, different, equivalent, strict=True)
        ]

    def compare(self, arm: str) -> Comparison | None:
        """An arm with its baseline, not adjusted for other comparisons; None as in `comparisons`."""
        base, pairs = self.arms[arm].baseline, self.paired("final", arm)
        if len(pairs) < 2 or pairs.difference.isna().any():
            return None
        name, untuned = f"{arm} minus {base}", bool({arm, base} & self.untuned)
        bits = pairs.bits_per_byte - pairs.bits_per_byte_base
        return Comparison(
            arm,
            base,
            pairs.difference.tolist(),
            mean_effect(name, pairs.difference, self.unit, untuned),
            mean_effect(name, bits, "bits per byte", untuned),
            self.plan.margin,
            float(pairs.loss.corr(pairs.loss_base)),
            *self.spreads(base),
        )

    def per_seed(self, name: str, arms: set[str], difference: Callable[[pd.Series], float]) -> Effect | None:
        """Mean over the final seeds of a difference between the losses of these arms, which it gets by arm.

        None where one of them did not complete, and before the final runs are there.
        """
        losses = self.losses[[*arms]]
        if not len(losses) or losses.isna().any(axis=None):
            return None
        return mean_effect(name, difference(losses), "nats per token", bool(arms & self.untuned))

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
            found.append(self.per_seed(title, {*self.arms}, lambda losses, w=weights: losses[[*self.arms]] @ w))
        return [effect for effect in found if effect is not None]


def as_table(rows: list[dict]) -> pd.DataFrame:
    """One row for each run, with the fields of `Row` as columns: of rows of the same run the last."""
    columns = [field.name for field in dataclasses.fields(Row)]
    table = pd.DataFrame(rows, columns=columns).drop_duplicates(KEY, keep="last", ignore_index=True)
    numbers = [field.name for field in dataclasses.fields(Row) if field.type in (float, float | None)]
    return table.astype(dict.fromkeys(numbers, float))


def load(folder: Path) -> Study:
    """The study of a folder of results."""
    if not (folder / "plan.toml").is_file() or not (folder / "runs.jsonl").is_file():
        raise UserError(f"{folder} has no plan.toml and runs.jsonl; give the folder of a comparison.")
    return Study(load_plan(str(folder / "plan.toml")), as_table(read_lines(folder / "runs.jsonl")))
