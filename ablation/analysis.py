"""From finished runs to conclusions: chosen learning rates, paired differences, what they show. No files, no training.

The seed is the unit: runs of one seed that differ in another choice are averaged before they are counted.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from ablation.effects import (
    MAX_PAIRS,
    MIN_PAIRS_FOR_EQUIVALENCE,
    POWER,
    SIGNIFICANCE,
    Effect,
    equivalence_p,
    final_pairs,
    holm,
    mean_effect,
    pairs_for_equivalence,
    pairs_needed,
)
from ablation.plan import MAX_SEEDS, Arm, Plan, baseline, default_learning_rate, label, model_config
from ablation.results import RunResult, as_table
from benchmarks.timing import Timing
from model.config import num_norm_parameters, num_parameters

MAX_EXTENSIONS = 4  # of a sweep in each direction, beyond the learning rates of its plan


@dataclass(frozen=True)
class Comparison:
    """An arm against its baseline over paired seeds: loss of the arm minus loss of the baseline."""

    arm: str
    baseline: str
    differences: list[float]
    """Of each pair, nats per token."""
    loss: Effect
    """Their mean."""
    bits: Effect
    """Bits per byte."""
    std: float
    """Standard deviation of a pair's difference, nats per token."""
    correlation: float
    """Of the two arms' losses over the seeds: the higher, the more pairing helps; NaN if one is constant."""
    p_equivalence: float
    """Of the two one-sided tests, adjusted like `p_holm`."""
    p_holm: float
    """p of a difference of 0, adjusted for all comparisons of the plan."""
    comparisons: int
    """How many those are."""
    margin: float
    noise: "Noise | None"
    """Of the baseline at its learning rate; None if not measured."""
    at_edge: bool
    """Whether the learning rate of either arm is the lowest or highest that was tried."""

    @property
    def different(self) -> bool:
        return self.p_holm < SIGNIFICANCE

    @property
    def equivalent(self) -> bool:
        return self.p_equivalence < SIGNIFICANCE and self.loss.can_be_equivalent

    @property
    def chaotic(self) -> bool:
        """Whether equal runs drift so far apart that it explains half of the variance between pairs or more."""
        return self.noise is not None and self.noise.deviation**2 >= self.std**2 / 2 > 0

    @property
    def verdict(self) -> str:
        """equivalent, lower, higher (arm against baseline, Holm-adjusted) or not resolved."""
        if self.equivalent:
            return "different but equivalent" if self.different else "equivalent"
        if self.different:
            return "lower" if self.loss.estimate < 0 else "higher"
        return "not resolved"

    @property
    def explanation(self) -> str:
        """Which test decided; for an unresolved comparison which test did not pass and how many pairs it needs."""
        margin, distance = f"±{self.margin:g}", abs(self.loss.estimate)
        several = self.comparisons > 1
        holm, over = ("Holm-adjusted ", f" over {self.comparisons} comparisons") if several else ("", "")
        within = f"equivalence within {margin}: {holm}p = {self.p_equivalence:.2g}{over}"
        if self.equivalent:
            return within
        tested = f"{holm}p = {self.p_holm:.2g}{over}"
        if self.different:
            return tested
        if self.p_equivalence < SIGNIFICANCE:
            return f"{within}, but equivalence takes at least {MIN_PAIRS_FOR_EQUIVALENCE} pairs"
        which = "equivalence" if distance < self.margin else "a difference this large"
        given = " if there is no difference" if distance < self.margin else ""
        return f"difference: {tested}; {within}; {which} needs {self._pairs()}{given}"

    def pairs_needed(self, std: float | None = None) -> int:
        """Pairs for 80% power: of equivalence, or where the difference exceeds the margin, of finding that difference.

        std: the deviation to plan with; by default that of the pairs here, and then more than there are here.
        """
        if std is None:
            return max(self.pairs_needed(self.std), self.loss.n + 1)
        distance = abs(self.loss.estimate)
        if distance < self.margin:
            return max(pairs_for_equivalence(std, self.margin, self.comparisons), MIN_PAIRS_FOR_EQUIVALENCE)
        alpha = SIGNIFICANCE * min(1, self.loss.p / self.p_holm) / 2  # what Holm leaves this comparison
        return pairs_needed(std, distance, alpha, POWER)

    def _pairs(self) -> str:
        """Pairs needed and their range: a standard deviation from few pairs is itself uncertain."""
        freedom = self.loss.n - 1
        low, high = (self.std * np.sqrt(freedom / stats.chi2.ppf(level, freedom)) for level in (0.975, 0.025))
        best, fewest, most = map(self.pairs_needed, (None, low, high))
        shown = [f"{n:,}" if n < MAX_PAIRS else f"over {n:,}" for n in (max(best, self.loss.n + 1), fewest, most)]
        return f"{shown[0]} pairs for 80% power ({shown[1]} to {shown[2]})"


def adjusted(family: list[Comparison]) -> list[Comparison]:
    """The comparisons of a plan with p-values that hold for all of them together (Holm 1979).

    Tests of a difference and tests of equivalence are two families: an arm cannot pass both wrongly.
    """
    different = holm([comparison.loss.p for comparison in family])
    equivalent = holm([comparison.p_equivalence for comparison in family])
    return [
        dataclasses.replace(comparison, p_holm=p, p_equivalence=q, comparisons=len(family))
        for comparison, p, q in zip(family, different, equivalent, strict=True)
    ]


@dataclass(frozen=True)
class Noise:
    """How far runs that should be equal drift apart: the same arm and data, initial weights changed by a millionth."""

    differences: list[float]
    """Validation loss of each perturbed run minus that of the run which it repeats, nats per token; NaN: diverged."""

    @property
    def deviation(self) -> float:
        """Root mean square; the mean is 0 by construction. Infinite where a run diverged."""
        if np.isnan(self.differences).any():
            return math.inf
        return math.sqrt(float(np.mean(np.square(self.differences))))


@dataclass(frozen=True)
class Point:
    """One learning rate of a sweep: an arm minus its baseline over the seeds of the sweep."""

    arm: Arm
    learning_rate: float
    differences: list[float]
    """Of each seed, nats per token."""
    loss: Effect
    noise: Noise | None
    """Of the baseline; None if not measured."""


@dataclass(frozen=True)
class Size:
    """How many final pairs there are, and why. Fixed by the pilot, before any of them is trained."""

    pairs: int
    needed: int
    """What the pilot asks for; `pairs` are fewer where that would take more than the plan's hours."""
    deviation: float | None
    """The largest standard deviation of a pair's difference in the pilot, nats per token; None without a pilot."""
    seconds_per_pair: float | None
    """Of all arms, with as many runs at once as in the pilot."""


@dataclass(frozen=True)
class Sweep:
    """Mean validation loss of an arm at each learning rate, nats per token; NaN where a run diverged or is missing."""

    arm: Arm
    losses: dict[float, float]
    diverged: int
    runs: int
    spikes: int

    @property
    def best(self) -> float | None:
        """The learning rate of the lowest mean loss; None where none has all its runs."""
        known = {rate: loss for rate, loss in self.losses.items() if np.isfinite(loss)}
        return min(known, key=known.get, default=None)

    @property
    def at_edge(self) -> bool:
        """Whether the best is the lowest or highest that was tried, so that a better one may lie outside."""
        return self.best in (min(self.losses), max(self.losses))


@dataclass(frozen=True)
class ArmSummary:
    """One arm by itself."""

    arm: Arm
    label: str
    learning_rate: float | None
    """None where it diverged at every learning rate of the sweep."""
    at_edge: bool
    completed: int
    runs: int
    loss: Effect | None
    """Mean over its final runs, nats per token; None where one diverged or none is finished."""
    bits_per_byte: float
    parameters: int
    norm_parameters: int
    comparison: Comparison | None
    """With its baseline."""


@dataclass(frozen=True)
class Study:
    """Everything that is known of a plan; all its conclusions are properties."""

    plan: Plan
    results: list[RunResult]
    timings: list[Timing]

    def label(self, arm: Arm) -> str:
        return label(self.plan, arm)

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """All runs (see `as_table`), with `used`: whether a run counts, or is of a superseded plan."""
        plan, rates = self.plan, self.learning_rates

        def used(run: RunResult) -> bool:
            if run.phase == "sweep":
                return run.arm in plan.arms and run.learning_rate in self.rates and run.seed in plan.seeds_of_sweep
            arm = run.arm
            if run.phase == "noise":
                return arm in plan.arms and run.learning_rate in (self.rates or rates.values())
            if run.phase == "conversion":  # what was converted
                arm = dataclasses.replace(arm, norm="layer", norm_bias=None)
            seeds = plan.seeds_of_pilot if run.phase == "pilot" else plan.final_seeds
            return arm in plan.arms and run.seed in seeds and run.learning_rate == rates.get(arm)

        return as_table(self.results).assign(used=np.array([used(run) for run in self.results], bool))

    @property
    def chance(self) -> float:
        """|mean| / standard deviation of a random row on average, sqrt(2 / (pi D)): its mean has the variance 1 / D."""
        return math.sqrt(2 / (math.pi * model_config(self.plan, self.plan.arms[0]).hidden_size))

    @functools.cached_property
    def rates(self) -> list[float]:
        """The learning rates of the sweep, ascending: those of the plan, and those by which it was extended."""
        rates = sorted(self.plan.learning_rates) if self.plan.has_sweep else []
        swept = {result.learning_rate for result in self.results if result.phase == "sweep"}
        while (further := self._beyond(rates)) is not None and further in swept:
            rates = sorted([*rates, further])
        return rates

    @property
    def next_rate(self) -> float | None:
        """A learning rate beyond the sweep that is still to be tried, because an arm is best at the sweep's edge."""
        return self._beyond(self.rates)

    def _beyond(self, rates: list[float]) -> float | None:
        if not rates:
            return None
        best = {sweep.best for sweep in self._sweeps(rates)}
        lower = sum(rate < min(self.plan.learning_rates) for rate in rates)
        upper = sum(rate > max(self.plan.learning_rates) for rate in rates)
        for edge, neighbor, extensions in ((rates[0], rates[1], lower), (rates[-1], rates[-2], upper)):
            further = float(f"{edge * edge / neighbor:.3g}")
            if edge in best and extensions < MAX_EXTENSIONS and further not in rates:
                return further
        return None

    @functools.cached_property
    def sweeps(self) -> list[Sweep]:
        """Of every arm that has runs in the sweep."""
        return self._sweeps(self.rates)

    def _sweeps(self, rates: list[float]) -> list[Sweep]:
        table = as_table(self.results)
        table = table[(table.phase == "sweep") & table.seed.isin(self.plan.seeds_of_sweep)]
        found = []
        for arm in self.plan.arms if rates else ():
            runs = table[table.arm == arm]
            losses = {}
            for rate in rates:
                at_rate = runs[runs.learning_rate == rate]
                complete = len(at_rate) >= self.plan.sweep_seeds
                losses[rate] = at_rate.validation_loss.mean(skipna=False) if complete else np.nan
            if len(runs):
                diverged = int((runs.status == "diverged").sum())
                found.append(Sweep(arm, losses, diverged, len(runs), int(runs.spikes.sum())))
        return found

    @functools.cached_property
    def learning_rates(self) -> dict[Arm, float]:
        """Each arm's learning rate: the best of its sweep, or the one that all use; no entry if none is known."""
        if self.plan.has_sweep:
            return {sweep.arm: sweep.best for sweep in self.sweeps if sweep.best is not None}
        return dict.fromkeys(self.plan.arms, default_learning_rate(self.plan))

    @functools.cached_property
    def arms_at_edge(self) -> set[Arm]:
        return {sweep.arm for sweep in self.sweeps if sweep.at_edge}

    def final(self, arm: Arm) -> pd.DataFrame:
        """The final runs of an arm that count, by seed.

        None until all arms have all of theirs: who sees results earlier may stop at one that he likes.
        """
        runs = self.finished_runs("final", arm)
        return runs if self.is_finished else runs.iloc[:0]

    @functools.cached_property
    def is_finished(self) -> bool:
        """Whether all final runs are there."""
        pairs = 0 if self.size is None else self.size.pairs
        return pairs > 0 and all(len(self.finished_runs("final", arm)) >= pairs for arm in self.learning_rates)

    def finished_runs(self, phase: str, arm: Arm) -> pd.DataFrame:
        """The runs of an arm in a phase that count, by seed."""
        table = self.table
        return table[(table.phase == phase) & (table.arm == arm) & table.used].set_index("seed").sort_index()

    @functools.cached_property
    def size(self) -> Size | None:
        """The number of final pairs; None before the pilot has finished."""
        plan = self.plan
        if plan.seeds is not None:
            return Size(plan.seeds, plan.seeds, None, None)
        arms = [arm for arm in plan.arms if arm in self.learning_rates]
        if not arms:  # all diverged in the sweep, or it has not finished
            return Size(0, 0, None, None)
        runs = pd.concat([self.finished_runs("pilot", arm) for arm in arms])
        if len(runs) < plan.pilot_seeds * len(arms):
            return None
        differences = [self._pilot_differences(arm) for arm in arms if baseline(plan, arm) is not None]
        differences = [found for found in differences if len(found) > 1]
        needed = final_pairs(differences, plan.margin)
        at_once = runs.result.iloc[0].machine.processes
        seconds = float(runs.seconds.mean()) * len(arms) / at_once
        before = sum(r.seconds for r in self.results if r.phase in ("sweep", "pilot", "noise")) / at_once
        fit = max(int((plan.hours * 3600 - before) / seconds), 0)
        pairs = min(needed, fit, MAX_SEEDS)
        deviation = max((float(found.std(ddof=1)) for found in differences), default=None)
        return Size(pairs, needed, deviation, seconds)

    def _pilot_differences(self, arm: Arm) -> np.ndarray:
        """Of the pilot's pairs in which neither run diverged."""
        both = self.finished_runs("pilot", arm).merge(
            self.finished_runs("pilot", baseline(self.plan, arm)), on="seed", suffixes=("", "_base")
        )
        return (both.validation_loss - both.validation_loss_base).dropna().to_numpy()

    def noise(self, arm: Arm, learning_rate: float) -> Noise | None:
        """The noise of an arm at a learning rate; None if not measured."""
        runs = self.table[(self.table.arm == arm) & (self.table.learning_rate == learning_rate)]
        repeated = runs[runs.phase.isin(["sweep", "pilot", "final"])].drop_duplicates("seed")
        both = runs[runs.phase == "noise"].merge(repeated, on="seed", suffixes=("", "_before"))
        differences = (both.validation_loss - both.validation_loss_before).tolist()
        return Noise(differences) if differences else None

    @functools.cached_property
    def curve(self) -> list[Point]:
        """Every arm minus its baseline at every learning rate of the sweep at which all runs of both completed."""
        found = []
        for arm in self.plan.arms if self.plan.sweep_seeds > 1 else ():
            base = baseline(self.plan, arm)
            if base is None:
                continue
            both = self.finished_runs("sweep", arm).merge(
                self.finished_runs("sweep", base), on=["seed", "learning_rate"], suffixes=("", "_base")
            )
            for rate, pairs in both.groupby("learning_rate"):
                differences = (pairs.validation_loss - pairs.validation_loss_base).tolist()
                if len(differences) == self.plan.sweep_seeds and np.isfinite(differences).all():
                    name = f"{self.label(arm)} minus {self.label(base)} at {rate:g}"
                    effect = mean_effect(name, differences, "nats per token")
                    found.append(Point(arm, rate, differences, effect, self.noise(base, rate)))
        return found

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """Every arm with its baseline, in order of the difference; see `_compare` for those that are absent."""
        found = [comparison for arm in self.plan.arms if (comparison := self._compare(arm)) is not None]
        return sorted(adjusted(found), key=lambda comparison: comparison.loss.estimate)

    def _compare(self, arm: Arm) -> Comparison | None:
        """An arm with its baseline, not adjusted for other comparisons; None with a diverged run or under 2 pairs."""
        base = baseline(self.plan, arm)
        if base is None:
            return None
        pairs = self.final(arm).merge(self.final(base), on="seed", suffixes=("", "_base"))
        if len(pairs) < 2 or pairs[["validation_loss", "validation_loss_base"]].isna().any(axis=None):
            return None
        differences = (pairs.validation_loss - pairs.validation_loss_base).to_numpy()
        name = f"{self.label(arm)} minus {self.label(base)}"
        loss = mean_effect(name, differences, "nats per token")
        return Comparison(
            arm=self.label(arm),
            baseline=self.label(base),
            differences=differences.tolist(),
            loss=loss,
            bits=mean_effect(name, pairs.bits_per_byte - pairs.bits_per_byte_base, "bits per byte"),
            std=float(differences.std(ddof=1)),
            correlation=float(pairs.validation_loss.corr(pairs.validation_loss_base)),
            p_equivalence=equivalence_p(differences, self.plan.margin),
            p_holm=loss.p,
            comparisons=1,
            margin=self.plan.margin,
            noise=self.noise(base, self.learning_rates[base]),
            at_edge=bool({arm, base} & self.arms_at_edge),
        )

    @functools.cached_property
    def arms(self) -> list[ArmSummary]:
        """All arms in order of their mean loss; those without one come last."""
        found = []
        for arm in self.plan.arms:
            runs, config = self.final(arm), model_config(self.plan, arm)
            complete = len(runs) > 0 and runs.validation_loss.notna().all()
            summary = ArmSummary(
                arm=arm,
                label=self.label(arm),
                learning_rate=self.learning_rates.get(arm),
                at_edge=arm in self.arms_at_edge,
                completed=int((runs.status == "completed").sum()),
                runs=len(runs),
                loss=mean_effect(self.label(arm), runs.validation_loss, "nats per token") if complete else None,
                bits_per_byte=float(runs.bits_per_byte.mean(skipna=False)),
                parameters=num_parameters(config),
                norm_parameters=num_norm_parameters(config),
                comparison=next((c for c in self.comparisons if c.arm == self.label(arm)), None),
            )
            found.append(summary)
        return sorted(found, key=lambda summary: np.inf if summary.loss is None else summary.loss.estimate)

    def compare(self, arm: str, base: str) -> Comparison | None:
        """The comparison with these labels."""
        return next((c for c in self.comparisons if (c.arm, c.baseline) == (arm, base)), None)

    def time_ratios(self, part: str, arm: str, base: str) -> list[Effect]:
        """Time of an arm over that of another, one effect for each variant of the code.

        The unit is the process: its blocks share the layout of its memory and what else ran at that time. Within one it
        is the median over pairs of neighboring blocks, which the few that another program disturbed do not move.
        """
        seconds = {(t.process, t.variant, t.arm): t.seconds for t in self.timings if t.part == part}
        medians: dict[str, list[float]] = {}
        for (process, variant, timed), values in seconds.items():
            if timed == arm and (process, variant, base) in seconds:
                ratios = np.divide(values, seconds[process, variant, base])
                medians.setdefault(variant, []).append(float(np.median(ratios)))
        effects = [mean_effect(variant, values, "ratio") for variant, values in medians.items()]
        return [dataclasses.replace(effect, p=None) for effect in effects]  # 0 is not the hypothesis
