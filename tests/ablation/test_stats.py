"""Statistics against values worked by hand, and the truth in simulated experiments."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import special

from ablation.stats import Comparison, equivalence_p, final_pairs, holm, mean_effect

STUDIES, MARGIN = 1_500, 0.005
ERROR = 4 * math.sqrt(0.05 * 0.95 / STUDIES)  # 4 standard errors of 5% of the studies
EQUIVALENT = ("equivalent", "different, within the margin")


def t_tail(t: float, freedom: int) -> float:
    """P(T > t) for t >= 0, from the incomplete beta function (Abramowitz and Stegun 26.7.1)."""
    return special.betainc(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def test_a_mean_effect_is_what_hand_and_table_give():
    # 1 to 5: mean 3, squares about it 10, s = sqrt(10 / 4), s / sqrt(5) = sqrt(1 / 2). Table of t with 4 degrees of
    # freedom: 2.776 (97.5%), 2.132 (95%).
    effect = mean_effect("a minus b", [1, 3, 2, 4, 5], "nats")
    assert (effect.name, effect.unit, effect.n, effect.estimate) == ("a minus b", "nats", 5, 3)
    assert effect.interval == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), abs=1e-3)
    assert effect.interval_90 == pytest.approx((3 - 2.132 * math.sqrt(0.5), 3 + 2.132 * math.sqrt(0.5)), abs=1e-3)
    assert effect.p == pytest.approx(2 * t_tail(3 / math.sqrt(0.5), 4))
    assert equivalence_p(np.array([1, 3, 2, 4, 5.0]), 5) == pytest.approx(t_tail(2 / math.sqrt(0.5), 4))
    assert equivalence_p(np.array([1, 3, 2, 4, 5.0]), 2) == pytest.approx(1 - t_tail(1 / math.sqrt(0.5), 4))


def test_holm_multiplies_by_the_tests_left_and_never_falls():
    # Ascending: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 = 0.04, raised to the 0.06 before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.04]) == [0.04] and holm([]) == []


def comparison(differences: Sequence[float]) -> Comparison:
    effect, p = mean_effect("a minus b", differences, "nats"), equivalence_p(np.array(differences), MARGIN)
    return Comparison("a", "b", differences, effect, MARGIN, effect.p, p, 1)


def simulated_studies(truth: float) -> list[Comparison]:
    """What studies of a true difference find, each with as many pairs as its pilot asks for."""
    pairs = functools.partial(np.random.default_rng(1).normal, truth, 0.004)
    return [comparison(pairs(final_pairs([pairs(8)], MARGIN))) for _ in range(STUDIES)]


def test_equal_arms_are_found_equivalent_in_80_of_100_studies_and_the_interval_covers_the_truth():
    studies = simulated_studies(0.0)
    covered = [study.effect.interval[0] <= 0 <= study.effect.interval[1] for study in studies]
    assert np.mean(covered) == pytest.approx(0.95, abs=ERROR) and min(study.effect.n for study in studies) >= 5
    assert np.mean([study.verdict in EQUIVALENT for study in studies]) > 0.8
    assert np.mean([study.verdict in ("lower", "higher") for study in studies]) < 0.05 + ERROR


def test_a_difference_as_large_as_the_margin_is_called_equivalent_in_at_most_5_of_100_studies():
    for side in (-1, 1):
        called = np.mean([study.verdict in EQUIVALENT for study in simulated_studies(side * MARGIN)])
        assert called < 0.05 + ERROR


def test_a_pilot_plans_for_the_hardest_comparison_and_never_for_fewer_than_five_pairs():
    quiet, loud = np.array([1, -1, 0.5, -0.5]) * 1e-5, np.array([1, -1, 0.5, -0.5]) * 0.01
    assert final_pairs([], MARGIN) == final_pairs([quiet], MARGIN) == 5
    assert final_pairs([loud, quiet], MARGIN) == final_pairs([quiet, loud], MARGIN) > final_pairs([loud], MARGIN)
    assert final_pairs([loud + 0.5], MARGIN) < final_pairs([loud], MARGIN)  # a large difference needs few pairs
    assert final_pairs([loud + 0.01], MARGIN) == final_pairs([loud], MARGIN)  # it may be large by chance


def test_a_verdict_says_what_the_tests_say_and_fewer_than_five_pairs_are_never_equivalent():
    spread = np.array([0.001, -0.001, 0.0005, -0.0005, 0.0])
    assert comparison(spread).verdict == "equivalent" and comparison(spread[:4]).verdict == "inconclusive"
    assert comparison(spread + 0.003).verdict == "different, within the margin"
    assert comparison(spread[:4] + 0.003).verdict == "different, within the margin"  # not "higher"
    assert (comparison(spread + 0.1).verdict, comparison(spread - 0.1).verdict) == ("higher", "lower")
