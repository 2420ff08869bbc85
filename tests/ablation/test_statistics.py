"""Against values worked by hand, against scipy's own tests, and against the truth in simulated experiments."""

import functools
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ablation.statistics import Paired, holm, mean_interval, paired, ratio, verdict, vertex

# Differences 1 to 5: mean 3, squares about it 4 + 1 + 0 + 1 + 4 = 10, s = sqrt(10 / 4), s / sqrt(5) = sqrt(1 / 2).
A, B = [4, 3, 5, 5, 8], [3, 1, 2, 1, 3]
EXPERIMENTS, SIGMA = 4_000, 0.03


def close_to(rate: float) -> object:
    """A rate within 4 standard errors of a binomial one."""
    return pytest.approx(rate, abs=at_most(rate) - rate)


def at_most(rate: float) -> float:
    return rate + 4 * math.sqrt(rate * (1 - rate) / EXPERIMENTS)


@functools.cache
def experiments(truth: float, bound: float, n: int = 5) -> list[Paired]:
    """Comparisons of n runs with n others of the same seeds, whose losses truly differ by `truth`."""
    generator = np.random.default_rng(1)
    seeds = generator.normal(3, 0.05, (EXPERIMENTS, n))  # what both arms share
    a, b = (seeds + generator.normal(0, SIGMA / math.sqrt(2), (EXPERIMENTS, n)) for _ in range(2))
    return [paired(x, y, bound) for x, y in zip((a + truth).tolist(), b.tolist(), strict=True)]


def fraction(found: list[bool]) -> float:
    return sum(found) / len(found)


def test_a_comparison_is_what_hand_and_table_give():
    found = paired(A, B, bound=5)
    assert (found.n, found.mean, found.bound) == (5, 3, 5)
    assert found.standard_deviation == pytest.approx(math.sqrt(2.5))
    # A table of t with 4 degrees of freedom: 2.776 (97.5%), 2.132 (95%), 0.941 (80%).
    assert found.interval == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), abs=1e-3)
    assert found.interval_90 == pytest.approx((3 - 2.132 * math.sqrt(0.5), 3 + 2.132 * math.sqrt(0.5)), abs=1e-3)
    assert found.resolvable == pytest.approx((2.776 + 0.941) * math.sqrt(0.5), abs=1e-3)

    def upper_tail(square: float) -> float:  # of t with 4 degrees of freedom, in closed form
        return 0.5 - 3 / 8 * math.sqrt(square / (1 + square / 4)) * (1 - square / (12 + 3 * square))

    assert found.p_value == pytest.approx(2 * upper_tail(9 / 0.5))
    assert found.p_equivalence == pytest.approx(upper_tail((5 - 3) ** 2 / 0.5))
    # About their means 5 and 2: a is -1 -2 0 0 3 and b is 1 -1 0 -1 1; products 4, squares 14 and 4.
    assert found.correlation == pytest.approx(4 / math.sqrt(14 * 4))


@pytest.mark.parametrize(
    ("bound", "seeds"),
    # (t_0.975 + t_0.8) sqrt(2.5 / n) by the table: 15.7, 4.90, 3.29, 2.63, 2.25, 2.004, 1.82 for n = 2 to 8
    [(16, 2), (5, 3), (3.3, 4), (2.25, 7), (2.01, 7), (2, 8)],
)
def test_seeds_needed_is_the_first_number_whose_resolvable_difference_is_within_the_bound(bound, seeds):
    assert paired(A, B, bound).seeds_needed == seeds


@pytest.mark.parametrize("bound", [0.02, 0.3, 1.0, 7.0])
def test_seeds_needed_is_what_trying_every_number_gives(bound):
    n = np.arange(2, 100_000)
    resolvable = (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * math.sqrt(2.5) / np.sqrt(n)
    assert paired(A, B, bound).seeds_needed == n[resolvable <= bound][0]


def test_seeds_needed_of_a_tiny_bound_is_found_at_once():
    normal = (sum(stats.norm.ppf([0.975, 0.8])) * math.sqrt(2.5) / 1e-6) ** 2
    assert paired(A, B, 1e-6).seeds_needed == pytest.approx(normal, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_a_comparison_agrees_with_the_tests_of_scipy(n):
    generator = np.random.default_rng(n)
    for _ in range(20):
        b = generator.normal(3, 0.05, n)
        a = b + generator.normal(0.01, 0.02, n)
        found = paired(a, b, bound=0.02)
        test = stats.ttest_rel(a, b)
        assert found.p_value == pytest.approx(test.pvalue)
        assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
        assert found.interval_90 == pytest.approx(tuple(test.confidence_interval(0.90)))
        above = stats.ttest_1samp(a - b, -0.02, alternative="greater").pvalue
        below = stats.ttest_1samp(a - b, 0.02, alternative="less").pvalue
        assert found.p_equivalence == pytest.approx(max(above, below))
        assert found.correlation == pytest.approx(stats.pearsonr(a, b).statistic)


losses = st.integers(-100_000, 100_000).map(lambda thousandths: thousandths / 1000)
pairs = st.lists(st.tuples(losses, losses), min_size=2, max_size=12)


@given(pairs, st.sampled_from([0.01, 1.0, 50.0]))
@settings(deadline=None)
def test_exchanging_the_arms_turns_the_sign_and_nothing_else(values, bound):
    a, b = zip(*values, strict=True)
    found, exchanged = paired(a, b, bound), paired(b, a, bound)
    assert exchanged.mean == -found.mean
    for name in ("interval", "interval_90"):
        low, high = getattr(found, name)
        assert getattr(exchanged, name) == (-high, -low)
    for name in ("n", "standard_deviation", "p_value", "p_equivalence", "resolvable", "seeds_needed"):
        assert getattr(exchanged, name) == getattr(found, name)
    assert exchanged.correlation == pytest.approx(found.correlation)
    turned = {"lower": "higher", "higher": "lower"}
    assert verdict(exchanged) == turned.get(verdict(found), verdict(found))


@given(pairs, st.sampled_from([0.01, 1.0, 50.0]))
@settings(deadline=None)
def test_another_unit_changes_no_conclusion(values, bound):
    a, b = zip(*values, strict=True)
    found, quarters = paired(a, b, bound), paired([4 * x for x in a], [4 * x for x in b], 4 * bound)
    assert (quarters.mean, quarters.resolvable) == (4 * found.mean, 4 * found.resolvable)
    assert (quarters.p_value, quarters.p_equivalence) == (found.p_value, found.p_equivalence)
    assert verdict(quarters) == verdict(found)


def test_equal_differences_collapse_the_interval_and_decide_every_test():
    found = paired([2, 3, 4], [1, 2, 3], bound=2)
    assert (found.mean, found.standard_deviation, found.interval, found.interval_90) == (1, 0, (1, 1), (1, 1))
    assert (found.p_value, found.p_equivalence, found.resolvable, found.seeds_needed) == (0, 0, 0, 2)
    assert verdict(found) == "different, yet equivalent"
    at_the_bound = paired([1, 2, 3], [2, 3, 4], bound=1)
    assert at_the_bound.p_equivalence == 1 and verdict(at_the_bound) == "lower"
    same = paired([2, 3, 4], [2, 3, 4], bound=1)
    assert (same.mean, same.p_value, same.p_equivalence, verdict(same)) == (0, 1, 0, "equivalent")


def test_equal_differences_are_equal_whatever_their_mean_rounds_to():
    found = paired([0.1] * 3, [0.0] * 3, bound=1)  # 0.1 + 0.1 + 0.1 is not 0.3
    assert (found.mean, found.standard_deviation, found.p_value) == (0.1, 0, 0)


def test_the_correlation_is_undefined_where_an_arm_does_not_vary():
    assert paired([0.1] * 3, [1, 2, 4], bound=1).correlation is None
    assert paired([1, 2, 4], [0.1] * 3, bound=1).correlation is None
    assert paired([1, 2, 4], [3, 5, 9], bound=1).correlation == pytest.approx(1)


@pytest.mark.parametrize(
    ("a", "b", "bound", "message"),
    [
        ([1, 2], [1, 2, 3], 1, "2 values of a and 3 of b"),
        ([1], [1], 1, "at least 2 pairs, not 1"),
        ([], [], 1, "at least 2 pairs, not 0"),
        ([1, math.nan], [1, 2], 1, "value 2 of 2 is nan"),
        ([1, 2], [math.inf, 2], 1, "value 1 of 2 is inf"),
        ([1e308, 2], [-1e308, 2], 1, "value 1 of 2 is inf"),
        ([1, 2], [1, 2], 0, "above 0, not 0"),
        ([1, 2], [1, 2], math.nan, "above 0, not nan"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(a, b, bound, message):
    with pytest.raises(ValueError, match=message):
        paired(a, b, bound)


@pytest.mark.parametrize(
    ("a", "b", "bound", "p_value", "said"),
    # p is 0.013; the 90% interval reaches 4.51. Adjusted to 0.2, the difference is no longer significant.
    [
        (A, B, 5, None, "different, yet equivalent"),
        (A, B, 5, 0.2, "equivalent"),
        (A, B, 2, None, "higher"),
        (B, A, 2, None, "lower"),
        (B, A, 2, 0.04, "lower"),
        (B, A, 2, 0.2, "not resolved, needs 8 seeds"),
        (A, B, 4, 0.2, "not resolved, needs 6 seeds"),  # 4 would do at this deviation, but 5 have not
    ],
)
def test_a_verdict_names_direction_equivalence_or_what_is_missing(a, b, bound, p_value, said):
    assert verdict(paired(a, b, bound), p_value) == said


@pytest.mark.parametrize("p_value", [-0.01, 1.01, math.nan])
def test_what_is_no_p_value_is_refused(p_value):
    with pytest.raises(ValueError, match="between 0 and 1"):
        verdict(paired(A, B, 1), p_value)
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.1, p_value])


def test_intervals_and_tests_are_one_decision():
    bound = 0.02
    found = experiments(0.01, bound)
    inside = [-bound < x.interval_90[0] and x.interval_90[1] < bound for x in found]
    without_zero = [not x.interval[0] <= 0 <= x.interval[1] for x in found]
    assert inside == [x.p_equivalence < 0.05 for x in found]
    assert without_zero == [x.p_value < 0.05 for x in found]
    assert all(0.05 < fraction(decisions) < 0.95 for decisions in (inside, without_zero))


def test_intervals_cover_the_truth_as_often_as_they_say():
    found = experiments(0.01, 0.02)
    assert fraction([x.interval[0] <= 0.01 <= x.interval[1] for x in found]) == close_to(0.95)
    assert fraction([x.interval_90[0] <= 0.01 <= x.interval_90[1] for x in found]) == close_to(0.90)


def test_arms_that_do_not_differ_differ_in_5_of_100_experiments():
    found = experiments(0.0, 0.02)
    assert fraction([x.p_value < 0.05 for x in found]) == close_to(0.05)
    said = [verdict(x) for x in found]
    assert 0 < said.count("lower") / EXPERIMENTS < at_most(0.025)
    assert 0 < said.count("higher") / EXPERIMENTS < at_most(0.025)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_difference_as_large_as_the_bound_passes_as_equivalent_in_5_of_100_experiments(side):
    bound = 0.1  # several errors of a mean: nearly all of the 5% that the two tests allow is used
    said = [verdict(x) for x in experiments(side * bound, bound)]
    assert fraction(["equivalent" in x for x in said]) == close_to(0.05)


def test_a_bound_below_the_error_of_a_mean_passes_less_often_and_never_more():
    narrow = SIGMA / 4
    assert fraction([x.p_equivalence < 0.05 for x in experiments(narrow, narrow)]) < 0.05


@pytest.mark.parametrize("n", [3, 5, 12])
def test_the_resolvable_difference_is_found_with_a_power_of_80_percent(n):
    spread = np.linspace(-1, 1, n)
    difference = paired((spread * SIGMA / spread.std(ddof=1)).tolist(), [0.0] * n, bound=1).resolvable
    power = fraction([x.p_value < 0.05 for x in experiments(difference, 1.0, n)])
    noncentrality, critical = difference / SIGMA * math.sqrt(n), stats.t.ppf(0.975, n - 1)
    exact = stats.nct.sf(critical, n - 1, noncentrality) + stats.nct.cdf(-critical, n - 1, noncentrality)
    assert power == close_to(exact)
    assert power == pytest.approx(0.8, abs=0.02 if n >= 5 else 0.05)


def test_holm_multiplies_by_the_tests_left_and_never_falls():
    # Ascending: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 = 0.04, raised to the 0.06 before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.01, 0.05, 1.0])), min_size=1, max_size=7))
@settings(deadline=None)
def test_holm_is_bonferroni_in_every_subset_of_the_family(p_values):
    """The closure of Bonferroni's test: a hypothesis falls where every subset with it falls (Marcus et al. 1976)."""
    family = range(len(p_values))
    subsets = [subset for size in range(1, len(p_values) + 1) for subset in combinations(family, size)]
    bonferroni = {subset: min(1.0, len(subset) * min(p_values[i] for i in subset)) for subset in subsets}
    assert holm(p_values) == [max(p for subset, p in bonferroni.items() if i in subset) for i in family]


@pytest.mark.parametrize("shared_baseline", [True, False])
def test_a_family_of_seven_equal_arms_has_a_false_positive_in_at_most_5_of_100_experiments(shared_baseline):
    generator = np.random.default_rng(2)
    arms = generator.normal(3, SIGMA, (7, EXPERIMENTS, 5))
    baseline = generator.normal(3, SIGMA, (1 if shared_baseline else 7, EXPERIMENTS, 5))
    p_values = stats.ttest_rel(arms, baseline, axis=-1).pvalue.T
    assert np.mean(p_values.min(axis=1) < 0.05) > 0.15  # what no adjustment would give
    rate = fraction([min(holm(family)) < 0.05 for family in p_values.tolist()])
    assert rate < at_most(0.05)
    if not shared_baseline:  # independent tests use up what is allowed
        assert rate == close_to(1 - (1 - 0.05 / 7) ** 7)


def test_arms_that_differ_leave_their_share_of_the_5_percent_to_the_others():
    generator = np.random.default_rng(3)
    truth = np.array([1.0] * 3 + [0.0] * 4)  # three that nobody can miss: 0.05 is left to the other four
    differences = generator.normal(truth[:, None, None], SIGMA, (7, EXPERIMENTS, 5))
    families = [holm(family) for family in stats.ttest_1samp(differences, 0, axis=-1).pvalue.T.tolist()]
    assert all(max(family[:3]) < 0.05 for family in families)
    assert fraction([min(family[3:]) < 0.05 for family in families]) == close_to(1 - (1 - 0.05 / 4) ** 4)


def test_a_ratio_of_times_is_what_the_hand_gives():
    # Six ratios: all on one side of the median with 2/64 < 5%, so the interval is from the least to the greatest.
    found = ratio([2, 4, 6, 8, 10, 600], [1] * 6)
    assert (found.n, found.ratio, found.interval) == (6, 7, (2, 600))
    # Nine: one of them on one side with (1 + 9) * 2 / 512 = 3.9%, so the second and the last but one.
    found = ratio([9, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 9)
    assert (found.ratio, found.interval) == (5, (2, 8))
    # A disturbed block moves neither.
    assert ratio([900, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 9) == found


def test_the_interval_of_a_ratio_covers_the_truth_although_both_slow_down_together():
    generator = np.random.default_rng(4)
    machine = np.exp(np.linspace(0, 2, 12) + generator.normal(0, 0.5, (EXPERIMENTS, 12)))  # what both blocks meet
    a, b = (machine * time * np.exp(generator.standard_t(2, machine.shape) * 0.02) for time in (0.9, 1.0))
    found = [ratio(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    exact = 1 - 2 * (1 + 12 + 66) / 2**12  # fewer than three of twelve on one side: 0.961
    assert fraction([x.interval[0] <= 0.9 <= x.interval[1] for x in found]) == close_to(exact)
    assert np.mean([x.interval[1] - x.interval[0] for x in found]) < 0.1


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=7, max_size=7))
@settings(deadline=None)
def test_exchanging_the_blocks_inverts_the_ratio_and_its_interval(times):
    a, b = zip(*times, strict=True)
    found, exchanged = ratio(a, b), ratio(b, a)
    assert exchanged.ratio == pytest.approx(1 / found.ratio)
    assert exchanged.interval == pytest.approx((1 / found.interval[1], 1 / found.interval[0]))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1, 2], [1], "2 blocks of a and 1 of b"),
        ([1] * 5, [1] * 5, "at least 6 pairs of blocks, not 5"),
        ([1, 0] * 3, [1, 2] * 3, "above 0, not 0"),
        ([1, 2] * 3, [1, -2] * 3, "above 0, not -2"),
        ([1, math.nan] * 3, [1, 2] * 3, "value 2 of 6 is nan"),
    ],
)
def test_times_without_a_ratio_are_refused_in_a_sentence(a, b, message):
    with pytest.raises(ValueError, match=message):
        ratio(a, b)


def test_the_interval_of_a_mean_is_what_the_hand_and_scipy_give():
    # 1 to 5, as the differences above.
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx(
        (3, 3 - 2.776 / math.sqrt(2), 3 + 2.776 / math.sqrt(2)), abs=1e-3
    )
    values = np.random.default_rng(5).normal(3, 0.1, 12)
    expected = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    assert mean_interval(values) == pytest.approx((values.mean(), *expected))


def test_one_value_has_a_mean_and_no_interval():
    assert mean_interval([2.5]) == (2.5, None, None)


def test_a_mean_of_nothing_or_of_a_diverged_run_is_refused():
    with pytest.raises(ValueError, match="at least 1 value"):
        mean_interval([])
    with pytest.raises(ValueError, match="value 2 of 2 is nan, not a finite number"):
        mean_interval([1.0, math.nan])


@pytest.mark.parametrize(
    ("rates", "losses", "best", "at_the_edge"),
    [
        ([1e-4, 1e-3, 1e-2], [3.0, 2.0, 4.0], 1e-3, False),
        ([1e-4, 1e-3, 1e-2], [3.0, 2.0, 1.0], 1e-2, True),
        ([1e-4, 1e-3, 1e-2], [1.0, 2.0, 3.0], 1e-4, True),
        ([1e-4, 1e-3, 1e-2], [3.0, 2.0, math.nan], 1e-3, False),
        ([1e-4, 1e-3, 1e-2], [-math.inf, 2.0, 3.0], 1e-3, False),
        ([1e-2, 1e-4, 1e-3], [4.0, 3.0, 2.0], 1e-3, False),  # in any order
        ([1e-3, 1e-2, 1e-4, 1e-5], [4.0, 2.0, 3.0, 5.0], 1e-2, True),
        ([1e-2, 1e-3, 1e-4, 1e-5], [4.0, 2.0, 2.0, 3.0], 1e-4, False),  # of equal losses the lower rate
        ([1e-3], [2.0], 1e-3, True),
        ([1e-3, 1e-2], [math.nan, math.inf], None, True),
    ],
)
def test_the_best_rate_has_the_lowest_finite_loss_and_its_edge_is_told(rates, losses, best, at_the_edge):
    assert vertex(rates, losses) == (best, at_the_edge)


@pytest.mark.parametrize(
    ("rates", "losses", "message"),
    [
        ([1e-3, 1e-2], [1.0], "2 learning rates and 1 losses"),
        ([], [], "a valley needs learning rates"),
        ([0.0, 1e-3], [1.0, 2.0], "above 0"),
        ([1e-3, 1e-3], [1.0, 2.0], "each given once"),
        ([1e-3, math.inf], [1.0, 2.0], "value 2 of 2 is inf"),
    ],
)
def test_what_is_no_valley_is_refused_in_a_sentence(rates, losses, message):
    with pytest.raises(ValueError, match=message):
        vertex(rates, losses)
