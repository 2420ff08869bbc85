"""Keep or discard a change: two arms, and pairs of runs until a group-sequential test can say which.

After each fifth of the pairs the p-value of a t-test is compared with that of the boundary of O'Brien and Fleming
(1979, Biometrics 35), |z| = 2.040 sqrt(5 / k) at the k-th of five looks, for a two-sided error of 5% (Jennison and
Turnbull 2000, Group Sequential Methods, table 2.3 and section 4.4). docs/compare.md has the error rates.
"""

import dataclasses

import numpy as np
from scipy import special

from ablation.plan import Plan
from ablation.run import six_digits
from ablation.study import Study
from errors import UserError

DEFAULT_PAIRS = 20  # without --seeds
LOOKS = 5
BOUNDARY = 2.040  # times sqrt(LOOKS / look)


def repeated_interval(differences: np.ndarray, look: int) -> tuple[np.ndarray, np.ndarray]:
    """Intervals of the mean over the last axis; they exclude 0 where the boundary of this look, from 1, is crossed."""
    n, p = differences.shape[-1], special.ndtr(-BOUNDARY * np.sqrt(LOOKS / look))
    reach = -special.stdtrit(n - 1, p) * differences.std(-1, ddof=1) / np.sqrt(n)
    return differences.mean(-1) - reach, differences.mean(-1) + reach


def pairs_of_looks(maximum: int) -> list[int]:
    """Pairs that there are at each look; the last has the maximum."""
    return [maximum * look // LOOKS for look in range(1, LOOKS + 1)]


def judged(plan: Plan) -> Plan:
    """The plan without pilot and reruns, where `seeds` is the most pairs that there will be."""
    plan = dataclasses.replace(plan, seeds=plan.seeds or DEFAULT_PAIRS, rerun_seeds=0)
    if len(plan.all_arms) != 2 or plan.seeds < 2 * LOOKS:
        raise UserError(f"judge needs two arms (--a and --b), and --seeds of at least {2 * LOOKS}.")
    return plan


def summary(study: Study, look: int, looks: list[int]) -> dict:
    """What is known at a look, for people and programs. `interval` is of this look, as in `repeated_interval`."""
    base, arm = study.plan.all_arms
    differences = np.array(study.comparisons[0].differences if study.comparisons else [])
    rows = [study.schedule.rows_of("final", name) for name in (base, arm)]
    base_diverged, arm_diverged = ((rows_of_arm.status == "diverged").any() for rows_of_arm in rows)
    verdict, difference, interval = "inconclusive", None, None
    if arm_diverged and not base_diverged:
        verdict, reason = "discard", f"{arm} diverged"
    elif len(differences) < looks[look - 1]:
        reason = "runs did not complete, or the hours are used up"
    else:
        low, high = repeated_interval(differences, look)
        difference, interval = six_digits(differences.mean()), [six_digits(low), six_digits(high)]
        if high < 0 or low > 0:
            verdict = "keep" if high < 0 else "discard"
            reason = f"decided after {looks[look - 1]} of at most {looks[-1]} pairs"
        elif look == LOOKS:
            reason = f"not decided after all {looks[-1]} pairs"
        else:
            reason = f"not decided; {looks[look] - looks[look - 1]} more pairs until the next look"
    result = {"verdict": verdict, "reason": reason, "a": base, "b": arm, "pairs": len(differences)}
    result |= {"difference": difference, "interval": interval, "unit": study.unit}
    hours = (study.rows.seconds / study.rows.workers).sum() / 3600
    return result | {"learning_rates": study.schedule.chosen_learning_rates, "hours": six_digits(hours)}
