"""Keep or discard a change: two arms, and pairs of runs until a group-sequential test can say which.

At each look, after a fifth of the pairs more, the p-value of a t-test is compared with that of the boundary of O'Brien
and Fleming (1979, Biometrics 35): |z| = C sqrt(5 / k) at look k of five, where C = 2.040 for a two-sided level of 5%
(Jennison and Turnbull 2000, Group Sequential Methods, table 2.3 and section 4.4). docs/compare.md has the error rates.
"""

import functools
import math

import numpy as np
from scipy import optimize, special

from ablation.stats import mean_effect, six_digits, standard_error
from ablation.study import Study

LOOKS = 5


def crossing_probability(constant: float, looks: int) -> float:
    """How often |z| reaches constant * sqrt(looks / k) at a look k without a difference (Armitage et al. 1969)."""
    limit = constant * math.sqrt(looks)  # of z sqrt(k), a sum of k normal steps; its density is integrated by look
    nodes, weights = np.polynomial.legendre.leggauss(100)
    sums, weights = limit * nodes, limit * weights
    step = np.exp(-((sums[:, None] - sums) ** 2) / 2) / math.sqrt(2 * math.pi) * weights
    density = np.exp(-(sums**2) / 2) / math.sqrt(2 * math.pi)
    crossed = 2 * special.ndtr(-limit)
    for _ in range(looks - 1):
        crossed += (weights * density) @ (special.ndtr(sums - limit) + special.ndtr(-sums - limit))
        density = step @ density
    return float(crossed)


@functools.cache
def boundary(level: float, looks: int) -> float:
    """The constant at which `crossing_probability` is this two-sided level."""
    return optimize.brentq(lambda constant: crossing_probability(constant, looks) - level, 0.01, 40)


def pairs_of_looks(maximum: int) -> list[int]:
    """The pairs at each look; at the last the maximum."""
    return [maximum * look // LOOKS for look in range(1, LOOKS + 1)]


def decide(differences: np.ndarray, look: int, looks: list[int], level: float) -> dict:
    """What the pairs of a look (from 1) say at a two-sided level; p: the smallest level at which they would decide."""
    n = len(differences)
    mean = differences.mean()
    share = look / len(looks)
    limit = boundary(level, len(looks)) / math.sqrt(share)  # of |z|
    reach = -special.stdtrit(n - 1, special.ndtr(-limit)) * standard_error(differences)
    z = -special.ndtri(max(mean_effect("", differences, "").p / 2, 1e-300))
    p = crossing_probability(z * math.sqrt(share), len(looks))
    verdict = "inconclusive" if abs(mean) <= reach else "keep" if mean < 0 else "discard"
    decided = "not decided" if verdict == "inconclusive" else "decided"
    p, mean, low, high = map(six_digits, (p, mean, mean - reach, mean + reach))
    result = {"verdict": verdict, "reason": f"{decided} after {n} of at most {looks[-1]} pairs", "difference": mean}
    return result | {"interval": [low, high], "p": p, "looks": looks[:look], "level": six_digits(level)}


def result_of_look(study: Study, look: int, looks: list[int], level: float) -> dict:
    """What judge prints: `decide` on the final pairs, or why it cannot be asked."""
    base, arm = study.plan.all_arms
    differences = np.array(study.comparisons[0].differences if study.comparisons else [])
    diverged = [name for name in (base, arm) if (study.rows_of("final", name).status == "diverged").any()]
    result = {"verdict": "inconclusive", "reason": "runs did not complete, or the hours are used up"}
    result |= {"difference": None, "interval": None, "p": 1.0, "looks": [], "level": six_digits(level), "steps": None}
    if diverged == [arm]:
        result |= {"verdict": "discard", "reason": f"{arm} diverged"}
    elif len(differences) == looks[look - 1]:
        result |= decide(differences, look, looks, level)
        result["steps"] = study.in_steps(base, result["difference"], result["interval"])
    hours = (study.rows.seconds / study.rows.workers).sum() / 3600
    result |= {"a": base, "b": arm, "pairs": len(differences), "unit": study.unit}
    return result | {"learning_rates": study.chosen_learning_rates, "hours": six_digits(hours)}
