"""A verdict on a published claim follows from the effects and the region of the claim, and from nothing else."""

import math

import numpy as np
import pytest
import torch

import kernels
from ablation import claims
from ablation.claims import CLAIMS, claim_row, facts, judge, measured
from ablation.plan import Plan
from ablation.stats import Effect, mean_effect

BY_ID = {claim.id: claim for claim in CLAIMS}


def effect(low: float, high: float, n: int = 9) -> Effect:
    middle, reach = (low + high) / 2, 0.4 * (high - low)
    return Effect("e", middle, (low, high), (middle - reach, middle + reach), 0.5, "", n)


def test_a_claim_holds_inside_its_region_does_not_outside_and_is_inconclusive_at_its_ends():
    assert judge(effect(0.1, 0.2), 0.0, math.inf) == "holds"
    assert judge(effect(-0.2, -0.1), 0.0, math.inf) == "does not hold"
    assert judge(effect(-0.1, 0.2), 0.0, math.inf) == "inconclusive"
    assert judge(effect(0.0, 0.0, n=0), 0.0, math.inf) == "does not hold"
    assert judge(effect(0.5, 0.5, n=0), 0.0, 1.0) == "holds"
    assert judge(mean_effect("e", [0.1], ""), 0.0, math.inf) == "inconclusive"  # one pair


def test_between_two_bounds_the_90_percent_interval_of_five_pairs_or_more_decides():
    assert judge(effect(-1.1, 1.1), -1.0, 1.0) == "holds"  # two one-sided tests at 5%
    assert judge(effect(-1.1, 1.1, n=4), -1.0, 1.0) == "inconclusive"
    assert judge(effect(-1.1, 1.1), -1.0, math.inf) == "inconclusive"
    assert judge(effect(1.1, 1.2, n=4), -1.0, 1.0) == "does not hold"


@pytest.fixture
def pair(finish):
    plan = Plan(vary={"norm": ["layer", "rms"]}, seeds=5, rerun_seeds=0, learning_rates=(1e-3, 2e-3, 4e-3))

    def loss(run):  # layer loses 0.2 more at the highest learning rate
        noise = 0.001 * math.sin(run.seed * len(run.arm))
        return 3 + abs(math.log2(run.learning_rate / 2e-3)) * (0.1 + 0.2 * (run.arm == "layer")) + noise

    return finish(plan, loss, mean_over_std=0.1, cosine_with_ones=0.6)


def test_a_study_measures_differences_sweeps_the_stream_and_times(pair, finish):
    seconds = {"rms": [1.0], "layer": [2.0]}
    timings = [{"variant": "v", "part": "step", "process": 1, "arm": arm, "seconds": s} for arm, s in seconds.items()]
    found = {e.name: e for e in measured(pair, timings)}
    assert found["rms minus layer"] == pair.comparisons[0].effect and found["step: v"].estimate == 0.5
    spread = found["norm: rms minus layer, spread over the sweep"]
    assert spread.estimate == pytest.approx(-0.2, abs=0.01) and spread.n == 3
    means = found["mean over chance, rms: rms"].estimate
    rows = np.random.default_rng(0).normal(size=(20_000, 128))
    assert means == pytest.approx(0.1 / np.mean(np.abs(rows.mean(1)) / rows.std(1)), rel=0.02)
    assert found["cosine without mean, layer: layer"].estimate == pytest.approx(0.8)
    diverged = finish(pair.plan, lambda run: None if (run.seed, run.learning_rate) == (1001, 4e-3) else 3.0 + run.seed)
    assert {e.name: e.n for e in measured(diverged, [])}[spread.name] == 2  # that seed is left out


def test_the_arithmetic_follows_from_the_norms(monkeypatch):
    found = {e.name: e.estimate for kind in ("rms", "layer") for e in facts(kind)}
    assert found["norm parameters: rms"] == 0.5 and found["float16 overflows: rms"] == 1.0
    assert found["others: layer"] == found["weight 0: rms"] == 0.0 and found["cosine: rms"] == pytest.approx(1.0)
    assert found["gradient by scale: rms"] == pytest.approx(0.1, rel=1e-3)
    x = claims.normal_rows(0)[0] + 0.3
    rms = (x.square().mean() + claims.EPS).sqrt()
    jacobian = torch.eye(256) / rms - torch.outer(x, x) / (256 * rms**3)  # the formula
    off = (jacobian - jacobian.diagonal().diag()).abs().max() / jacobian.diagonal().abs().max()
    assert found["coupling: rms"] == pytest.approx(off.item(), rel=1e-3)
    monkeypatch.setattr(kernels, "normalize", lambda x, weight, *, kind, eps: (x * weight, x))  # no norm at all
    broken = {e.name: e.estimate for e in facts("rms")}
    assert broken["change by scale: rms"] == pytest.approx(9.0) and broken["coupling: rms"] == 0.0


def test_a_row_names_where_it_was_judged_and_takes_the_first_study_that_measured_it(finish, pair):
    plan = Plan(vary={"norm": ["layer", "rms", "center"]}, seeds=5, rerun_seeds=0, learning_rates=(5e-4,))
    studies = [pair, finish(plan, lambda run: run.seed + 3.0)]
    known = [*((study, measured(study, [])) for study in studies), (None, facts("rms"))]
    rows = {claim.id: claim_row(claim, known) for claim in CLAIMS}
    assert rows["C2"]["judged at"].endswith("learning rate 0.002") and "rms minus layer" in rows["C2"]["measured"]
    assert rows["C3"]["judged at"].endswith("learning rate 0.0005 of all arms")
    assert rows["C23"]["judged at"].endswith("learning rate 0.001, 0.002, 0.004")
    assert rows["C8a"]["judged at"] == "arithmetic"
    assert [rows[claim]["verdict"] for claim in ("C6", "C22", "C26")] == ["not measured"] * 3
