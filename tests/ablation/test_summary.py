"""From rows to arms, valleys and comparisons, and the claims that follow."""

import json
from pathlib import Path

import pytest

from ablation import claims, summary
from ablation.plan import Plan, Run, arms_of, settings_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RATES = {"rms": 1e-3, "layer": 1e-3, "none": 1e-3}


def row(arm, seed, loss, purpose="final", rate=1e-3, **more):
    """A row of results.json."""
    status = "diverged" if loss is None else "done"
    bits = None if loss is None else loss / 2
    common = {"arm": arm, "seed": seed, "purpose": purpose, "learning_rate": rate, "status": status, "spikes": 0}
    return common | {"validation_loss": loss, "bits_per_byte": bits} | more


def test_comparisons_are_paired_by_seed_whatever_the_order_of_the_rows():
    plan = Plan(seeds=3, bound=0.5)
    rows = [row("rms", 3, 4.0), row("layer", 1, 3.0), row("rms", 1, 2.0), row("layer", 3, 5.0), row("rms", 2, 9.0)]
    (found,) = summary.comparisons(plan, rows, RATES)
    assert (found["n"], found["mean"], found["standard_deviation"]) == (2, -1.0, 0.0)  # seed 2 has no partner yet
    assert found["verdict"] == "lower" and found["bits_per_byte"]["mean"] == -0.5
    assert found["interval"] == [-1.0, -1.0]


def test_holm_corrects_over_all_arms():
    plan = Plan(arms=("rms", "layer", "none"), seeds=3)
    rows = [row(arm, s, 3 + d * s) for arm, d in (("layer", 0.0), ("rms", 0.1), ("none", 0.2)) for s in (1, 2, 3)]
    found = summary.comparisons(plan, rows, RATES)
    assert [c["p_holm"] for c in found] == pytest.approx([2 * found[0]["p_value"]] * 2)


def test_an_arm_with_a_diverged_run_reports_k_of_n_and_no_interval():
    plan = Plan(seeds=2)
    configs = {arm.label: settings_of(plan, Run(arm, "final", 1, 1e-3)).model for arm in arms_of(plan)}
    rows = [row("rms", 1, None), row("rms", 2, 3.0), row("layer", 1, 3.0), row("layer", 2, 3.2)]
    rms, layer = summary.arms(plan, rows, RATES, configs)
    assert (rms["n"], rms["of"], rms["mean"], rms["interval"]) == (1, 2, None, None)
    assert (layer["n"], layer["mean"]) == (2, pytest.approx(3.1)) and layer["interval"][0] < 3.1 < layer["interval"][1]
    assert layer["norm_parameters"] == 2 * rms["norm_parameters"] > 0
    assert layer["parameters"] - rms["parameters"] == rms["norm_parameters"]
    assert summary.comparisons(plan, rows, RATES) == []


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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("ablation-*/results.json")), ids=lambda path: path.parent.name)
def test_claims_can_be_read_from_what_was_measured(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    assert claims.claims(results) == results.get("claims", claims.claims(results))


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


def test_rows_of_an_earlier_plan_are_left_out():
    plan = Plan(seeds=2)
    rows = [row(arm, seed, 3.0 + seed) for arm in ("rms", "layer") for seed in (1, 2, 3)]
    rows += [row("rms", seed, 9.0, rate=2e-3) for seed in (1, 2)]
    configs = {arm.label: settings_of(plan, Run(arm, "final", 1, 1e-3)).model for arm in arms_of(plan)}
    assert [a["n"] for a in summary.arms(plan, rows, RATES, configs)] == [2, 2]
    assert summary.comparisons(plan, rows, RATES)[0]["mean"] == 0
    assert summary.comparisons(plan, rows, RATES | {"rms": 2e-3})[0]["mean"] == 4.5


def test_an_arm_whose_rate_lies_at_the_edge_is_marked_and_settles_no_claim():
    plan = Plan(arms=("center", "layer"), seeds=2, learning_rates=(1e-3, 2e-3, 4e-3))
    rates = [(1e-3, 5.0), (2e-3, 4.5), (4e-3, 4.0)]
    rows = [row("center", 1001, loss, "rate", rate) for rate, loss in rates]
    rows += [row("layer", 1001, loss, "rate", rate) for rate, loss in ((1e-3, 3.1), (2e-3, 3.0), (4e-3, 3.2))]
    rows += [row("center", s, 4.0 + s / 1000, rate=4e-3) for s in (1, 2)]
    rows += [row("layer", s, 3.0, rate=2e-3) for s in (1, 2)]
    (found,) = summary.comparisons(plan, rows, {"center": 4e-3, "layer": 2e-3})
    assert found["at_edge"] and found["verdict"] == "higher"
    assert verdicts({"bound": 0.01, "comparisons": [found]})["C3"] == "not resolved"
    assert verdicts({"bound": 0.01, "comparisons": [found | {"at_edge": False}]})["C3"] == "holds"


def table(grid):
    """Results of a grid of arms: (norm, position, dtype, eps, rate, purpose) to a loss as a function of the seed."""
    arms, runs = {}, []
    for (norm, position, dtype, eps, rate, purpose), loss in grid.items():
        label = f"{norm}, {position}, {dtype}, {eps}"
        arms[label] = {"arm": label, "norm": norm, "position": position, "gate": "swiglu", "dtype": dtype, "eps": eps}
        runs += [row(label, seed, loss(seed), purpose, rate) for seed in (1, 2, 3)]
    return {"bound": 0.01, "arms": list(arms.values()), "runs": runs}


def test_precision_and_eps_are_judged_by_paired_intervals():
    def answers(layer_cost, eps_cost):
        grid = {}
        for norm in ("rms", "layer"):
            for eps in (1e-5, 1e-8):
                extra = eps_cost if eps == 1e-8 else 0.0
                cost = extra + (layer_cost if norm == "layer" else 0.0)
                grid[norm, "pre", "float32", eps, 1e-3, "final"] = lambda s, e=extra: 3 + s + e * (1 + s / 100)
                grid[norm, "pre", "bfloat16", eps, 1e-3, "final"] = lambda s, e=cost: 3.1 + s + e * (1 + s / 100)
        return verdicts(table(grid))

    assert (answers(0.1, 0.0)["C6"], answers(0.0, 0.0)["C6"]) == ("holds", "does not hold")
    assert (answers(0.0, 0.0)["C11"], answers(0.0, 0.1)["C11"]) == ("holds", "does not hold")
    halves = {("rms", "pre", "bfloat16", eps, 1e-3, "final"): (lambda s: 3.0) for eps in (1e-5, 1e-8)}
    assert verdicts(table(halves))["C11"] == "not tested"  # it is a claim about float32


def test_positions_are_judged_by_how_much_the_rate_matters():
    def answer(pre, post, noise):
        grid = {}
        for norm, sign in (("rms", 1), ("layer", -1)):
            for position, width in (("pre", pre), ("post", post)):
                grid[norm, position, "auto", 1e-5, 1e-3, "rate"] = lambda s: 3.0 + s
                worse = noise * sign if position == "post" else 0.0
                grid[norm, position, "auto", 1e-5, 2e-3, "rate"] = lambda s, w=width + worse: 3.0 + s + w + s / 1000
        return verdicts(table(grid))["C10"]

    assert answer(0.1, 0.5, 0.01) == "holds"
    assert answer(0.5, 0.1, 0.01) == "does not hold"
    assert answer(0.3, 0.3, 0.1) == "not resolved"


def test_switching_is_judged_by_the_interval_over_seeds():
    def at_once(*costs):
        rows = [{"variant": "rms at once", "before": 3.0, "validation_loss": 3.0 + c, "seed": 1} for c in costs]
        return verdicts({"bound": 0.01, "switched": rows})["C14"]

    assert at_once(0.40, 0.41, 0.42) == "holds"
    assert at_once(0.001, 0.002, 0.001) == "does not hold"
    assert at_once(0.0, 0.4) == at_once(0.4) == "not resolved"
