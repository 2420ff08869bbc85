"""From a plan and the rows of its runs (see `as_table`): which runs are still wanted, and what they show. No torch."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ablation.plan import MAX_SEEDS, Plan, Run, load_plan
from ablation.records import KEY, Worth, as_table, read_rows
from ablation.stats import Comparison, Effect, equivalence_p, final_pairs, holm, mean_effect, six_digits
from errors import UserError


@dataclass(frozen=True)
class Study:
    """First what a plan wants: a sweep for learning rates, a pilot for the number of pairs, reruns, final pairs. Then
    what its finished runs show, where the seed is the unit: runs of a seed are averaged first.
    """

    plan: Plan
    rows: pd.DataFrame

    def missing(self, runs: list[Run]) -> list[Run]:
        """The runs without a row; a run that diverged or failed has one."""
        ended = set(self.rows[KEY].itertuples(index=False, name=None))
        return [run for run in runs if dataclasses.astuple(run) not in ended]

    def rows_of(self, phase: str, arm: str) -> pd.DataFrame:
        """Rows of an arm at its chosen learning rate, by seed; of final runs those that count."""
        seeds = self.counted_seeds if phase == "final" else self.plan.phase_seeds[phase]
        rows = self.rows[(self.rows.phase == phase) & (self.rows.arm == arm)]
        is_chosen = rows.learning_rate == self.chosen_learning_rates.get(arm)
        return rows[is_chosen & rows.seed.isin(seeds)].sort_values("seed")

    def paired(self, phase: str, arm: str) -> pd.DataFrame:
        """Rows of an arm beside those of its baseline with equal seed and device, and the `difference` in loss."""
        base = self.rows_of(phase, self.plan.all_arms[arm].baseline)
        both = self.rows_of(phase, arm).merge(base, on=["seed", "device"], suffixes=("", "_base"))
        return both.assign(difference=both[self.loss_column] - both[f"{self.loss_column}_base"])

    @functools.cached_property
    def loss_column(self) -> str:
        """The column of losses: bits_per_byte where arms of a seed have other batches, unless no run has it (chats)."""
        trained = self.rows[(self.rows.batches_hash != "") & (self.rows.status == "completed")]  # others were converted
        batches = trained.groupby(["phase", "seed"]).batches_hash.nunique()
        return "bits_per_byte" if (batches > 1).any() and trained.bits_per_byte.notna().any() else "loss"

    @property
    def unit(self) -> str:
        return "nats per token" if self.loss_column == "loss" else "bits per byte"

    @functools.cached_property
    def sweep_runs(self) -> list[Run]:
        swept = {arm: rates for arm, rates in self.plan.candidate_learning_rates.items() if len(rates) > 1}
        seeds = self.plan.phase_seeds["sweep"]
        return [Run(arm, "sweep", seed, rate) for seed in seeds for arm, rates in swept.items() for rate in rates]

    @functools.cached_property
    def sweep(self) -> pd.DataFrame:
        """Mean loss of every swept arm (rows) at every learning rate (columns); NaN: a run diverged, or is missing."""
        seeds = self.plan.phase_seeds["sweep"]
        rows = self.rows[(self.rows.phase == "sweep") & self.rows.seed.isin(seeds)]
        losses = rows.pivot_table(self.loss_column, ["arm", "learning_rate"], "seed", dropna=False, observed=True)
        means = losses.reindex(columns=[*seeds]).mean(axis=1, skipna=False).unstack()
        arms = [*dict.fromkeys(run.arm for run in self.sweep_runs)]
        return means.reindex(index=arms, columns=sorted({run.learning_rate for run in self.sweep_runs}))

    @functools.cached_property
    def chosen_learning_rates(self) -> dict[str, float]:
        """The learning rate by arm; none before the sweep is finished, or where a run diverged at every rate."""
        chosen = {arm: rates[0] for arm, rates in self.plan.candidate_learning_rates.items() if len(rates) == 1}
        if not self.missing(self.sweep_runs):
            chosen |= self.sweep.dropna(how="all").idxmin(axis=1).to_dict()
        return {arm: chosen[arm] for arm in self.plan.all_arms if arm in chosen}

    def runs(self, phase: str, seeds: Sequence[int], perturbations: Sequence[float] = (0.0,)) -> list[Run]:
        """Runs of all arms at the chosen learning rates, seed by seed."""
        chosen = self.chosen_learning_rates.items()
        return [Run(arm, phase, seed, rate, size) for seed in seeds for size in perturbations for arm, rate in chosen]

    @functools.cached_property
    def pairs(self) -> int | None:
        """Final pairs that the plan or its pilot asks for; None before the pilot has finished."""
        if self.plan.seeds is not None:
            return self.plan.seeds
        if self.missing(self.sweep_runs) or self.missing(self.runs("pilot", self.plan.phase_seeds["pilot"])):
            return None
        compared = [name for name, arm in self.plan.all_arms.items() if arm.baseline is not None]
        differences = [self.paired("pilot", name).difference.dropna().to_numpy() for name in compared]
        return min(final_pairs([values for values in differences if len(values) > 1], self.plan.margin), MAX_SEEDS)

    @property
    def planned_runs(self) -> list[Run]:
        """Every run that the plan asks for, as far as that is decided, whatever its hours."""
        if self.missing(self.sweep_runs):
            return self.sweep_runs
        seeds = self.plan.phase_seeds
        rerun_seeds = (seeds["pilot"] or seeds["final"])[: self.plan.rerun_seeds]
        reruns = self.runs("rerun", rerun_seeds, self.plan.perturbations)
        reruns = [run for run in reruns if self.plan.all_arms[run.arm].baseline is None]
        final = self.runs("final", seeds["final"][: self.pairs or 0])
        return [*self.sweep_runs, *self.runs("pilot", seeds["pilot"]), *reruns, *final]

    @functools.cached_property
    def runs_in_time(self) -> list[Run]:
        """The runs asked for whose seed fits into the hours of the plan."""
        hours = self.rows[["seconds", "all_seconds"]].max(axis=1) / self.rows.workers / 3600
        mean = hours[self.rows.status != "failed"].mean()
        end = hours.sum()
        wanted = []
        for _, of_seed in itertools.groupby(self.planned_runs, lambda run: (run.phase, run.seed)):
            runs = [*of_seed]
            missing = self.missing(runs)
            end += 0.0 if math.isnan(mean) else len(missing) * mean
            if not missing or end <= self.plan.hours:
                wanted += runs
        return wanted

    @property
    def remaining(self) -> list[Run]:
        return self.missing(self.runs_in_time)

    @functools.cached_property
    def counted_seeds(self) -> set[int]:
        """The final seeds that count: none before all runs are there, since stopping at a good moment is a bias."""
        final = [run for run in self.runs_in_time if run.phase == "final"]
        return set() if self.pairs is None or self.missing(final) else {run.seed for run in final}

    def mean_loss(self, name: str, weights: dict[str, float]) -> Effect | None:
        """Mean over the final seeds of a weighted sum of the losses of arms; None where a run of them is missing."""
        rows = {arm: self.rows_of("final", arm).set_index("seed") for arm in weights}
        losses = pd.concat({arm: rows[arm][self.loss_column] for arm in weights}, axis=1)
        if not len(losses) or losses.isna().any(axis=None):
            return None
        return mean_effect(name, losses @ np.array([*weights.values()]), self.unit)

    def in_steps(self, baseline: str, difference: float, interval: Sequence[float]) -> Worth | None:
        """What a difference is worth, by the slope of the baseline's loss over log(steps): of runs of other lengths, or
        along its own. None without these, or where the loss rises.
        """
        base = self.plan.all_arms[baseline]
        losses = {}  # by steps
        source = "length"
        for name, arm in self.plan.all_arms.items():
            loss = self.mean_loss(name, {name: 1.0})
            if loss is not None and arm.changes | {"steps": 0} == base.changes | {"steps": 0}:
                losses[arm.value("steps")] = loss.estimate
        if len(losses) < 2 and self.loss_column == "loss":  # curves are in nats
            source = "curve"
            curves = self.rows_of("final", baseline).curve
            losses = dict(pd.DataFrame([*map(dict, curves)]).dropna(axis=1).mean())
        steps = base.value("steps")
        near = [step for step in losses if steps / 4 <= step <= 4 * steps]
        slope = np.polyfit(np.log(near), [losses[step] for step in near], 1)[0] if len(near) > 1 else 0.0
        if slope >= 0:
            return None
        logs = np.clip(np.array([difference, *interval]) / slope, -math.log(2), math.log(2))  # no further extrapolation
        percent, high, low = map(six_digits, 100 * np.expm1(logs))  # the slope is negative: the ends change places
        return Worth(percent, low, high, source)

    @property
    def spread(self) -> pd.DataFrame:
        """How far runs of a baseline from changed initial weights end from those that they repeat, nats per token."""
        same = ["arm", "learning_rate", "seed", "device"]
        again = self.rows.phase == "rerun"
        first = self.rows[~again].drop_duplicates(same)[[*same, "loss"]]
        both = self.rows[again].merge(first, on=same, suffixes=("", "_before"))
        groups = (both.loss - both.loss_before).pow(2).groupby([both.arm, both.learning_rate, both.perturbation])
        root = ("root mean square difference", lambda squares: squares.mean(skipna=False) ** 0.5)
        return groups.agg([root, ("runs", "size")])

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """Every arm with its baseline, in order of the difference, where all their final runs completed."""
        arms = self.plan.all_arms
        compared = [name for name, arm in arms.items() if arm.baseline is not None]
        pairs = {name: self.paired("final", name).difference.to_numpy() for name in compared}
        pairs = {name: values for name, values in pairs.items() if len(values) > 1 and np.isfinite(values).all()}
        effects = [mean_effect(f"{name} minus {arms[name].baseline}", pairs[name], self.unit) for name in pairs]
        p_holm = holm([effect.p for effect in effects])
        # A family of its own, since an arm cannot pass the tests of a difference and of equivalence both wrongly.
        p_equivalence = holm([equivalence_p(values, self.plan.margin) for values in pairs.values()])
        comparisons = []
        for name, effect, p, q in zip(pairs, effects, p_holm, p_equivalence, strict=True):
            tests = {"margin": self.plan.margin, "p_holm": p, "p_equivalence": q, "family_size": len(pairs)}
            comparisons.append(Comparison(name, arms[name].baseline, pairs[name].tolist(), effect, **tests))
        return sorted(comparisons, key=lambda comparison: comparison.effect.estimate)

    @functools.cached_property
    def effects(self) -> list[Effect]:
        """A grid's main effects against the first value of a setting, means over all others, and interactions."""
        arms = self.plan.all_arms
        values = {name: [arm.value(name) for arm in arms.values()] for name in self.plan.varied}
        if len(values) < 2 or len(arms) != math.prod(len({*of_setting}) for of_setting in values.values()):
            return []
        first = {name: of_setting[0] for name, of_setting in values.items()}
        changes = [(name, value) for name in values for value in dict.fromkeys(values[name]) if value != first[name]]
        pairs = [(a, b) for a, b in itertools.combinations(changes, 2) if a[0] != b[0]]
        effects = []
        for chosen in [*((change,) for change in changes), *pairs]:
            title = " x ".join(f"{name}: {value} minus {first[name]}" for name, value in chosen)
            signs = np.ones(len(arms))
            for name, value in chosen:
                sign = {value: 1, first[name]: -1}
                signs *= [sign.get(of_arm, 0) for of_arm in values[name]]
            # Main effect: a mean of arms minus that of as many others. Interaction: the mean of ab - a - b + first,
            # in which one arm in two is positive, so that the factor is 2 / their number.
            weights = signs * 2 ** (len(chosen) - 1) / (signs > 0).sum()
            effects.append(self.mean_loss(title, dict(zip(arms, weights, strict=True))))
        return [effect for effect in effects if effect is not None]


def load(folder: Path) -> Study:
    if not (folder / "runs.jsonl").is_file():
        raise UserError(f"{folder} has no runs.jsonl; give the folder of an experiment that has begun.")
    return Study(load_plan(folder / "plan.toml"), as_table(read_rows(folder)))
