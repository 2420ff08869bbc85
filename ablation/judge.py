"""Keep or discard a change: two arms, and pairs of runs until a group-sequential test can say which, as one JSON line.

After each fifth of the pairs the p-value of a t-test is compared with that of the boundary of O'Brien and Fleming
(1979, Biometrics 35), |z| = 2.040 sqrt(5 / k) at the k-th of five looks, for a two-sided error of 5% (Jennison and
Turnbull 2000, Group Sequential Methods, table 2.3 and section 4.4). docs/compare.md has the error rates.
"""

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from scipy import special

from ablation.execute import Experiment, execute, write_plan
from ablation.plan import Plan, Run
from ablation.run import six_digits
from ablation.study import Study
from errors import UserError

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


def check(plan: Plan) -> None:
    """Refuse a plan that cannot be judged."""
    if len(plan.compared) != 2 or plan.seeds < 2 * LOOKS:
        raise UserError(f"judge needs two arms (--a and --b), and --seeds of at least {2 * LOOKS}.")


def judge(experiment: Experiment, start: Callable[[Run, str], Future] | None = None) -> list[str]:
    """Train pairs, as `execute` does, until the verdict; what was known at each look, as lines of JSON."""
    plan, said = experiment.plan, []
    for look, pairs in enumerate(pairs_of_looks(plan.seeds), 1):
        experiment.plan = dataclasses.replace(plan, seeds=pairs)
        execute(experiment, start)
        result = summary(experiment.study, look, pairs)
        said.append(json.dumps(result))
        if result["verdict"] != "inconclusive" or result["pairs"] < pairs:
            break
    write_plan(experiment)  # with the pairs that there are
    return said


def summary(study: Study, look: int, pairs: int) -> dict:
    """What is known at a look, for people and programs. `interval` is of this look, as in `repeated_interval`."""
    base, arm = study.arms
    c = next(iter(study.comparisons), None)
    diverged = {name: study.final(name).loss.isna().any() for name in study.arms}
    result = {"verdict": "inconclusive", "reason": f"look {look} of {LOOKS}", "a": base, "b": arm}
    result |= {"pairs": c.effect.n if c else 0, "difference": None, "interval": None, "unit": study.unit}
    result["learning_rates"] = study.learning_rates
    result["hours"] = six_digits((study.rows.seconds / study.rows.workers).sum() / 3600)
    if diverged[arm] and not diverged[base]:
        return result | {"verdict": "discard", "reason": f"{arm} did not complete"}
    if result["pairs"] < pairs:
        return result | {"reason": "runs did not complete, or the hours are used up"}
    low, high = repeated_interval(np.array(c.differences), look)
    verdict = "keep" if high < 0 else "discard" if low > 0 else "inconclusive"
    result |= {"difference": six_digits(c.effect.estimate), "interval": [six_digits(low), six_digits(high)]}
    return result | {"verdict": verdict}
