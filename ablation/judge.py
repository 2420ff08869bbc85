"""Keep or discard a change: two arms, and pairs of runs until a group-sequential test can say which.

After each fifth of the pairs the p-value of a t-test is compared with that of the boundary of O'Brien and Fleming
(1979, Biometrics 35): |z| = C sqrt(5 / k) at the k-th of five looks, where C = 2.040 for a two-sided level of 5%
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
    density, crossed = np.exp(-(sums**2) / 2) / math.sqrt(2 * math.pi), 2 * special.ndtr(-limit)
    for _ in range(looks - 1):
        crossed += (weights * density) @ (special.ndtr(sums - limit) + special.ndtr(-sums - limit))
        density = step @ density
    return float(crossed)


@functools.cache
def boundary(level: float, looks: int) -> float:
    """The constant at which `crossing_probability` is this two-sided level."""
    return optimize.brentq(lambda constant: crossing_probability(constant, looks) - level, 0.01, 40)


def pairs_of_looks(maximum: int) -> list[int]:
    """Pairs that there are at each look; the last has the maximum."""
    return [maximum * look // LOOKS for look in range(1, LOOKS + 1)]


def verdict(differences: np.ndarray, look: int, looks: list[int], level: float) -> dict:
    """What the pairs of a look (from 1) say at a two-sided level; p: the smallest level at which they would decide."""
    n, share, mean = len(differences), look / len(looks), differences.mean()
    limit = boundary(level, len(looks)) / math.sqrt(share)
    reach = -special.stdtrit(n - 1, special.ndtr(-limit)) * standard_error(differences)
    z = -special.ndtri(max(mean_effect("", differences, "").p / 2, 1e-300))
    word = "inconclusive" if abs(mean) <= reach else "keep" if mean < 0 else "discard"
    decided = "not decided" if word == "inconclusive" else "decided"
    p = crossing_probability(z * math.sqrt(share), len(looks))
    p, mean, low, high = map(six_digits, (p, mean, mean - reach, mean + reach))
    result = {"verdict": word, "reason": f"{decided} after {n} of at most {looks[-1]} pairs", "difference": mean}
    return result | {"interval": [low, high], "p": p, "looks": looks[:look]}


def summary(study: Study, look: int, looks: list[int], level: float) -> dict:
    """What is known at a look, for people and programs. `interval` is of this look, as in `verdict`."""
    base, arm = study.plan.all_arms
    differences = np.array(study.comparisons[0].differences if study.comparisons else [])
    rows = [study.schedule.rows_of("final", name) for name in (base, arm)]
    base_diverged, arm_diverged = ((rows_of_arm.status == "diverged").any() for rows_of_arm in rows)
    result = {"verdict": "inconclusive", "reason": "runs did not complete, or the hours are used up"}
    result |= {"difference": None, "interval": None, "p": 1.0, "looks": [], "steps": None}
    if arm_diverged and not base_diverged:
        result |= {"verdict": "discard", "reason": f"{arm} diverged"}
    elif len(differences) == looks[look - 1]:
        result |= verdict(differences, look, looks, level)
        result["steps"] = study.in_steps(base, result["difference"], result["interval"])
    result |= {"level": six_digits(level), "a": base, "b": arm, "pairs": len(differences), "unit": study.unit}
    hours = (study.rows.seconds / study.rows.workers).sum() / 3600
    return result | {"learning_rates": study.schedule.chosen_learning_rates, "hours": six_digits(hours)}
