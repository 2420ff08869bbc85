"""Means of paired differences, their intervals (95%), tests (at 5%) of difference and equivalence, and power."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

SIGNIFICANCE, POWER = 0.05, 0.8
MAX_PAIRS = 10_000
MIN_PAIRS_FOR_EQUIVALENCE = 5  # with fewer, a spread that is small by chance makes any two arms look equivalent


@dataclass(frozen=True)
class Effect:
    """A measured quantity and how well it is known."""

    name: str
    estimate: float
    interval: tuple[float, float]  # 95%; without limits where there is one value
    interval_90: tuple[float, float]  # inside (-margin, margin) exactly where both tests of equivalence pass at 5%
    p: float  # two-sided, against an effect of 0
    unit: str
    n: int  # values: seeds, pairs, or processes that measured a time


def mean_effect(name: str, values: Sequence[float], unit: str) -> Effect:
    """Mean of independent values with Student's t interval and test."""
    values = np.asarray(values, float)
    mean = float(values.mean())
    n = len(values)
    if n == 1:
        return Effect(name, mean, (-math.inf, math.inf), (-math.inf, math.inf), 1.0, unit, 1)
    error = standard_error(values)
    reaches = [float(special.stdtrit(n - 1, (1 + level) / 2)) * error for level in (0.95, 0.90)]
    return Effect(name, mean, *((mean - reach, mean + reach) for reach in reaches), t_test_p(values), unit, n)


def t_test_p(values: np.ndarray) -> float:
    """Two-sided p-value of a mean of 0 (Student 1908)."""
    return 2 * float(special.stdtr(len(values) - 1, -abs(values.mean()) / standard_error(values)))


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of independent values; not 0 where all are equal, so that each test has an answer."""
    return max(float(values.std(ddof=1) / np.sqrt(len(values))), 1e-12)


def six_digits(value: float) -> float:
    """A number rounded to six digits, for what no verdict depends on: all digits would double the size of a row."""
    return float(f"{value:.6g}")


def equivalence_p(differences: np.ndarray, margin: float) -> float:
    """The larger p-value of two one-sided tests: below 5% the mean lies within (-margin, margin) (Schuirmann 1987)."""
    distance = margin - abs(float(differences.mean()))
    return float(special.stdtr(len(differences) - 1, -distance / standard_error(differences)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of one family (Holm 1979): below 5% means significant, whatever the dependence between them."""
    p = np.asarray(p_values, float)
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.minimum(1, (len(p) - np.arange(len(p))) * p[order]))
    return adjusted.tolist()


def pairs_needed(std: float, distance: float, alpha: float, power: float, minimum: int = 2) -> int:
    """Pairs where (t_{1-alpha} + t_power) s / sqrt(n) falls to `distance` (NIST/SEMATECH e-Handbook, 7.2.2.2)."""
    for n in range(minimum, MAX_PAIRS):
        t = special.stdtrit(n - 1, 1 - alpha) + special.stdtrit(n - 1, power)
        if t * std / np.sqrt(n) <= distance:
            return n
    return MAX_PAIRS


def pairs_for_equivalence(std: float, margin: float, family_size: int) -> int:
    """Pairs that show equivalence with 80% power if there is no difference, where Holm is hardest."""
    power = (1 + POWER) / 2  # each of the two one-sided tests may fail in half of the other 20%
    return pairs_needed(std, margin, SIGNIFICANCE / family_size, power, MIN_PAIRS_FOR_EQUIVALENCE)


def deviation_limit(values: Sequence[float], confidence: float) -> float:
    """Upper limit, with this confidence, of the standard deviation of the population that normal values come from."""
    return float(np.std(values, ddof=1) * np.sqrt((len(values) - 1) / special.chdtri(len(values) - 1, confidence)))


def final_pairs(differences: Sequence[np.ndarray], margin: float) -> int:
    """Pairs after a pilot, with an array for each comparison of a family: to show equivalence, or a difference like the
    end nearer to 0 of its 95% interval where that is beyond the margin. The deviation is its upper 80% limit, since the
    estimate gives too few pairs in about half of all cases (Browne 1995, Stat. in Medicine 14).
    """
    needed = [MIN_PAIRS_FOR_EQUIVALENCE]
    for values in differences:
        low, high = mean_effect("pilot", values, "").interval
        needed.append(pairs_for_equivalence(deviation_limit(values, 0.8), max(margin, low, -high), len(differences)))
    return max(needed)


@dataclass(frozen=True)
class Comparison:
    """An arm against its baseline over paired seeds: loss of the arm minus loss of the baseline."""

    arm: str
    baseline: str
    differences: list[float]  # one for each pair, in order of the seeds
    effect: Effect  # their mean
    margin: float
    p_holm: float  # p of a difference of 0, adjusted for all comparisons of the plan
    p_equivalence: float  # p of the two one-sided tests, adjusted in the same way
    family_size: int  # the number of comparisons of the plan

    @property
    def deviation(self) -> float:
        return float(np.std(self.differences, ddof=1))

    @property
    def verdict(self) -> str:
        """equivalent, lower, higher (than the baseline), different within the margin, or inconclusive: "after Holm" if
        only the adjustment for other comparisons leaves it open.
        """
        is_within = self.p_equivalence < SIGNIFICANCE
        if self.p_holm < SIGNIFICANCE:
            sign = "lower" if self.effect.estimate < 0 else "higher"
            return "different, within the margin" if is_within else sign
        if is_within and self.effect.n >= MIN_PAIRS_FOR_EQUIVALENCE:
            return "equivalent"
        return "inconclusive after Holm" if self.effect.p < SIGNIFICANCE else "inconclusive"

    @property
    def pairs_for_power(self) -> tuple[int, int, int]:
        """Pairs for 80% power to show equivalence or the difference: by the deviation, then its interval's ends."""
        stds = self.deviation, *(deviation_limit(self.differences, level) for level in (0.025, 0.975))
        distance = abs(self.effect.estimate)
        # Holm multiplied p by p_holm / p, so the level is divided by it.
        alpha = SIGNIFICANCE / 2 * min(1, self.effect.p / self.p_holm)
        if distance < self.margin:
            best, *ends = (pairs_for_equivalence(std, self.margin, self.family_size) for std in stds)
        else:
            best, *ends = (pairs_needed(std, distance, alpha, POWER) for std in stds)
        return max(best, self.effect.n + 1), *ends
