"""Statistics against values worked by hand, other implementations, and the truth in simulated experiments."""

import bisect
import dataclasses
import functools
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from ablation import report
from ablation.analysis import Study
from ablation.comparison import Noise
from ablation.effects import (
    MAX_PAIRS,
    Effect,
    equivalence_p,
    exact_effect,
    holm,
    mean_effect,
    minimum_detectable_effect,
    pairs_needed,
)
from ablation.plan import Plan
from benchmarks.timing import Timing

EXPERIMENTS, STD = 800, 0.03


def close_to(share: float) -> object:
    """A share of the experiments within 4 standard errors of a binomial one."""
    return pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / EXPERIMENTS))


@functools.cache
def experiments(truth: float, n: int) -> tuple[np.ndarray, list[Effect]]:
    """Differences of n pairs whose mean is truly `truth`, and the effects that follow."""
    values = np.random.default_rng(1).normal(truth, STD, (EXPERIMENTS, n))
    return values, [mean_effect("d", row, "nats") for row in values]


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
    generator = np.random.default_rng(n)
    for _ in range(10):
        values = generator.normal(0.01, 0.02, n)
        found, test = mean_effect("d", values, "nats"), stats.ttest_1samp(values, 0)
        for interval, level in ((found.interval, 0.95), (found.interval_90, 0.90)):
            assert interval == pytest.approx(tuple(test.confidence_interval(level)))
        assert found.p == pytest.approx(test.pvalue)
        tails = [stats.ttest_1samp(values, m, alternative=a).pvalue for m, a in ((-0.02, "greater"), (0.02, "less"))]
        assert equivalence_p(values, 0.02) == pytest.approx(max(tails))


differences = st.lists(st.integers(-1000, 1000).map(lambda n: n / 64), min_size=2, max_size=9)


@given(differences, st.sampled_from([0.01, 1.0, 20.0]))
@settings(deadline=None)
def test_exchanging_the_arms_turns_the_sign_and_nothing_else(values, margin):
    found, exchanged = mean_effect("d", values, "nats"), mean_effect("d", [-v for v in values], "nats")
    assert exchanged.estimate == -found.estimate and exchanged.p == pytest.approx(found.p, nan_ok=True)
    for name in ("interval", "interval_90"):
        low, high = getattr(found, name)
        assert getattr(exchanged, name) == pytest.approx((-high, -low))
    turned = equivalence_p(-np.array(values), margin)
    assert turned == pytest.approx(equivalence_p(np.array(values), margin), abs=1e-12)


@pytest.mark.parametrize("n", [3, 5])
def test_intervals_and_tests_are_one_decision(n):
    margin = 0.02
    values, effects = experiments(0.01, n)
    inside = [-margin < e.interval_90[0] and e.interval_90[1] < margin for e in effects]
    assert inside == [equivalence_p(row, margin) < 0.05 for row in values] and 0.01 < np.mean(inside) < 0.99
    without_zero = [not e.interval[0] <= 0 <= e.interval[1] for e in effects]
    assert without_zero == [e.p < 0.05 for e in effects] and 0.05 < np.mean(without_zero) < 0.95


def test_intervals_cover_the_truth_as_often_as_they_say():
    _, effects = experiments(0.01, 5)
    assert np.mean([e.interval[0] <= 0.01 <= e.interval[1] for e in effects]) == close_to(0.95)
    assert np.mean([e.interval_90[0] <= 0.01 <= e.interval_90[1] for e in effects]) == close_to(0.90)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_difference_as_large_as_the_margin_passes_as_equivalent_in_5_of_100_experiments(side):
    values, _ = experiments(0.1 * side, 5)  # several standard errors: nearly all of the 5% is used
    assert np.mean([equivalence_p(row, 0.1) < 0.05 for row in values]) == close_to(0.05)


def test_values_without_spread_decide_every_test():
    same = mean_effect("d", [0.1] * 3, "nats")  # 0.1 + 0.1 + 0.1 is not 0.3
    assert same == Effect("d", 0.1, (0.1, 0.1), (0.1, 0.1), 0.0, "nats", 3)
    assert mean_effect("d", [0.0] * 3, "nats").p == 1
    assert equivalence_p(np.array([0.1] * 3), 0.2) == 0 and equivalence_p(np.array([-0.1] * 3), 0.1) == 1
    nearly = mean_effect("d", [0.1, 0.1, 0.1 + 1e-17, 0.1 - 2e-17 + 1e-16], "nats")
    assert nearly.estimate == pytest.approx(0.1) and nearly.p < 1e-6


def test_one_value_has_an_estimate_and_no_interval_and_exact_values_have_no_spread():
    assert mean_effect("d", [2.5], "nats") == Effect("d", 2.5, None, None, None, "nats", 1)
    assert exact_effect("d", 0.5, "ratio") == Effect("d", 0.5, (0.5, 0.5), (0.5, 0.5), None, "ratio", 0)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_values_that_are_missing_or_not_finite_are_refused(values):
    with pytest.raises(ValueError, match="d needs finite values"):
        mean_effect("d", values, "nats")


def test_holm_multiplies_by_the_tests_left_and_never_falls():
    # Ascending: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 = 0.04, raised to the 0.06 before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.04]) == [0.04] and holm([]) == []


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.01, 0.05, 1.0])), min_size=1, max_size=6))
@settings(deadline=None)
def test_holm_is_bonferroni_in_every_subset_of_the_family(p_values):
    """The closure of Bonferroni's test: a hypothesis falls where every subset with it falls (Marcus et al. 1976)."""
    family = range(len(p_values))
    subsets = [subset for size in range(1, len(p_values) + 1) for subset in combinations(family, size)]
    bonferroni = {subset: min(1.0, len(subset) * min(p_values[i] for i in subset)) for subset in subsets}
    assert holm(p_values) == [max(p for subset, p in bonferroni.items() if i in subset) for i in family]


def test_seven_equal_arms_have_a_false_positive_in_5_of_100_families():
    generator = np.random.default_rng(2)
    p_values = stats.ttest_1samp(generator.normal(0, STD, (7, EXPERIMENTS, 5)), 0, axis=-1).pvalue.T
    assert np.mean(p_values.min(axis=1) < 0.05) > 0.2  # without an adjustment
    assert np.mean([min(holm(family)) < 0.05 for family in p_values]) == close_to(1 - (1 - 0.05 / 7) ** 7)


def power(n: int, effect: float, std: float, alpha: float) -> float:
    """Exact power of the two-sided t test at 2 alpha, by the noncentral t distribution."""
    critical, shift = stats.t.ppf(1 - alpha, n - 1), effect / std * math.sqrt(n)
    return float(stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift))


@pytest.mark.parametrize(("n", "at_least"), [(2, 0.72), (3, 0.75), (5, 0.785), (12, 0.795), (40, 0.799)])
def test_the_minimum_detectable_effect_is_detected_in_80_of_100_experiments(n, at_least):
    effect = minimum_detectable_effect(STD, n)
    exact = power(n, effect, STD, 0.025)
    assert at_least < exact < 0.801  # what the docstring says: 73% with 2 pairs, 79 to 80% from 5 on
    if n == 5:
        _, found = experiments(effect, n)
        assert np.mean([e.p < 0.05 for e in found]) == close_to(exact)


@pytest.mark.parametrize("alpha", [0.025, 0.025 / 7, 0.05])
@pytest.mark.parametrize("wanted", [0.8, 0.9])
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.7, 1.5])
def test_pairs_needed_is_the_exact_number_of_the_noncentral_t_distribution_or_slightly_less(alpha, wanted, ratio):
    """The sum of two quantiles of t leaves out that a noncentral t is skewed, and spreads sqrt(1 + t^2 / 2f) wider.

    To first order in 1/f that is t_power t_alpha^2 / 4f more of shift, less t_power (1 + t_power^2) / 4f that the
    quantile of t already has: in pairs, half of t_power / (t_alpha + t_power) (t_alpha^2 - 1 - t_power^2), rounded up.
    """
    found = pairs_needed(STD, ratio * STD, alpha, wanted)
    exact = 2 + bisect.bisect_left(range(2, MAX_PAIRS), wanted, key=lambda n: power(n, ratio * STD, STD, alpha))
    a, b = special.ndtri(1 - alpha), special.ndtri(wanted)
    fewer = b / (a + b) * (a * a - 1 - b * b) / 2
    assert -1 <= exact - found <= max(fewer, 0) + 2


def test_pairs_needed_is_the_first_number_that_is_enough_and_never_more_than_the_limit():
    # (t_0.975 + t_0.8) sqrt(2.5 / n) by the table: 15.7, 4.90, 3.29, 2.63, 2.25, 2.004, 1.82 for n = 2 to 8
    expected = {16: 2, 5: 3, 3.3: 4, 2.26: 6, 2.24: 7, 2.01: 7, 2: 8}
    assert {d: pairs_needed(math.sqrt(2.5), d, 0.025, 0.8) for d in expected} == expected
    assert pairs_needed(1.0, 1e-9, 0.025, 0.8) == MAX_PAIRS and pairs_needed(0.0, 1.0, 0.025, 0.8) == 2


def test_a_sweep_chooses_the_lowest_mean_loss_among_learning_rates_where_no_run_diverged(study, change):
    def fields(result):
        losses = {1001: {5e-3: 3.4, 2e-2: 3.0, 0.5: 3.1}, 1002: {5e-3: 3.2, 2e-2: None, 0.5: 3.3}}
        if result.phase != "sweep" or result.arm.norm != "rms":
            return {}
        loss = losses[result.seed][result.learning_rate]
        return {"validation_loss": loss, "status": "diverged" if loss is None else "completed", "spikes": 2}

    sweep = change(study, fields).sweeps[0]
    assert sweep.arm.norm == "rms" and (sweep.diverged, sweep.runs, sweep.spikes) == (1, 6, 12)
    assert list(sweep.losses) == [5e-3, 2e-2, 0.5] and math.isnan(sweep.losses[2e-2])
    assert sweep.losses[5e-3] == pytest.approx(3.3) and sweep.losses[0.5] == pytest.approx(3.2)
    assert sweep.best == 0.5 and sweep.at_edge


def test_without_a_sweep_every_arm_has_the_learning_rate_of_the_plan_or_of_the_config(config):
    plan = Plan(config=str(config))
    assert Study(plan, [], []).learning_rates == dict.fromkeys(plan.arms, 5e-3)
    plan = dataclasses.replace(plan, learning_rates=(7e-4,))
    assert Study(plan, [], []).learning_rates == dict.fromkeys(plan.arms, 7e-4)
    swept = dataclasses.replace(plan, learning_rates=(7e-4, 1e-3))
    assert Study(swept, [], []).learning_rates == {} and Study(swept, [], []).comparisons == []


def test_comparisons_are_paired_by_seed_whatever_the_order_of_the_records(study, with_losses):
    losses = {"rms": (2.0, 9.0, 4.0), "layer": (3.0, 3.5, 5.5), "center": (3.3, 3.6, 5.4)}
    found = with_losses(study, losses)
    reversed_order = dataclasses.replace(found, results=found.results[::-1])
    lacks = [r for r in reversed_order.results if (r.arm.norm, r.phase, r.seed) != ("layer", "final", 2)]
    assert dataclasses.replace(found, results=lacks).comparisons == []  # nothing is judged before all runs are there
    for results in (found.results, reversed_order.results):
        rms, seeds = dataclasses.replace(found, results=results).compare("rms", "layer"), [0, 1, 2]
        d = np.subtract(losses["rms"], losses["layer"])
        assert rms.loss == mean_effect("rms minus layer", d, "nats per token")
        assert rms.bits.estimate == pytest.approx(d.mean() / 2.2) and rms.bits.unit == "bits per byte"
        assert rms.std == pytest.approx(math.sqrt(((d - d.mean()) ** 2).sum() / (len(d) - 1)))
        assert rms.correlation == pytest.approx(
            np.corrcoef(np.array(losses["rms"])[seeds], np.array(losses["layer"])[seeds])[0, 1]
        )
        center = np.subtract(losses["center"], losses["layer"])[seeds]
        both = holm([equivalence_p(of, found.plan.margin) for of in (d, center)])
        assert rms.p_equivalence == both[0] and rms.comparisons == 2
    order = [(c.arm, c.baseline) for c in found.comparisons]
    assert order == [("center", "layer"), ("rms", "layer")]  # by the difference
    assert found.comparisons[0].loss.estimate < found.comparisons[1].loss.estimate


def test_holm_corrects_over_all_comparisons_of_the_plan(study, with_losses):
    layer = np.array([3.0, 3.1, 3.05])
    found = with_losses(
        study, {"layer": layer, "rms": np.add(layer, [0.01, 0.02, 0.04]), "center": np.add(layer, [0.1, 0.2, 0.4])}
    )
    p = [comparison.loss.p for comparison in found.comparisons]
    assert [comparison.p_holm for comparison in found.comparisons] == pytest.approx([min(1, 2 * min(p))] * 2)
    one = dataclasses.replace(found, plan=dataclasses.replace(found.plan, norms=("rms", "layer")))
    assert [c.p_holm for c in one.comparisons] == pytest.approx([p[0]]) and one.comparisons[0].comparisons == 1


def test_an_arm_with_a_diverged_run_or_a_single_pair_is_not_compared(study, with_losses):
    found = with_losses(study, {"rms": (3.0, None, 3.2)})
    assert [c.arm for c in found.comparisons] == ["center"]
    rms = next(arm for arm in found.arms if arm.label == "rms")
    assert rms.loss is None and math.isnan(rms.bits_per_byte) and (rms.completed, rms.runs) == (2, 3)
    assert found.arms[-1] == rms
    one = [r for r in study.results if r.phase == "sweep" or r.seed == 1]
    assert dataclasses.replace(study, results=one).comparisons == []


def test_equal_runs_that_drift_as_far_as_pairs_differ_are_called_chaotic(study, change):
    found = study.compare("rms", "layer")
    deviation = found.std / math.sqrt(2)
    for noise, chaotic in (([1.01 * deviation] * 2, True), ([0.99 * deviation] * 2, False), ([0.0, math.nan], True)):
        assert dataclasses.replace(found, noise=Noise(noise)).chaotic == chaotic
    assert not dataclasses.replace(found, noise=None).chaotic
    assert not dataclasses.replace(found, noise=Noise([0.0]), std=0.0).chaotic

    def diverged(result):
        return {"validation_loss": None, "status": "diverged"} if result.phase == "noise" else {}

    noise = change(study, diverged).compare("rms", "layer").noise
    assert math.isinf(noise.deviation) and report.noise_words(noise) == "a run diverged"


def test_a_sweep_is_extended_where_an_arm_is_best_at_an_edge_and_a_few_times_in_each_direction(study, with_sweep):
    rates = study.plan.learning_rates
    inner = with_sweep(study, {norm: (3.1, 3.0, 3.2) for norm in study.plan.norms})
    assert inner.next_rate is None and inner.rates == sorted(rates)
    upper = with_sweep(study, {"rms": (3.2, 3.1, 3.0), "layer": (3.1, 3.0, 3.2), "center": (3.1, 3.0, 3.2)})
    assert upper.next_rate == 12.5  # 0.5 * 0.5 / 0.02
    lower = with_sweep(study, {"rms": (3.0, 3.1, 3.2), "layer": (3.1, 3.0, 3.2), "center": (3.1, 3.0, 3.2)})
    assert lower.next_rate == 1.25e-3  # 0.005 * 0.005 / 0.02

    def longer(of, *more: float):
        """With runs at more learning rates, each better than the one before."""
        copies = [
            dataclasses.replace(r, learning_rate=rate, validation_loss=2.0 - number)
            for number, rate in enumerate(more)
            for r in of.results
            if r.phase == "sweep" and r.learning_rate == 2e-2 and r.arm.norm == "rms"
        ]
        return dataclasses.replace(of, results=[*of.results, *copies])

    below = []
    for number in range(1, 5):  # four are enough at one end
        below.append(longer(lower, *below).next_rate)
        assert below[-1] == pytest.approx(5e-3 / 4**number, rel=0.01)
        assert longer(lower, *below).rates == [*reversed(below), *rates]
    assert longer(lower, *below).next_rate is None
    close = dataclasses.replace(upper.plan, learning_rates=(1e-3, 1.001e-3))
    same = {5e-3: 1e-3, 2e-2: 1.001e-3, 0.5: 7.0}
    results = [dataclasses.replace(r, learning_rate=same[r.learning_rate]) for r in upper.results]
    assert dataclasses.replace(upper, plan=close, results=results).next_rate is None  # rounded, it is one of them


def test_the_correlation_of_an_arm_that_does_not_vary_is_not_a_number(study, with_losses):
    found = with_losses(study, {"rms": (3.0, 3.0, 3.0), "layer": (3.0, 3.1, 3.3)})
    assert math.isnan(found.compare("rms", "layer").correlation)


def test_arms_are_summarized_by_themselves(study, with_losses):
    losses = {"rms": (3.0, 3.1, 3.2), "layer": (2.9, 2.8, 2.7), "center": (4.0, 4.1, 4.2)}
    arms = {arm.label: arm for arm in with_losses(study, losses).arms}
    assert list(arms) == ["layer", "rms", "center"]
    assert arms["rms"].loss == mean_effect("rms", losses["rms"], "nats per token")
    assert arms["rms"].bits_per_byte == pytest.approx(3.1 / 2.2) and arms["rms"].learning_rate == 2e-2
    assert arms["layer"].comparison is None and arms["rms"].comparison.baseline == "layer"
    assert arms["layer"].norm_parameters == 2 * arms["rms"].norm_parameters == 2 * 5 * 32
    assert arms["layer"].parameters - arms["rms"].parameters == arms["rms"].norm_parameters


def test_the_unit_of_a_ratio_of_times_is_the_process_and_within_it_the_median_of_its_blocks(study):
    times = {
        (1, "eager", "step", "rms"): [1.0, 2.0, 3.0, 4.0, 5.0, 600.0],  # ratios 0.5, but for a disturbed block
        (1, "eager", "step", "layer"): [2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
        (2, "eager", "step", "rms"): [42.0] * 6,
        (2, "eager", "step", "layer"): [60.0] * 6,
        (3, "eager", "step", "rms"): [500.0] * 6,  # its process has not timed the other
        (1, "compiled", "step", "rms"): [3.0] * 6,
        (1, "compiled", "step", "layer"): [4.0] * 6,
        (1, "eager", "forward", "rms"): [7.0] * 6,
        (1, "eager", "forward", "layer"): [1.0] * 6,
    }
    timings = [Timing(*key, seconds, None) for key, seconds in times.items()]
    eager, compiled = dataclasses.replace(study, timings=timings).time_ratios("step", "rms", "layer")
    expected = mean_effect("eager", [0.5, 0.7], "ratio")
    assert eager.interval == pytest.approx(expected.interval) and (eager.estimate, eager.n) == (pytest.approx(0.6), 2)
    assert eager.p is None
    assert (compiled.name, compiled.estimate, compiled.interval, compiled.n) == ("compiled", 0.75, None, 1)
    assert study.time_ratios("step", "rms", "layer") == []
