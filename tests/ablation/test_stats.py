"""Statistics against values worked by hand, other implementations, and the truth in simulated experiments."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import special, stats

from ablation.stats import (
    MAX_PAIRS,
    MIN_PAIRS_FOR_EQUIVALENCE,
    Comparison,
    equivalence_p,
    final_pairs,
    holm,
    mean_effect,
    pairs_needed,
)

EXPERIMENTS, STD = 800, 0.03
STUDIES, PILOT, MARGIN = 1_500, 8, 0.005
EQUIVALENT = ("equivalent", "different, within the margin")


def close_to(share: float, number: int = EXPERIMENTS) -> object:
    """A share of the experiments within 4 standard errors of a binomial one."""
    return pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / number))


def t_tail(t: float, freedom: int) -> float:
    """P(T > t) for t >= 0, from the incomplete beta function (Abramowitz and Stegun 26.7.1)."""
    return special.betainc(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def test_a_mean_effect_is_what_hand_and_table_give():
    # 1 to 5: mean 3, squares about it 10, s = sqrt(10 / 4), s / sqrt(5) = sqrt(1 / 2). Table of t with 4 degrees of
    # freedom: 2.776 (97.5%), 2.132 (95%).
    found = mean_effect("a minus b", [1, 3, 2, 4, 5], "nats")
    assert (found.name, found.unit, found.n, found.estimate) == ("a minus b", "nats", 5, 3)
    assert found.interval == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), abs=1e-3)
    assert found.interval_90 == pytest.approx((3 - 2.132 * math.sqrt(0.5), 3 + 2.132 * math.sqrt(0.5)), abs=1e-3)
    assert found.p == pytest.approx(2 * t_tail(3 / math.sqrt(0.5), 4))
    assert equivalence_p(np.array([1, 3, 2, 4, 5.0]), 5) == pytest.approx(t_tail(2 / math.sqrt(0.5), 4))
    assert equivalence_p(np.array([1, 3, 2, 4, 5.0]), 2) == pytest.approx(1 - t_tail(1 / math.sqrt(0.5), 4))


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_intervals_and_p_values_agree_with_those_of_scipy(n):
    values = np.random.default_rng(n).normal(0.01, 0.02, n)
    found, test = mean_effect("d", values, "nats"), stats.ttest_1samp(values, 0)
    for interval, level in ((found.interval, 0.95), (found.interval_90, 0.90)):
        assert interval == pytest.approx(tuple(test.confidence_interval(level)))
    assert found.p == pytest.approx(test.pvalue)
    tails = [stats.ttest_1samp(values, m, alternative=a).pvalue for m, a in ((-0.02, "greater"), (0.02, "less"))]
    assert equivalence_p(values, 0.02) == pytest.approx(max(tails))


@pytest.mark.parametrize("side", [-1, 1])
def test_a_difference_as_large_as_the_margin_passes_as_equivalent_in_5_of_100_experiments(side):
    values = np.random.default_rng(1).normal(0.1 * side, STD, (EXPERIMENTS, 5))  # nearly all of the 5% is used
    assert np.mean([equivalence_p(row, 0.1) < 0.05 for row in values]) == close_to(0.05)


def test_holm_multiplies_by_the_tests_left_and_never_falls():
    # Ascending: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 = 0.04, raised to the 0.06 before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.04]) == [0.04] and holm([]) == []


def test_pairs_needed_is_the_first_number_that_is_enough_and_never_more_than_the_limit():
    for ratio in (0.05, 0.2, 0.7, 1.5):
        n = pairs_needed(1.0, ratio, 0.025, 0.8)
        reach = [(special.stdtrit(k - 1, 0.975) + special.stdtrit(k - 1, 0.8)) / math.sqrt(k) for k in (n - 1, n)]
        assert reach[1] <= ratio and not reach[0] <= ratio
    assert pairs_needed(1.0, 1e-6, 0.025, 0.8) == MAX_PAIRS


def run_studies(truths, draw, number: int = STUDIES) -> tuple[list[list[Comparison]], list[int]]:
    """The judged comparisons of each study, one for each true difference, and its number of final pairs."""
    found, sizes = [], []
    for _ in range(number):
        pairs = final_pairs([truth + draw(PILOT) for truth in truths], MARGIN)
        finals = [truth + draw(pairs) for truth in truths]
        effects = [mean_effect("d", values, "nats") for values in finals]
        different = holm([effect.p for effect in effects])
        equivalent = holm([equivalence_p(values, MARGIN) for values in finals])
        judged = zip(finals, effects, different, equivalent, strict=True)
        found.append([Comparison("a", "b", d, e, MARGIN, p, q, len(truths)) for d, e, p, q in judged])
        sizes.append(pairs)
    return found, sizes


def normal(seed: int, std: float = 0.004):
    generator = np.random.default_rng(seed)
    return lambda n: generator.normal(0, std, n)


def covered(studies: list[list[Comparison]], truth: float) -> float:
    return np.mean([c.effect.interval[0] <= truth <= c.effect.interval[1] for family in studies for c in family])


def test_equal_arms_are_found_equivalent_in_80_of_100_studies_and_the_interval_covers_the_truth():
    studies, sizes = run_studies([0.0], normal(1))
    verdicts = Counter(family[0].verdict for family in studies)
    assert covered(studies, 0.0) == close_to(0.95, STUDIES) and min(sizes) >= MIN_PAIRS_FOR_EQUIVALENCE
    assert verdicts["equivalent"] + verdicts["different, within the margin"] > 0.8 * STUDIES
    assert verdicts["lower"] + verdicts["higher"] < (0.05 + 4 * math.sqrt(0.05 * 0.95 / STUDIES)) * STUDIES


@pytest.mark.parametrize("side", [-1, 1])
def test_a_difference_as_large_as_the_margin_is_called_equivalent_in_at_most_5_of_100_studies(side):
    studies, _ = run_studies([side * MARGIN], normal(2))
    called = np.mean([family[0].verdict in EQUIVALENT for family in studies])
    assert called < 0.05 + 4 * math.sqrt(0.05 * 0.95 / STUDIES)


def test_a_pilot_plans_for_the_hardest_comparison_and_never_for_fewer_than_five_pairs():
    quiet, loud = np.array([1, -1, 0.5, -0.5]) * 1e-5, np.array([1, -1, 0.5, -0.5]) * 0.01
    assert final_pairs([], MARGIN) == final_pairs([quiet], MARGIN) == MIN_PAIRS_FOR_EQUIVALENCE
    assert final_pairs([loud, quiet], MARGIN) == final_pairs([quiet, loud], MARGIN) > final_pairs([loud], MARGIN)
    assert final_pairs([loud + 0.5], MARGIN) < final_pairs([loud], MARGIN)  # a large difference needs few pairs
    assert final_pairs([loud + 0.01], MARGIN) == final_pairs([loud], MARGIN)  # it may be large by chance


def comparison(differences: list[float], margin: float = 0.01) -> Comparison:
    effect = mean_effect("a minus b", differences, "nats")
    return Comparison("a", "b", differences, effect, margin, effect.p, equivalence_p(np.array(differences), margin), 1)


def test_a_verdict_says_what_the_tests_say_and_fewer_than_five_pairs_are_never_equivalent():
    spread = [0.001, -0.001, 0.0005, -0.0005, 0.0]
    assert comparison(spread).verdict == "equivalent" and comparison(spread[:4]).verdict == "inconclusive"
    assert comparison([d + 0.005 for d in spread]).verdict == "different, within the margin"
    assert comparison([d + 0.1 for d in spread]).verdict == "higher"
    assert comparison([d - 0.1 for d in spread]).verdict == "lower"
