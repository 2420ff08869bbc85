"""What paired runs and interleaved timings show: differences, intervals, equivalence, the number of seeds still needed.

Pure functions on numbers: nothing is read, trained or drawn here. Significance is 5%, for each of the two one-sided
tests of equivalence too; intervals are 95% unless their name says otherwise. All of it is Student's t, which takes the
differences between seeds to be independent and about normal.
"""

import functools
import itertools
import math
import statistics  # its sums are exact: equal differences have a deviation of 0, where numpy leaves a rounding error
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special  # what scipy.stats.t calls; importing scipy.stats takes half a second more

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Paired:
    """Arm a against arm b over n pairs; differences are a - b, in the values' unit (losses: nats per token)."""

    n: int
    """Pairs."""
    mean: float
    """Mean of the differences."""
    standard_deviation: float
    """Standard deviation of the differences, with n - 1 in the denominator."""
    interval: tuple[float, float]
    """95% interval of the mean difference."""
    interval_90: tuple[float, float]
    """90% interval: it lies inside (-bound, bound) exactly where both one-sided tests pass at 5%."""
    p_value: float
    """Two-sided t test of a mean difference of 0."""
    p_equivalence: float
    """The larger p-value of the two one-sided tests of a mean difference of -bound or less and of bound or more."""
    correlation: float | None
    """Pearson's correlation of a and b over the pairs, None where an arm does not vary: what the pairing is worth."""
    bound: float
    """Differences below this count as equivalent; fixed before the runs."""
    resolvable: float
    """Smallest true difference that n pairs of this standard deviation find at 5% with a power of 80%."""
    seeds_needed: int
    """Smallest number of pairs whose resolvable difference, at this standard deviation, is at most the bound.

    As uncertain as the deviation, squared: with 5 pairs the true one is 0.6 to 2.9 times the measured (95%).
    """


@dataclass(frozen=True)
class Ratio:
    """Times of a over times of b, without unit; below 1 where a is faster."""

    n: int
    """Pairs of neighbouring blocks."""
    ratio: float
    """Median of the ratios, which a few disturbed blocks do not move."""
    interval: tuple[float, float]
    """95% interval of the median."""


def paired(a: Sequence[float], b: Sequence[float], bound: float) -> Paired:
    """Compare two arms whose i-th values share a seed; a, b and the bound (above 0) are in one unit.

    With differences d, their standard deviation s and the error e = s / sqrt(n), all with n - 1 degrees of freedom: the
    interval mean(d) ± t_0.975 e and the test p = 2 P(T > |mean(d)| / e) (Student 1908); equivalence by two one-sided
    tests, the larger p = P(T > (bound - |mean(d)|) / e) (Schuirmann 1987). Where all differences are equal, intervals
    are the mean alone and p-values are 0 or 1.

    Raises ValueError for lists of different length, fewer than 2 pairs, and anything that is not finite.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values of a and {len(b)} of b do not make pairs")
    if len(a) < 2:
        raise ValueError(f"a paired comparison needs at least 2 pairs, not {len(a)}")
    if not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"the bound of equivalence must be finite and above 0, not {bound}")
    a, b = _finite(a), _finite(b)
    differences = _finite([x - y for x, y in zip(a, b, strict=True)])
    n, mean, deviation = len(differences), statistics.mean(differences), statistics.stdev(differences)
    error = deviation / math.sqrt(n)
    return Paired(
        n=n,
        mean=mean,
        standard_deviation=deviation,
        interval=_interval(mean, error, n, 0.95),
        interval_90=_interval(mean, error, n, 0.90),
        p_value=min(1.0, 2 * _upper_tail(abs(mean), error, n)),
        p_equivalence=_upper_tail(bound - abs(mean), error, n),
        correlation=_correlation(a, b),
        bound=float(bound),
        resolvable=_resolvable(deviation, n),
        seeds_needed=_seeds_needed(deviation, bound),
    )


def verdict(found: Paired, p_value: float | None = None) -> str:
    """Say what a comparison shows; p_value is the one adjusted for the other comparisons, where there are any.

    One of "equivalent"; "different, yet equivalent" (significant, and inside the bound); "lower" or "higher" (a against
    b, significant, not inside the bound); "not resolved, needs N seeds". The tests of equivalence are not adjusted.
    N means fresh seeds: a test repeated as seeds are added until it passes is wrong more often than 5%.

    Raises ValueError for a p-value outside 0 to 1.
    """
    p_value = _probability(found.p_value if p_value is None else p_value)
    different, equivalent = p_value < SIGNIFICANCE, found.p_equivalence < SIGNIFICANCE
    if equivalent:
        return "different, yet equivalent" if different else "equivalent"
    if different:
        return "lower" if found.mean < 0 else "higher"
    return f"not resolved, needs {max(found.seeds_needed, found.n + 1)} seeds"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of one family, in the order given: below 5% means significant in the family.

    max over j <= i of min(1, (m - j + 1) p_(j)), p_(j) the j-th smallest of m (Holm 1979, as adjusted p-values). The
    chance of any false positive is then at most 5%, however the tests depend on each other.

    Raises ValueError for a p-value outside 0 to 1.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    ascending = sorted(range(len(p_values)), key=lambda i: _probability(p_values[i]))
    for rank, i in enumerate(ascending):
        largest = max(largest, min(1.0, (len(p_values) - rank) * float(p_values[i])))
        adjusted[i] = largest
    return adjusted


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compare the times of interleaved blocks, a_i measured next to b_i; both in one unit.

    Median of a_i / b_i, and the interval between two of the sorted ratios that covers the true median at least 95% of
    the time whatever their distribution (the sign test turned round: Conover 1999, section 3.2). A mean would follow
    the few blocks that another program disturbed. A disturbance that outlasts a pair of blocks cancels.

    Raises ValueError for lists of different length, fewer than 6 pairs, and times that are not finite and above 0.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} blocks of a and {len(b)} of b do not make pairs")
    if len(a) < 6:
        raise ValueError(f"an interval of a ratio of times needs at least 6 pairs of blocks, not {len(a)}")
    a, b = _finite(a), _finite(b)
    if min(a + b) <= 0:
        raise ValueError(f"the time of a block must be above 0, not {min(a + b)}")
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    n = len(ratios)
    # The median lies below the k-th smallest ratio with the probability that fewer than k of n fair coins show heads.
    below = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n))
    k = sum(probability <= SIGNIFICANCE / 2 for probability in below)
    return Ratio(n=n, ratio=statistics.median(ratios), interval=(ratios[k - 1], ratios[n - k]))


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean of one arm and its 95% interval (Student 1908), in the unit of the values: (mean, low, high).

    One value has no spread to learn from: low and high are None, not the value, which would look certain.

    Raises ValueError for no values at all and for values that are not finite.
    """
    if len(values) == 0:
        raise ValueError("a mean needs at least 1 value")
    values = _finite(values)
    mean = statistics.mean(values)
    if len(values) == 1:
        return mean, None, None
    return mean, *_interval(mean, statistics.stdev(values) / math.sqrt(len(values)), len(values), 0.95)


def vertex(rates: Sequence[float], losses: Sequence[float]) -> tuple[float | None, bool]:
    """Find the learning rate with the lowest loss, and whether it is the lowest or highest of the rates.

    At the edge the best rate may lie outside. Losses that are not finite diverged; next to the best rate they bound the
    valley as any higher loss does. Of equal losses the lower rate counts. (None, True) where every run diverged.

    Raises ValueError for lists of different length, no rates, rates given twice, and rates not finite and above 0.
    """
    if len(rates) != len(losses):
        raise ValueError(f"{len(rates)} learning rates and {len(losses)} losses do not make a valley")
    rates = _finite(rates)
    if not rates or min(rates) <= 0 or len(set(rates)) < len(rates):
        raise ValueError(f"a valley needs learning rates above 0, each given once, not {rates}")
    finite = [(float(loss), rate) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if not finite:
        return None, True
    best = min(finite)[1]
    return best, best in (min(rates), max(rates))


def _finite(values: Sequence[float]) -> list[float]:
    values = [float(value) for value in values]
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"value {i + 1} of {len(values)} is {value}, not a finite number")
    return values


def _probability(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"a p-value lies between 0 and 1, not at {value}")
    return value


@functools.cache
def _quantile(probability: float, n: int) -> float:
    return float(special.stdtrit(n - 1, probability))


def _resolvable(standard_deviation: float, n: int) -> float:
    """(t_0.975 + t_0.8) s / sqrt(n), n - 1 degrees of freedom: NIST/SEMATECH e-Handbook, section 7.2.2.2, for delta.

    The exact power at that difference is 79 to 80% from 5 pairs on, 77% with 3 and 73% with 2.
    """
    return (_quantile(0.975, n) + _quantile(0.8, n)) * standard_deviation / math.sqrt(n)


def _seeds_needed(standard_deviation: float, bound: float) -> int:
    """Smallest n >= 2 that resolves the bound, by bisection because t depends on n.

    With so many pairs, arms that truly do not differ pass both one-sided tests in 75 or more of 100 experiments.
    """
    enough = 2
    while _resolvable(standard_deviation, enough) > bound:
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if _resolvable(standard_deviation, middle) > bound:
            too_few = middle
        else:
            enough = middle
    return enough


def _interval(mean: float, error: float, n: int, level: float) -> tuple[float, float]:
    half = _quantile((1 + level) / 2, n) * error
    return mean - half, mean + half


def _upper_tail(distance: float, error: float, n: int) -> float:
    """P(T > distance / error), and without any spread 0 or 1."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(special.stdtr(n - 1, -distance / error))


def _correlation(a: list[float], b: list[float]) -> float | None:
    if len(set(a)) == 1 or len(set(b)) == 1:
        return None
    try:
        return max(-1.0, min(1.0, statistics.correlation(a, b)))
    except statistics.StatisticsError:  # so little spread that its square is 0
        return None
