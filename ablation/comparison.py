"""One arm against its baseline: what the paired differences show, and how far equal runs drift apart."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ablation.effects import (
    MAX_PAIRS,
    MIN_PAIRS_FOR_EQUIVALENCE,
    POWER,
    SIGNIFICANCE,
    Effect,
    holm,
    pairs_for_equivalence,
    pairs_needed,
)


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
class Comparison:
    """An arm against its baseline over paired seeds: loss of the arm minus loss of the baseline."""

    arm: str
    baseline: str
    differences: list[float]
    """Of each pair, nats per token."""
    loss: Effect
    """Their mean; `untuned` if one of the two arms is."""
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
    noise: Noise | None
    """Of the baseline at its learning rate; None if not measured."""

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
