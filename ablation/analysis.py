"""From finished runs to conclusions: chosen learning rates, paired differences, what they show. No files, no training.

The seed is the unit: runs of one seed that differ in another choice are averaged before they are counted.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ablation.comparison import Comparison, Noise, adjusted
from ablation.effects import Effect, equivalence_p, final_pairs, mean_effect
from ablation.plan import MAX_SEEDS, Arm, Plan, baseline, default_learning_rate, label, model_config
from ablation.results import RunResult, as_table
from benchmarks.timing import Timing
from model.count import num_norm_parameters, num_parameters

MAX_EXTENSIONS = 4  # of a sweep in each direction, beyond the learning rates of its plan


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
    better_rate: float | None
    """See `Study.better_rate`."""
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

    @functools.cached_property
    def untuned_arms(self) -> set[Arm]:
        """Arms that another learning rate may suit better: those at the edge, and those with a `better_rate`."""
        return self.arms_at_edge | {arm for arm in self.plan.arms if self.better_rate(arm) is not None}

    def better_rate(self, arm: Arm) -> float | None:
        """The best other learning rate of the sweep, if its mean lies below the 95% interval of the arm's final loss.

        The few seeds of the sweep may then have chosen a learning rate that does not suit others. The error of the
        sweep's own mean is not counted: this is a warning and not a test.
        """
        sweep, loss = {sweep.arm: sweep for sweep in self.sweeps}.get(arm), self._final_loss(arm)
        if sweep is None or loss is None or loss.interval is None:
            return None
        lower = {rate: mean for rate, mean in sweep.losses.items() if rate != sweep.best and mean < loss.interval[0]}
        return min(lower, key=lower.get, default=None)

    def _final_loss(self, arm: Arm) -> Effect | None:
        """Mean over an arm's final runs, nats per token; None where one diverged or none is finished."""
        losses = self.final(arm).validation_loss
        return mean_effect(self.label(arm), losses, "nats per token") if len(losses) and losses.notna().all() else None

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
        if not arms:  # the sweep has not finished, or all diverged in it
            return None
        runs = pd.concat([self.finished_runs("pilot", arm) for arm in arms])
        if len(runs) < plan.pilot_seeds * len(arms):
            return None
        differences = [self.pilot_differences(arm) for arm in arms if baseline(plan, arm) is not None]
        differences = [found for found in differences if len(found) > 1]
        needed = final_pairs(differences, plan.margin)
        at_once = runs.result.iloc[0].machine.processes
        seconds = float(runs.seconds.mean()) * len(arms) / at_once
        before = sum(r.seconds for r in self.results if r.phase in ("sweep", "pilot", "noise")) / at_once
        fit = max(int((plan.hours * 3600 - before) / seconds), 0)
        pairs = min(needed, fit, MAX_SEEDS)
        deviation = max((float(found.std(ddof=1)) for found in differences), default=None)
        return Size(pairs, needed, deviation, seconds)

    def pilot_differences(self, arm: Arm) -> np.ndarray:
        """Loss of an arm minus that of its baseline in each pair of the pilot in which neither diverged."""
        return self._pairs("pilot", arm).difference.dropna().to_numpy()

    def _pairs(self, phase: str, arm: Arm) -> pd.DataFrame:
        """The runs of an arm, those of its baseline with the same seed beside them, and the difference of their losses.

        In a sweep the learning rate is the same as well. NaN: one of the two diverged.
        """
        same = ["seed", "learning_rate"] if phase == "sweep" else ["seed"]
        base = self.finished_runs(phase, baseline(self.plan, arm))
        both = self.finished_runs(phase, arm).merge(base, on=same, suffixes=("", "_base"))
        return both.assign(difference=both.validation_loss - both.validation_loss_base)

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
            for rate, pairs in self._pairs("sweep", arm).groupby("learning_rate"):
                differences = pairs.difference.tolist()
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
        """An arm with its baseline, not adjusted for other comparisons.

        None before all final runs are there, and with a diverged run or under two pairs.
        """
        base = baseline(self.plan, arm)
        if base is None or not self.is_finished:
            return None
        pairs = self._pairs("final", arm)
        if len(pairs) < 2 or pairs.difference.isna().any():
            return None
        differences = pairs.difference.to_numpy()
        name = f"{self.label(arm)} minus {self.label(base)}"
        loss = mean_effect(name, differences, "nats per token")
        bits = mean_effect(name, pairs.bits_per_byte - pairs.bits_per_byte_base, "bits per byte")
        untuned = bool({arm, base} & self.untuned_arms)
        return Comparison(
            arm=self.label(arm),
            baseline=self.label(base),
            differences=differences.tolist(),
            loss=dataclasses.replace(loss, untuned=untuned),
            bits=dataclasses.replace(bits, untuned=untuned),
            std=float(differences.std(ddof=1)),
            correlation=float(pairs.validation_loss.corr(pairs.validation_loss_base)),
            p_equivalence=equivalence_p(differences, self.plan.margin),
            p_holm=loss.p,
            comparisons=1,
            margin=self.plan.margin,
            noise=self.noise(base, self.learning_rates[base]),
        )

    @functools.cached_property
    def arms(self) -> list[ArmSummary]:
        """All arms in order of their mean loss; those without one come last."""
        found = []
        for arm in self.plan.arms:
            runs, config = self.final(arm), model_config(self.plan, arm)
            summary = ArmSummary(
                arm=arm,
                label=self.label(arm),
                learning_rate=self.learning_rates.get(arm),
                at_edge=arm in self.arms_at_edge,
                better_rate=self.better_rate(arm),
                completed=int((runs.status == "completed").sum()),
                runs=len(runs),
                loss=self._final_loss(arm),
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
