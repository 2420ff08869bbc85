"""A verdict on a published claim follows from the effects and the region of the claim, and from nothing else."""

import math

import numpy as np
import pytest
import torch

import kernels
from ablation import claims, measures
from ablation.claims import CLAIMS, judge
from ablation.plan import Plan
from ablation.stats import Effect, exact_effect, mean_effect

BY_ID = {claim.id: claim for claim in CLAIMS}


def effect(low: float, high: float, n: int = 9, untuned: bool = False) -> Effect:
    middle = (low + high) / 2
    return Effect(
        "e", middle, (low, high), (middle - 0.8 * (middle - low), middle + 0.8 * (high - middle)), 0.5, "", n, untuned
    )


def measured(claim: str, study, timings=()) -> list[Effect]:
    return BY_ID[claim].measure(study, list(timings))


def test_a_claim_holds_inside_its_region_does_not_outside_and_is_inconclusive_at_its_ends():
    assert judge(effect(0.1, 0.2), 0.0, math.inf) == "holds"
    assert judge(effect(-0.2, -0.1), 0.0, math.inf) == "does not hold"
    assert judge(effect(-0.1, 0.2), 0.0, math.inf) == "inconclusive"
    assert judge(exact_effect("e", 0.0, ""), 0.0, math.inf) == "does not hold"
    assert judge(exact_effect("e", 0.5, ""), 0.0, 1.0) == "holds"


def test_between_two_bounds_the_90_percent_interval_of_five_pairs_or_more_decides():
    assert judge(effect(-1.1, 1.1), -1.0, 1.0) == "holds"  # two one-sided tests at 5%
    assert judge(effect(-1.1, 1.1, n=4), -1.0, 1.0) == "inconclusive"
    assert judge(effect(-1.1, 1.1), -1.0, math.inf) == "inconclusive"
    assert judge(effect(1.1, 1.2, n=4), -1.0, 1.0) == "does not hold"


def test_an_arm_that_is_not_well_tuned_or_a_single_pair_decides_nothing():
    assert judge(effect(0.1, 0.2, untuned=True), 0.0, math.inf) == "inconclusive"
    assert judge(mean_effect("e", [0.1], ""), 0.0, math.inf) == "inconclusive"


@pytest.fixture
def pair(finish):
    plan = Plan(vary={"norm": ["layer", "rms"]}, seeds=5, rerun_seeds=0, learning_rates=(1e-3, 2e-3, 4e-3))

    def loss(run):  # layer loses 0.2 more at the highest learning rate
        noise = 0.001 * math.sin(run.seed * len(run.arm))
        return 3 + abs(math.log2(run.learning_rate / 2e-3)) * (0.1 + 0.2 * (run.arm == "layer")) + noise

    return finish(plan, loss, mean_over_std=0.1, cosine_with_ones=0.6)


def test_claims_about_two_norms_are_about_their_paired_difference(pair):
    assert measured("C2", pair) == [pair.comparisons[0].effect]
    assert measured("C3", pair) == measured("C13", pair) == measured("C12a", pair) == []


def test_sensitivity_is_how_far_the_loss_varies_over_the_sweep(pair):
    (found,) = measured("C23", pair)
    assert found.estimate == pytest.approx(-0.2, abs=0.01) and found.n == 3
    assert measured("C10a", pair) == measured("C16b", pair) == []


def test_a_diverged_run_leaves_its_seed_out_of_a_sweep(finish, pair):
    study = finish(pair.plan, lambda run: None if (run.seed, run.learning_rate) == (1001, 4e-3) else 3.0 + run.seed)
    (found,) = measured("C23", study)
    assert found.n == 2


def test_the_mean_of_the_stream_is_compared_with_that_of_random_rows(pair):
    (found,) = measured("C4a", pair)
    assert (found.name, found.estimate) == ("rms", pytest.approx(0.1 * math.sqrt(math.pi * 128 / 2)))
    rows = np.random.default_rng(0).normal(size=(20_000, 128))
    chance = np.mean(np.abs(rows.mean(1)) / rows.std(1))
    assert found.estimate == pytest.approx(0.1 / chance, rel=0.02)
    assert [e.estimate for e in measured("C9c", pair)] == pytest.approx([0.8, 0.8])


def test_the_better_plain_mlp_is_compared_with_every_gated_one(finish):
    levels = {"swiglu": 1.0, "glu": 3.0, "relu": 2.5, "gelu": 2.0}
    plan = Plan(vary={"mlp": [*levels]}, seeds=3, rerun_seeds=0, learning_rates=(1e-3,))
    study = finish(plan, lambda run: levels[run.arm] + 0.001 * math.sin(run.seed * len(run.arm)))
    found = {e.name: round(e.estimate, 1) for e in measured("C12b", study)}
    assert found == {"gelu minus swiglu": 1.0, "gelu minus glu": -1.0}
    assert [e.name for e in measured("C12a", study)] == ["glu minus swiglu"]


def test_times_and_memory_are_those_of_rms_over_layer(pair):
    timing = {"variant": "v", "part": "step", "process": 1}
    timings = [timing | {"arm": "rms", "seconds": [1.0], "peak_bytes": 3}]
    timings += [timing | {"arm": "layer", "seconds": [2.0], "peak_bytes": 4}]
    assert [e.estimate for e in measured("C1", pair, timings)] == [0.5]
    assert [e.estimate for e in measured("C5b", pair, timings)] == [0.75]
    assert measured("C1", pair) == measured("C5b", pair) == measured("C25", pair, timings) == []


def test_the_arithmetic_follows_from_the_norms(pair, monkeypatch):
    found = {claim: [e.estimate for e in measured(claim, pair)] for claim in ("C5a", "C7", "C8b", "C9a", "C18", "C20a")}
    assert found["C5a"] == [0.5] and found["C7"] == [1.0] and found["C18"] == found["C20a"] == [0.0, 0.0]
    assert found["C8b"] == pytest.approx([0.1, 0.1], rel=1e-3) and found["C9a"] == pytest.approx([1.0])

    def broken(x, weight, *, kind, eps):  # no norm at all
        return x * weight, x

    monkeypatch.setattr(kernels, "normalize", broken)
    measures.facts.cache_clear()
    assert [e.estimate for e in measured("C8a", pair)] == pytest.approx([9.0, 9.0])
    assert measured("C17", pair)[0].estimate == 0.0
    measures.facts.cache_clear()


def test_the_coupling_of_gradients_is_that_of_the_formula():
    x = measures.rows(0)[0] + 0.3
    rms = (x.square().mean() + measures.EPS).sqrt()
    jacobian = torch.eye(256) / rms - torch.outer(x, x) / (256 * rms**3)
    off = (jacobian - jacobian.diagonal().diag()).abs().max() / jacobian.diagonal().abs().max()
    assert measures.facts("rms")["coupling"][0] == pytest.approx(off.item(), rel=1e-3)


def test_a_row_names_where_it_was_judged_and_takes_the_first_study_that_measured_it(finish, pair):
    plan = Plan(vary={"norm": ["layer", "rms", "center"]}, seeds=5, rerun_seeds=0, learning_rates=(5e-4,))
    other = finish(plan, lambda run: run.seed + 3.0)
    studies = [(pair, []), (other, [])]
    rows = {claim.id: claims.claim_row(claim, studies) for claim in CLAIMS}
    assert rows["C2"]["judged at"].endswith("learning rate 0.002") and "rms minus layer" in rows["C2"]["measured"]
    assert rows["C3"]["judged at"].endswith("learning rate 0.0005 of all arms")
    assert rows["C23"]["judged at"].endswith("learning rate 0.001, 0.002, 0.004")
    assert rows["C8a"]["judged at"] == "arithmetic"
    assert [rows[claim]["verdict"] for claim in ("C6", "C22", "C26")] == ["not measured"] * 3
    assert rows["C22"]["measured"] == "takes other hardware"
