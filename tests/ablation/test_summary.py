"""From rows to arms, valleys and comparisons, and the claims that follow."""

import pytest

from ablation import claims, summary
from ablation.plan import Plan, Run, arms_of, settings_of


def row(arm, seed, loss, purpose="final", rate=1e-3, **more):
    """A row of results.json."""
    status = "diverged" if loss is None else "done"
    bits = None if loss is None else loss / 2
    common = {"arm": arm, "seed": seed, "purpose": purpose, "learning_rate": rate, "status": status, "spikes": 0}
    return common | {"validation_loss": loss, "bits_per_byte": bits} | more


def test_comparisons_are_paired_by_seed_whatever_the_order_of_the_rows():
    plan = Plan(seeds=3, bound=0.5)
    rows = [row("rms", 3, 4.0), row("layer", 1, 3.0), row("rms", 1, 2.0), row("layer", 3, 5.0), row("rms", 2, 9.0)]
    (found,) = summary.comparisons(plan, rows)
    assert (found["n"], found["mean"], found["standard_deviation"]) == (2, -1.0, 0.0)  # seed 2 has no partner yet
    assert found["verdict"] == "lower" and found["bits_per_byte"]["mean"] == -0.5
    assert found["interval"] == [-1.0, -1.0]


def test_holm_corrects_over_all_arms():
    plan = Plan(arms=("rms", "layer", "none"), seeds=3)
    rows = [row(arm, s, 3 + d * s) for arm, d in (("layer", 0.0), ("rms", 0.1), ("none", 0.2)) for s in (1, 2, 3)]
    found = summary.comparisons(plan, rows)
    assert [c["p_holm"] for c in found] == pytest.approx([2 * found[0]["p_value"]] * 2)


def test_an_arm_with_a_diverged_run_reports_k_of_n_and_no_interval():
    plan = Plan(seeds=2)
    configs = {arm.label: settings_of(plan, Run(arm, "final", 1, 1e-3)).model for arm in arms_of(plan)}
    rows = [row("rms", 1, None), row("rms", 2, 3.0), row("layer", 1, 3.0), row("layer", 2, 3.2)]
    rms, layer = summary.arms(plan, rows, configs)
    assert (rms["n"], rms["of"], rms["mean"], rms["interval"]) == (1, 2, None, None)
    assert (layer["n"], layer["mean"]) == (2, pytest.approx(3.1)) and layer["interval"][0] < 3.1 < layer["interval"][1]
    assert layer["norm_parameters"] == 2 * rms["norm_parameters"] > 0
    assert layer["parameters"] - rms["parameters"] == rms["norm_parameters"]
    assert summary.comparisons(plan, rows) == []


def test_each_arms_rate_is_the_lowest_of_its_valley_and_diverged_rates_are_none():
    plan = Plan(arms=("rms", "layer", "none"), learning_rates=(1e-3, 2e-3, 4e-3))
    rows = [row("rms", 1001, loss, "rate", rate) for rate, loss in ((1e-3, 3.2), (2e-3, 3.1), (4e-3, None))]
    rows += [row("layer", 1001, loss, "rate", rate) for rate, loss in ((1e-3, 3.0), (2e-3, 3.1), (4e-3, 3.5))]
    rows += [row("none", 1001, None, "rate", rate) for rate in (1e-3, 2e-3, 4e-3)]
    rms, layer, none = summary.valleys(plan, rows)
    assert (rms["best"], rms["at_edge"], rms["losses"]) == (2e-3, False, [3.2, 3.1, None])
    assert (layer["best"], layer["at_edge"]) == (1e-3, True)
    assert none["best"] is None and none["diverged"] == 3
    assert summary.chosen_rates(plan, rows, 7e-3) == {"rms": 2e-3, "layer": 1e-3}
    assert summary.chosen_rates(Plan(), [], 7e-3) == {"rms": 7e-3, "layer": 7e-3}


def verdicts(results):
    return {c["id"]: c["verdict"] for c in claims.claims(results)}


def test_claims_that_were_not_tested_say_so():
    assert set(verdicts({"bound": 0.01}).values()) == {"not tested"}
    assert list(verdicts({"bound": 0.01})) == [f"C{i}" for i in range(1, 15)]


@pytest.mark.parametrize(
    ("interval", "verdict"), [([0.80, 0.90], "holds"), ([0.97, 1.01], "does not hold"), ([0.90, 0.97], "not resolved")]
)
def test_the_claim_of_speed_needs_seven_percent_of_a_whole_step(interval, verdict):
    step = {
        "build": "eager",
        "part": "step",
        "rms": 1.0,
        "layer": 1.1,
        "ratio": sum(interval) / 2,
        "interval": interval,
    }
    results = {"bound": 0.01, "speed": [step, step | {"part": "norm forward", "interval": [0.1, 0.2]}]}
    assert verdicts(results)["C1"] == verdict


def compared(arm, baseline, mean, half, verdict):
    return {"arm": arm, "baseline": baseline, "mean": mean, "interval": [mean - half, mean + half], "verdict": verdict}


def test_claims_about_losses_follow_from_the_intervals():
    def results(*comparisons):
        return {"bound": 0.01, "comparisons": list(comparisons)}

    assert verdicts(results(compared("rms", "layer", 0.0, 0.005, "equivalent")))["C2"] == "holds"
    assert verdicts(results(compared("rms", "layer", 0.0, 0.5, "not resolved, needs 99 seeds")))["C2"] == "not resolved"
    assert verdicts(results(compared("rms", "layer", 0.3, 0.1, "higher")))["C2"] == "does not hold"
    assert verdicts(results(compared("center", "layer", 0.5, 0.1, "higher")))["C3"] == "holds"
    assert verdicts(results(compared("center", "layer", 0.02, 0.01, "higher")))["C3"] == "does not hold"
    assert verdicts(results(compared("batch", "layer", 0.5, 0.1, "higher")))["C13"] == "holds"
    gates = [compared(gate, "swiglu", mean, 0.01, "higher") for gate, mean in (("geglu", 0.05), ("relu", 0.1))]
    assert verdicts(results(*gates))["C12"] == "holds"
    worse = compared("relu", "swiglu", -0.1, 0.01, "lower")
    assert verdicts(results(gates[0], worse))["C12"] == "does not hold"


def test_claims_about_valleys_eps_precision_and_switching_follow_from_their_numbers():
    valley = {"rates": [1, 2], "diverged": 0, "spikes": 0, "runs": 2}
    results = {"bound": 0.01, "valleys": [valley | {"arm": "rms, pre", "losses": [3.0, 3.1]}]}
    assert verdicts(results)["C10"] == "not tested"
    results["valleys"].append(valley | {"arm": "rms, post", "losses": [3.0, 4.1], "diverged": 1})
    assert verdicts(results)["C10"] == "holds"
    arms = [{"arm": f"rms, float32, eps {e}", "mean": 3 + d} for e, d in (("1e-05", 0.0), ("1e-08", 0.004))]
    assert verdicts({"bound": 0.01, "arms": arms})["C11"] == "holds"
    arms += [{"arm": "rms, bfloat16, eps 1e-05", "mean": 3.001}, {"arm": "layer, bfloat16, eps 1e-05", "mean": 3.05}]
    arms += [{"arm": "layer, float32, eps 1e-05", "mean": 3.0}]
    assert verdicts({"bound": 0.01, "arms": arms})["C6"] == "holds"
    switched = [{"variant": "rms at once", "before": 3.0, "validation_loss": 3.4, "seed": 1}]
    assert verdicts({"bound": 0.01, "switched": switched})["C14"] == "holds"
