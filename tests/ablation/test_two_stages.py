"""Pilot and final pairs: how often the whole procedure is right, in 10,000 synthetic studies of each kind."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from ablation.analysis import Study
from ablation.comparison import Comparison, adjusted
from ablation.effects import (
    MIN_PAIRS_FOR_EQUIVALENCE,
    equivalence_p,
    final_pairs,
    mean_effect,
    pairs_for_equivalence,
    upper_deviation,
)
from ablation.plan import MAX_SEEDS

STUDIES, PILOT, MARGIN, STD = 10_000, 8, 0.005, 0.004


def close_to(share: float) -> object:
    """A share of the studies within 4 standard errors of a binomial one."""
    return pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / STUDIES))


def at_most(share: float) -> float:
    return share + 4 * math.sqrt(share * (1 - share) / STUDIES)


def run_studies(truths, draw, studies=STUDIES) -> tuple[list[list[Comparison]], list[int]]:
    """The judged comparisons of each study, one for each true difference, and its number of final pairs."""
    found, sizes = [], []
    for _ in range(studies):
        pairs = final_pairs([truth + draw(PILOT) for truth in truths], MARGIN)
        finals = [truth + draw(pairs) for truth in truths]
        effects = [mean_effect("d", values, "nats") for values in finals]
        family = [
            Comparison(
                arm="a",
                baseline="b",
                differences=[],
                loss=effect,
                bits=effect,
                std=float(values.std(ddof=1)),
                correlation=0.0,
                p_equivalence=equivalence_p(values, MARGIN),
                p_holm=effect.p,
                comparisons=1,
                margin=MARGIN,
                noise=None,
            )
            for effect, values in zip(effects, finals, strict=True)
        ]
        found.append(adjusted(family))
        sizes.append(pairs)
    return found, sizes


def normal(seed: int, std: float = STD):
    generator = np.random.default_rng(seed)
    return lambda n: generator.normal(0, std, n)


def heavy(seed: int):
    """Student's t with 3 degrees of freedom, scaled to the same deviation."""
    generator = np.random.default_rng(seed)
    return lambda n: generator.standard_t(3, n) * STD / math.sqrt(3)


def covered(studies: list[list[Comparison]], truth: float) -> float:
    return np.mean([c.loss.interval[0] <= truth <= c.loss.interval[1] for family in studies for c in family])


def test_equal_arms_are_found_equivalent_in_80_of_100_studies_and_the_interval_covers_the_truth():
    studies, sizes = run_studies([0.0], normal(1))
    verdicts = Counter(family[0].verdict for family in studies)
    assert covered(studies, 0.0) == close_to(0.95)
    equivalent = verdicts["equivalent"] + verdicts["different but equivalent"]
    assert equivalent > 0.8 * STUDIES
    assert verdicts["lower"] + verdicts["higher"] < at_most(0.05) * STUDIES
    # The pilot's deviation is uncertain, so the number of pairs is too; its median is that of the upper 80% limit.
    median = pairs_for_equivalence(STD * math.sqrt(stats.chi2.median(7) / stats.chi2.ppf(0.2, 7)), MARGIN, 1)
    assert np.median(sizes) == pytest.approx(median, abs=1) and min(sizes) >= MIN_PAIRS_FOR_EQUIVALENCE


def test_equal_arms_are_found_equivalent_as_often_where_pairs_differ_by_far_more_than_the_margin():
    studies, _ = run_studies([0.0], normal(8, 4 * MARGIN), 1_000)
    assert np.mean(["equivalent" in family[0].verdict for family in studies]) > 0.8


@pytest.mark.parametrize("side", [-1, 1])
def test_a_difference_as_large_as_the_margin_is_called_equivalent_in_at_most_5_of_100_studies(side):
    studies, _ = run_studies([side * MARGIN], normal(2))
    verdicts = Counter(family[0].verdict for family in studies)
    assert verdicts["equivalent"] + verdicts["different but equivalent"] < at_most(0.05) * STUDIES
    assert verdicts["higher" if side < 0 else "lower"] <= at_most(0.001) * STUDIES
    assert covered(studies, side * MARGIN) == close_to(0.95)


def test_a_difference_of_twice_the_margin_is_found_in_80_of_100_studies():
    studies, sizes = run_studies([2 * MARGIN], normal(3))
    verdicts = Counter(family[0].verdict for family in studies)
    assert verdicts["higher"] > 0.8 * STUDIES and np.median(sizes) < 10


def test_one_wrong_verdict_among_three_comparisons_is_as_rare_as_in_one():
    studies, _ = run_studies([0.0, MARGIN, -MARGIN], normal(4), STUDIES // 2)
    wrong = [
        family[0].verdict in ("lower", "higher")
        or any(c.verdict in ("equivalent", "different but equivalent") for c in family[1:])
        for family in studies
    ]
    # Each of the two families of tests errs in at most 5 of 100 studies.
    assert np.mean(wrong) < 0.10
    equivalences = [any("equivalent" in c.verdict for c in family[1:]) for family in studies]
    assert np.mean(equivalences) < 0.05 + 4 * math.sqrt(0.05 * 0.95 / len(studies))
    assert np.mean(["equivalent" in family[0].verdict for family in studies]) > 0.8


def test_under_heavy_tails_the_interval_covers_the_truth_as_often_and_equivalence_is_not_called_too_often():
    studies, _ = run_studies([0.0], heavy(5))
    assert covered(studies, 0.0) > 0.945  # means of a symmetric heavy-tailed sample: conservative, if anything
    at_margin, _ = run_studies([MARGIN], heavy(6), STUDIES // 2)
    assert np.mean(["equivalent" in family[0].verdict for family in at_margin]) < 0.07


def test_the_upper_deviation_is_above_the_true_one_in_80_of_100_pilots():
    samples = np.random.default_rng(7).normal(0, STD, (STUDIES, PILOT)).std(1, ddof=1)
    assert np.mean([upper_deviation(std, PILOT) > STD for std in samples]) == close_to(0.8)


def test_a_pilot_plans_for_the_hardest_comparison_and_never_for_fewer_than_five_pairs():
    quiet, loud = np.array([1, -1, 0.5, -0.5]) * 1e-5, np.array([1, -1, 0.5, -0.5]) * 0.01
    assert final_pairs([], MARGIN) == final_pairs([quiet], MARGIN) == MIN_PAIRS_FOR_EQUIVALENCE
    assert final_pairs([loud, quiet], MARGIN) == final_pairs([quiet, loud], MARGIN) > final_pairs([loud], MARGIN)
    assert final_pairs([loud + 0.5], MARGIN) < final_pairs([loud], MARGIN)  # a large difference needs few pairs
    assert final_pairs([loud + 0.01], MARGIN) == final_pairs([loud], MARGIN)  # it may be large by chance


@pytest.fixture
def piloted(study):
    """The records of a trained comparison as those of a pilot: two at once, seconds by phase, and made-up losses."""
    seconds, losses = {"sweep": 5.0, "noise": 1.0, "pilot": 10.0}, {"rms": 3.01, "layer": 3.0, "center": 3.02}

    def as_pilot(result):
        machine = dataclasses.replace(result.machine, processes=2)
        if result.phase != "final":
            return dataclasses.replace(result, seconds=seconds[result.phase], machine=machine)
        loss = losses[result.arm.norm] + (result.arm.norm == "center") * 0.004 * result.seed
        changed = {"phase": "pilot", "seed": 2000 + result.seed, "seconds": 10.0, "validation_loss": loss}
        return dataclasses.replace(result, machine=machine, **changed)

    plan = dataclasses.replace(study.plan, seeds=None, pilot_seeds=3)
    return dataclasses.replace(study, plan=plan, results=[as_pilot(result) for result in study.results])


def test_the_hours_count_all_runs_before_and_as_many_at_once_as_there_were(piloted):
    # 18 runs of the sweep, 6 of the noise, 9 of the pilot, two at once; a pair is a run of each of the three arms.
    before, pair = (18 * 5 + 6 * 1 + 9 * 10) / 2, 3 * 10 / 2
    for pairs in (0, 3):
        plan = dataclasses.replace(piloted.plan, hours=(before + (pairs + 0.5) * pair) / 3600)
        size = dataclasses.replace(piloted, plan=plan).size
        assert (size.pairs, size.seconds_per_pair) == (pairs, pair) and size.needed > 3
        assert size.deviation == pytest.approx(0.004)  # of center; rms differs by as much in every pair
    endless = Study(dataclasses.replace(piloted.plan, hours=1e6, margin=1e-6), piloted.results, [])
    loud = {2001: 3.01, 2002: 2.99, 2003: 3.0}
    pairs = [
        dataclasses.replace(r, validation_loss=loud[r.seed]) if (r.phase, r.arm.norm) == ("pilot", "rms") else r
        for r in endless.results
    ]
    most = dataclasses.replace(endless, results=pairs)
    assert most.size.pairs == MAX_SEEDS < most.size.needed


def test_a_pilot_fixes_the_number_when_all_its_runs_are_there_from_pairs_of_which_none_diverged(piloted):
    *others, last = [r for r in piloted.results if r.phase == "pilot"]
    rest = [r for r in piloted.results if r.phase != "pilot"]
    assert dataclasses.replace(piloted, results=[*rest, *others]).size is None
    diverged = dataclasses.replace(last, validation_loss=None, status="diverged")
    size = dataclasses.replace(piloted, results=[*rest, *others, diverged]).size
    assert last.arm.norm == "center" and size.deviation == pytest.approx(0.004 / math.sqrt(2))  # of two pairs
