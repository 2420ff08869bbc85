"""What RMSNorm, the mean and the bias do, derived from the arms of a study, and verdicts on published claims."""

import dataclasses
import math
from pathlib import Path

import pytest

from ablation import study
from ablation.plan import Plan, find_plan, load_plan
from ablation.stats import Effect, mean_effect
from studies import claims
from studies.claims import judge
from studies.effects import contrasts, draw

STUDIES = Path(__file__).parents[2] / "studies"


def test_parts_are_found_for_each_learning_rate_and_for_branches_against_the_run_that_they_leave(finish):
    def loss(run):
        no_bias, no_mean = "without bias" in run.arm or run.arm.startswith("rms from"), "rms" in run.arm
        later = "2/4" in run.arm or run.arm.endswith("0.002")
        return 3 + 0.01 * no_bias * (1 + later) + 0.001 * no_mean + 0.002 * (no_bias and no_mean) + 0.1 * run.seed

    bias = {name: {"norm": "layer", "norm_bias": "without" not in name} for name in ("layer", "layer without bias")}
    rates = Plan(arms=bias, vary={"learning_rate": [1e-3, 2e-3]}, seeds=2, rerun_seeds=0)
    branches = dataclasses.replace(load_plan(find_plan("branches")), seeds=2)
    found = [contrasts(finish(plan, loss)) for plan in (rates, branches)]
    rounded = [{at: {k: round(e.estimate, 6) for k, e in known.items()} for at, known in f.items()} for f in found]
    assert rounded[0] == {"learning_rate=0.001": {"no bias": 0.01}, "learning_rate=0.002": {"no bias": 0.02}}
    quarter = {"RMSNorm minus LayerNorm": 0.013, "no mean": 0.002, "no bias": 0.011}
    half = {"RMSNorm minus LayerNorm": 0.023, "no mean": 0.002, "no bias": 0.021}
    assert rounded[1] == {"quarter 1": quarter, "quarter 2": half, "quarter 3": quarter}
    three = [("layer", {}), ("layer 0.5", {"weight_decay": 0.5}), ("rms 0.5", {"weight_decay": 0.5, "norm": "rms"})]
    for order in (three, [three[0], *three[:0:-1]]):  # a baseline with another setting is nobody's partner
        arms = {name: {"norm": "layer"} | settings for name, settings in order}
        [(group, known)] = contrasts(finish(Plan(arms=arms, seeds=2, rerun_seeds=0), lambda run: len(run.arm))).items()
        assert group == "weight_decay=0.5" and known["RMSNorm minus LayerNorm"].estimate == len("rms") - len("layer")


def test_they_are_the_effects_of_a_grid_and_drawn_for_every_study():
    found, budget = (study.load(STUDIES / name) for name in ("factorial", "budget-600"))
    for effect, name in zip(found.effects, ("no mean", "no bias"), strict=False):
        assert contrasts(found)[""][name].interval == pytest.approx(effect.interval)
    drawn = draw([found, budget]).axes[0]
    rows = ["small model, 2,400 steps\n30 pairs", "small model, 600 steps\n6 pairs"]
    rows.append("all at rate 5e-4, exploratory\n77 pairs")
    assert [label.get_text() for label in drawn.get_yticklabels()] == rows


def test_times_are_means_over_processes_of_medians_of_ratios_within_turns(monkeypatch):
    processes = [([1, 1, 9], [2, 2, 2]), ([3, 3, 3], [4, 4, 4])]
    tables = [{"seconds": {"eager, rms": {"step": rms}, "eager, layer": {"step": layer}}} for rms, layer in processes]
    monkeypatch.setattr(claims, "read_speed", lambda _: tables)
    [ratio] = claims.norm_times("record", "step")
    assert (ratio.name, ratio.estimate, ratio.n) == ("step: eager", 0.625, 2)  # the mean of 0.5 and 0.75


def effect(low: float, high: float, n: int = 9) -> Effect:
    middle, reach = (low + high) / 2, 0.4 * (high - low)
    return Effect("e", middle, (low, high), (middle - reach, middle + reach), 0.5, "", n)


def test_a_claim_holds_inside_its_region_does_not_outside_and_is_inconclusive_at_its_ends():
    assert judge(effect(0.1, 0.2), 0.0, math.inf) == "holds"
    assert judge(effect(-0.2, -0.1), 0.0, math.inf) == "does not hold"
    assert judge(effect(-0.1, 0.2), 0.0, math.inf) == "inconclusive"
    assert judge(effect(0.0, 0.0, n=0), 0.0, math.inf) == "does not hold"
    assert judge(mean_effect("e", [0.1], ""), 0.0, math.inf) == "inconclusive"  # one pair
    # Between two bounds the 90% interval of five pairs decides: two one-sided tests at 5%.
    assert judge(effect(-1.1, 1.1), -1.0, 1.0) == "holds"
    assert judge(effect(-1.1, 1.1, n=4), -1.0, 1.0) == "inconclusive"
    assert judge(effect(-1.1, 1.1), -1.0, math.inf) == "inconclusive"
    assert judge(effect(1.1, 1.2, n=4), -1.0, 1.0) == "does not hold"
