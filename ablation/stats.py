"""Numbers to effects: means of paired differences, their intervals, equivalence, multiple testing, power.

Tests are at 5%; intervals are 95% unless their name says otherwise. Knows nothing of runs, norms or files.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

SIGNIFICANCE, POWER = 0.05, 0.8
MAX_PAIRS = 10_000
MIN_PAIRS_FOR_EQUIVALENCE = 5  # with fewer, a spread that is small by chance makes any two arms look equivalent
PILOT_CONFIDENCE = 0.8  # that the deviation used for planning is not below the true one


@dataclass(frozen=True)
class Effect:
    """A measured quantity and how well it is known."""

    name: str
    estimate: float
    interval: tuple[float, float] | None
    """95% interval; None where one value has no spread to estimate it from."""
    interval_90: tuple[float, float] | None
    """90% interval: inside (-margin, margin) exactly where both one-sided tests of equivalence pass at 5%."""
    p: float | None
    """Two-sided p-value against an effect of 0; None where 0 is not the hypothesis."""
    unit: str
    n: int
    """Seeds, pairs of seeds, or processes that measured a time; 0 for an exact value."""
    untuned: bool = False
    """Whether it rests on an arm that another learning rate may suit better: see `Study.untuned`."""

    @property
    def can_be_equivalent(self) -> bool:
        """Whether there are enough pairs to call a small effect equivalent to none."""
        return self.n == 0 or self.n >= MIN_PAIRS_FOR_EQUIVALENCE


def mean_effect(name: str, values: Sequence[float], unit: str, untuned: bool = False) -> Effect:
    """Mean of independent values with Student's t interval and test (Student 1908)."""
    values = np.asarray(values, float)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"{name} needs finite values, not {values.tolist()}")
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Effect(name, mean, None, None, None, unit, 1, untuned)
    error = standard_error(values)
    p = 2 * float(special.stdtr(n - 1, -abs(mean) / error))
    reaches = [float(special.stdtrit(n - 1, (1 + level) / 2)) * error for level in (0.95, 0.90)]
    return Effect(name, mean, *((mean - reach, mean + reach) for reach in reaches), p, unit, n, untuned)


def standard_error(values: np.ndarray) -> float:
    """Of the mean of independent values; where all are equal it is not 0, so that each test still has an answer."""
    return max(float(values.std(ddof=1) / np.sqrt(len(values))), 1e-12)


def exact_effect(name: str, value: float, unit: str) -> Effect:
    """What arithmetic gives, the same at every repetition."""
    return Effect(name, value, (value, value), (value, value), None, unit, 0)


def equivalence_p(differences: np.ndarray, margin: float) -> float:
    """The larger p-value of two one-sided tests: below 5% the mean lies within (-margin, margin) (Schuirmann 1987)."""
    distance, error = margin - abs(float(differences.mean())), standard_error(differences)
    return float(special.stdtr(len(differences) - 1, -distance / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of one family (Holm 1979): below 5% means significant, whatever the dependence between them."""
    p = np.asarray(p_values, float)
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.minimum(1, (len(p) - np.arange(len(p))) * p[order]))
    return adjusted.tolist()


def minimum_detectable_effect(std: float, n: int) -> float:
    """The true difference that n pairs detect at 5% with 80% power: (t_0.975 + t_0.8) s / sqrt(n).

    NIST/SEMATECH e-Handbook, section 7.2.2.2. The exact power there is 79 to 80% from 5 pairs on, 73% with 2.
    """
    quantiles = special.stdtrit(n - 1, 1 - SIGNIFICANCE / 2) + special.stdtrit(n - 1, POWER)
    return float(quantiles * std / np.sqrt(n))


def pairs_needed(std: float, distance: float, alpha: float, power: float) -> int:
    """Pairs at which (t_{1-alpha} + t_power) s / sqrt(n) falls to `distance`; MAX_PAIRS if more would be needed."""
    reach = _reach(alpha, power)  # falls with n
    return min(2 + int(np.searchsorted(-reach * std, -distance)), MAX_PAIRS)


@functools.lru_cache(64)
def _reach(alpha: float, power: float) -> np.ndarray:
    n = np.arange(2, MAX_PAIRS + 1)
    return (special.stdtrit(n - 1, 1 - alpha) + special.stdtrit(n - 1, power)) / np.sqrt(n)


def pairs_for_equivalence(std: float, margin: float, comparisons: int) -> int:
    """Pairs that show equivalence with 80% power if there is no difference, in a family of comparisons; at least five.

    Each of the two one-sided tests may fail in half of the other 20%; Holm leaves the hardest of the comparisons a
    share of the 5%.
    """
    needed = pairs_needed(std, margin, SIGNIFICANCE / comparisons, 1 - (1 - POWER) / 2)
    return max(needed, MIN_PAIRS_FOR_EQUIVALENCE)


def deviation_interval(std: float, n: int, level: float) -> tuple[float, float]:
    """The interval of the true standard deviation where n normal values have the standard deviation `std`."""
    tail = (1 - level) / 2
    return tuple(float(std * np.sqrt((n - 1) / stats.chi2.ppf(q, n - 1))) for q in (1 - tail, tail))


def final_pairs(differences: Sequence[np.ndarray], margin: float) -> int:
    """Pairs that a pilot's differences ask for, one array for each comparison of a family; at least five.

    Enough to show equivalence, or to detect a difference whose 95% interval in the pilot lies beyond the margin: at the
    end of that interval which is nearer to 0, since the mean of a noisy pilot is often large by chance. The deviation
    is the upper limit of its one-sided 80% interval, because planning with the estimate itself gives too few pairs in
    about half of all cases (Browne 1995, Statistics in Medicine 14).
    """
    needed = [MIN_PAIRS_FOR_EQUIVALENCE]
    for of_one in differences:
        low, high = mean_effect("pilot", of_one, "").interval
        _, std = deviation_interval(float(np.std(of_one, ddof=1)), len(of_one), 2 * PILOT_CONFIDENCE - 1)
        needed.append(pairs_for_equivalence(std, max(margin, low, -high), len(differences)))
    return max(needed)


@dataclass(frozen=True)
class Comparison:
    """An arm against its baseline over paired seeds: loss of the arm minus loss of the baseline."""

    arm: str
    baseline: str
    differences: list[float]
    """Of each pair, in order of the seeds, in the unit of `effect`."""
    effect: Effect
    """Their mean: nats per token, or bits per byte where the arms do not share their batches."""
    bits: Effect
    """The same in bits per byte."""
    margin: float
    correlation: float
    """Of the two arms' losses over the seeds: the higher, the more pairing helps; NaN if one is constant."""
    rerun_spread: float | None
    """Root mean square difference of two runs of the baseline whose initial weights differ by a millionth; None if not
    measured, infinite where one diverged."""
    placebo_spread: float | None
    """The same where they differ by 5%."""
    p_holm: float = 1.0
    """p of a difference of 0, adjusted for all comparisons of the plan."""
    p_equivalence: float = 1.0
    """Of the two one-sided tests, adjusted in the same way."""
    comparisons: int = 1
    """How many those are."""

    @property
    def deviation(self) -> float:
        """Standard deviation of a pair's difference."""
        return float(np.std(self.differences, ddof=1))

    @property
    def different(self) -> bool:
        return self.p_holm < SIGNIFICANCE

    @property
    def equivalent(self) -> bool:
        return self.p_equivalence < SIGNIFICANCE and self.effect.can_be_equivalent

    @property
    def chaotic(self) -> bool:
        """Whether equal runs drift so far apart that it explains half of the variance between pairs or more."""
        return self.rerun_spread is not None and self.rerun_spread**2 >= self.deviation**2 / 2 > 0

    @property
    def verdict(self) -> str:
        """equivalent, lower, higher (arm against baseline), different within the margin, or inconclusive."""
        if self.equivalent:
            return "different, within the margin" if self.different else "equivalent"
        if self.different:
            return "lower" if self.effect.estimate < 0 else "higher"
        return "inconclusive"

    def pairs_needed(self, std: float) -> int:
        """Pairs for 80% power with this deviation: of equivalence, or beyond the margin of finding the difference."""
        distance = abs(self.effect.estimate)
        if distance < self.margin:
            return pairs_for_equivalence(std, self.margin, self.comparisons)
        alpha = SIGNIFICANCE * min(1, self.effect.p / self.p_holm) / 2  # what Holm leaves this comparison
        return pairs_needed(std, distance, alpha, POWER)

    @property
    def more_pairs(self) -> tuple[int, int, int]:
        """Pairs needed, more than there are, and their range: a deviation from few pairs is itself uncertain."""
        low, high = deviation_interval(self.deviation, self.effect.n, 0.95)
        best, fewest, most = map(self.pairs_needed, (self.deviation, low, high))
        return max(best, self.effect.n + 1), fewest, most
