"""Numbers to effects: means, ratios and their intervals, equivalence, multiple testing, power.

Tests are scipy's, at 5%; intervals are 95% unless their name says otherwise. Knows nothing of runs, norms or files.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SIGNIFICANCE, POWER = 0.05, 0.8
MAX_PAIRS = 10_000
MIN_PAIRS_FOR_EQUIVALENCE = 5  # with fewer, a spread that is small by chance makes any two arms look equivalent


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
    """Seeds, or pairs of seeds or of neighboring blocks; 0 for an exact value."""
    at_edge: bool = False
    """Whether it rests on a learning rate at the edge of its sweep, so that another may change it."""

    @property
    def can_be_equivalent(self) -> bool:
        """Whether there are enough pairs to call a small effect equivalent to none."""
        return self.n == 0 or self.n >= MIN_PAIRS_FOR_EQUIVALENCE


def mean_effect(name: str, values: Sequence[float], unit: str) -> Effect:
    """Mean of independent values with Student's t interval and test (Student 1908)."""
    values = np.asarray(values, float)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"{name} needs finite values, not {values.tolist()}")
    mean = float(values.mean())
    if len(values) == 1:
        return Effect(name, mean, None, None, None, unit, 1)
    if np.ptp(values) == 0:  # no spread: scipy would divide by 0
        same = float(values[0])
        return Effect(name, same, (same, same), (same, same), float(same == 0), unit, len(values))
    test = _t_test(values, 0.0, "two-sided")
    intervals = [tuple(map(float, test.confidence_interval(level))) for level in (0.95, 0.90)]
    return Effect(name, mean, *intervals, float(test.pvalue), unit, len(values))


def exact_effect(name: str, value: float, unit: str) -> Effect:
    """What arithmetic gives, the same at every repetition."""
    return Effect(name, value, (value, value), (value, value), None, unit, 0)


def median_ratio(name: str, pairs: Sequence[tuple[float, float]]) -> Effect:
    """Median of a / b over pairs of times, with the distribution-free interval of a median (Conover 1999, section 3.2).

    A median, because a mean follows the few blocks that another program disturbed.
    """
    ratios = np.array([a / b for a, b in pairs])
    intervals = []
    for level in (0.95, 0.90):
        low, high = stats.quantile_test(ratios, q=1.0, p=0.5).confidence_interval(level)
        intervals.append((float(low), float(high)) if np.isfinite([low, high]).all() else None)
    return Effect(name, float(np.median(ratios)), *intervals, None, "ratio", len(ratios))


def equivalence_p(differences: np.ndarray, margin: float) -> float:
    """The larger p-value of two one-sided tests: below 5% the mean lies within (-margin, margin) (Schuirmann 1987)."""
    if np.ptp(differences) == 0:
        return float(abs(differences[0]) >= margin)
    lower, upper = _t_test(differences, -margin, "greater"), _t_test(differences, margin, "less")
    return float(max(lower.pvalue, upper.pvalue))


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
    return float((stats.t.ppf(1 - SIGNIFICANCE / 2, n - 1) + stats.t.ppf(POWER, n - 1)) * std / np.sqrt(n))


def pairs_needed(std: float, distance: float, alpha: float, power: float) -> int:
    """Pairs at which (t_{1-alpha} + t_power) s / sqrt(n) falls to `distance`; MAX_PAIRS if more would be needed."""
    n = np.arange(2, MAX_PAIRS + 1)
    enough = (stats.t.ppf(1 - alpha, n - 1) + stats.t.ppf(power, n - 1)) * std / np.sqrt(n) <= distance
    return int(n[np.argmax(enough)]) if enough.any() else MAX_PAIRS


def _t_test(values: np.ndarray, mean: float, alternative: str):
    with warnings.catch_warnings():  # of nearly equal values, whose p-value is then as good as 0
        warnings.simplefilter("ignore", RuntimeWarning)
        return stats.ttest_1samp(values, mean, alternative=alternative)
