"""From finished runs to conclusions: chosen learning rates, paired differences, what they show. No files, no training.

The seed is the unit: runs of one seed that differ in another choice are averaged before they are counted.
"""

import dataclasses
import functools
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
    holm,
    mean_effect,
    median_ratio,
    pairs_needed,
)
from ablation.plan import Arm, Plan, baseline, default_learning_rate, label, model_config
from ablation.results import RunResult, as_table
from benchmarks.timing import Timing
from model.config import num_norm_parameters, num_parameters


@dataclass(frozen=True)
class Comparison:
    """An arm against its baseline over paired seeds: loss of the arm minus loss of the baseline."""

    arm: str
    baseline: str
    loss: Effect
    """Nats per token."""
    bits: Effect
    """Bits per byte."""
    std: float
    """Standard deviation of a pair's difference, nats per token."""
    correlation: float
    """Of the two arms' losses over the seeds: the higher, the more pairing helps; NaN if one is constant."""
    p_equivalence: float
    p_holm: float
    """p of a difference of 0, adjusted for all comparisons of the plan."""
    comparisons: int
    """How many those are."""
    margin: float
    at_edge: bool
    """Whether the learning rate of either arm is the lowest or highest that was tried."""

    @property
    def different(self) -> bool:
        return self.p_holm < SIGNIFICANCE

    @property
    def equivalent(self) -> bool:
        return self.p_equivalence < SIGNIFICANCE and self.loss.can_be_equivalent

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
        if self.equivalent:
            return f"the 90% interval lies within {margin}"
        holm = f"Holm-adjusted p = {self.p_holm:.2g} over {self.comparisons} comparisons"
        tested = holm if self.comparisons > 1 else f"p = {self.p_holm:.2g}"
        if self.different:
            return tested
        if self.p_equivalence < SIGNIFICANCE:
            few = f"equivalence takes at least {MIN_PAIRS_FOR_EQUIVALENCE} pairs"
            return f"{tested}; the 90% interval lies within {margin}, but {few}"
        if distance < self.margin:
            need = self._pairs(self.margin, SIGNIFICANCE, 1 - (1 - POWER) / 2)
            return (
                f"{tested}, and the 90% interval exceeds {margin}; equivalence needs {need} if there is no difference"
            )
        alpha = SIGNIFICANCE * min(1, self.loss.p / self.p_holm) / 2  # what Holm leaves this comparison
        return f"{tested}; a difference this large needs {self._pairs(distance, alpha, POWER)}"

    def _pairs(self, distance: float, alpha: float, power: float) -> str:
        """Pairs for 80% power, and their range: a standard deviation from few pairs is itself uncertain."""
        freedom = self.loss.n - 1
        low, high = (self.std * np.sqrt(freedom / stats.chi2.ppf(level, freedom)) for level in (0.975, 0.025))
        best, fewest, most = (pairs_needed(std, distance, alpha, power) for std in (self.std, low, high))
        shown = [f"{n:,}" if n < MAX_PAIRS else f"over {n:,}" for n in (max(best, self.loss.n + 1), fewest, most)]
        return f"{shown[0]} pairs for 80% power ({shown[1]} to {shown[2]})"


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
                return run.arm in plan.arms and run.learning_rate in plan.learning_rates
            arm = run.arm
            if run.phase == "conversion":  # what was converted
                arm = dataclasses.replace(arm, norm="layer", norm_bias=None)
            return arm in plan.arms and run.seed in plan.final_seeds and run.learning_rate == rates.get(arm)

        return as_table(self.results).assign(used=np.array([used(run) for run in self.results], bool))

    @functools.cached_property
    def sweeps(self) -> list[Sweep]:
        """Of every arm that has runs in the sweep."""
        if not self.plan.has_sweep:
            return []
        table = as_table(self.results)
        table = table[table.phase == "sweep"]
        found = []
        for arm in self.plan.arms:
            runs = table[table.arm == arm]
            losses = {}
            for rate in sorted(self.plan.learning_rates):
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
        """The final runs of an arm that count, by seed."""
        table = self.table
        return table[(table.phase == "final") & (table.arm == arm) & table.used].set_index("seed").sort_index()

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """Every arm with its baseline, in order of the difference; see `_compare` for those that are absent."""
        found = [comparison for arm in self.plan.arms if (comparison := self._compare(arm)) is not None]
        adjusted = holm([comparison.loss.p for comparison in found])
        found = [
            dataclasses.replace(comparison, p_holm=p, comparisons=len(found))
            for comparison, p in zip(found, adjusted, strict=True)
        ]
        return sorted(found, key=lambda comparison: comparison.loss.estimate)

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
            loss=loss,
            bits=mean_effect(name, pairs.bits_per_byte - pairs.bits_per_byte_base, "bits per byte"),
            std=float(differences.std(ddof=1)),
            correlation=float(pairs.validation_loss.corr(pairs.validation_loss_base)),
            p_equivalence=equivalence_p(differences, self.plan.margin),
            p_holm=loss.p,
            comparisons=1,
            margin=self.plan.margin,
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
        """Time of an arm over that of another, one effect for each variant of the code."""
        seconds = {(t.process, t.variant, t.arm): t.seconds for t in self.timings if t.part == part}
        pairs: dict[str, list[tuple[float, float]]] = {}
        for (process, variant, timed), values in seconds.items():
            if timed == arm and (process, variant, base) in seconds:
                pairs.setdefault(variant, []).extend(zip(values, seconds[process, variant, base], strict=True))
        return [median_ratio(variant, values) for variant, values in pairs.items()]
