"""From rows to what is still wanted and what is shown; rows are made up, with the type that real runs have."""

import dataclasses
import math

import numpy as np
import pytest

from ablation import study as studies
from ablation.plan import STUDIES, Plan, run_settings
from ablation.records import Worth, as_table
from ablation.stats import holm
from ablation.study import Study

ARMS = {"layer": {"norm": "layer"}, "rms": {"norm": "rms"}, "none": {"norm": "none"}}
PLAN = Plan(arms=ARMS, seeds=5, rerun_seeds=1, learning_rates=(1e-2, 2e-2, 4e-2))


def bowl(run) -> float:
    """A loss that is lowest at a learning rate of 2e-2, with an offset for each arm, and pairs that differ a little."""
    offset = {"layer": 0.0, "rms": 0.001, "none": 0.5}[run.arm]
    wobble = math.sin(run.seed * (1 + len(run.arm))) * 1e-4
    return 3 + math.log(run.learning_rate / 2e-2) ** 2 + offset + wobble + math.sin(run.seed) * 0.01


@pytest.fixture(scope="module")
def study(finish) -> Study:
    return finish(PLAN, bowl)


def test_a_sweep_comes_first_then_reruns_and_final_pairs_at_its_best_learning_rates(study):
    empty = Study(PLAN, as_table([]))
    assert {run.phase for run in empty.runs_in_time} == {"sweep"} and len(empty.runs_in_time) == 3 * 3 * 3
    assert empty.comparisons == [] and not empty.counted_seeds and empty.chosen_learning_rates == {}
    assert study.chosen_learning_rates == dict.fromkeys(ARMS, 2e-2)
    assert study.counted_seeds == {1, 2, 3, 4, 5}
    assert study.rows.phase.value_counts().to_dict() == {"sweep": 27, "rerun": 2, "final": 15}
    assert sorted(study.rows[study.rows.phase == "rerun"].perturbation) == [1e-6, 0.05]


def test_a_learning_rate_at_which_a_run_diverged_or_is_missing_is_not_chosen(finish):
    bad = ("rms", 1002, 2e-2)
    diverged = finish(PLAN, lambda run: None if (run.arm, run.seed, run.learning_rate) == bad else bowl(run))
    assert diverged.chosen_learning_rates["layer"] == 2e-2 != diverged.chosen_learning_rates["rms"]
    rows = diverged.rows
    swept = Study(PLAN, rows[(rows.arm != "rms") | (rows.seed != 1002) | (rows.learning_rate != 2e-2)])
    assert math.isnan(swept.sweep.loc["rms", 2e-2]) and swept.chosen_learning_rates == {}
    nowhere = finish(PLAN, lambda run: None if run.arm == "none" else bowl(run))
    assert {*nowhere.chosen_learning_rates} == {"layer", "rms"}
    assert [c.arm for c in nowhere.comparisons] == ["rms"]


def test_pairs_are_of_one_seed_and_one_device_whatever_the_order_of_the_rows(study):
    by_arm = {c.arm: c for c in Study(PLAN, study.rows.sample(frac=1, random_state=3)).comparisons}
    finals = study.rows[study.rows.phase == "final"].pivot_table("loss", "seed", "arm")
    assert by_arm["rms"].differences == pytest.approx((finals["rms"] - finals["layer"]).tolist())
    assert [c.p_holm for c in study.comparisons] == holm([c.effect.p for c in study.comparisons])
    elsewhere = (study.rows.phase == "final") & (study.rows.arm == "rms") & (study.rows.seed == 3)
    other = Study(PLAN, study.rows.assign(device=study.rows.device.mask(elsewhere, "another GPU")))
    assert {c.arm: c.effect.n for c in other.comparisons} == {"rms": 4, "none": 5}


def test_a_pilot_fixes_the_number_of_final_pairs_and_decides_nothing_else(finish):
    plan = Plan(arms={"a": {"norm": "layer"}, "b": {"norm": "rms"}}, learning_rates=(1e-3,), rerun_seeds=0, margin=0.01)

    def noisy(run):
        return 3 + (np.random.default_rng([run.seed, len(run.phase)]).normal(0, 0.01) if run.arm == "b" else 0)

    study = finish(plan, noisy)
    pilot = study.paired("pilot", "b").difference
    assert len(pilot) == 8 and study.pairs == len(study.rows_of("final", "b")) > 5
    assert len(study.comparisons[0].differences) == study.pairs and not {*pilot} & {*study.comparisons[0].differences}
    started = Study(plan, study.rows[study.rows.phase == "pilot"].iloc[:-1])
    assert started.pairs is None and {run.phase for run in started.remaining} == {"pilot"}


def test_hours_limit_all_runs_and_cut_whole_seeds(finish):
    limited = dataclasses.replace(PLAN, hours=(27 + 2 + 3 * 3 + 1) * 10 / 3600)
    cut = finish(limited, bowl, seconds=20.0, workers=2)
    assert len(cut.counted_seeds) == 3 and {c.effect.n for c in cut.comparisons} == {3} and cut.pairs == 5


def test_runs_that_failed_at_once_do_not_make_others_look_shorter(row):
    plan = dataclasses.replace(PLAN, learning_rates=(1e-3,), seeds=8, rerun_seeds=0, hours=22)
    first = Study(plan, as_table([])).remaining[: 3 * len(plan.all_arms)]
    rows = [row(run, 3.0, seconds=3600.0) for run in first[:-1]] + [row(first[-1], None, status="failed", seconds=0.0)]
    used, of_seed = len(rows) - 1, len(plan.all_arms)
    assert len(Study(plan, as_table(rows)).remaining) == (22 - used) // of_seed * of_seed


def test_reruns_tell_rounding_from_a_change_that_means_nothing(finish):
    moved = finish(dataclasses.replace(PLAN, rerun_seeds=2), lambda run: bowl(run) + 30 * run.perturbation * run.seed)
    assert moved.spread.index.tolist() == [("layer", 2e-2, 1e-6), ("layer", 2e-2, 0.05)]
    assert moved.spread.iloc[:, 0].tolist() == pytest.approx([3e-5 * math.sqrt(2.5), 1.5 * math.sqrt(2.5)])


def test_a_grid_has_main_effects_and_interactions_averaged_within_a_seed(finish):
    def loss(run):
        rms, qk = run.arm.startswith("rms"), "no " not in run.arm
        return 3 + 0.1 * rms + 0.02 * qk + 0.04 * (rms and qk) + 0.001 * run.seed * rms

    vary = {"norm": ["layer", "rms"], "qk_norm": [False, True]}
    grid = Plan(vary=vary, seeds=4, rerun_seeds=0, learning_rates=(1e-3,))
    effects = {effect.name: effect for effect in finish(grid, loss).effects}
    assert {name: round(effect.estimate, 6) for name, effect in effects.items()} == {
        "norm: rms minus layer": 0.1225,
        "qk_norm: True minus False": 0.04,
        "norm: rms minus layer x qk_norm: True minus False": 0.04,
    }
    assert effects["norm: rms minus layer"].n == 4 and effects["norm: rms minus layer"].p < 0.01


def test_arms_without_common_batches_are_compared_in_bits_per_byte(study):
    other = Study(PLAN, study.rows.assign(batches_hash=study.rows.arm))
    conversations = Study(PLAN, other.rows.assign(bits_per_byte=None))
    assert (study.unit, other.unit, conversations.unit) == ("nats per token", "bits per byte", "nats per token")
    pairs = {c.arm: c.effect.estimate for c in study.comparisons}
    assert {c.arm: c.effect.estimate for c in other.comparisons} == pytest.approx({k: v / 2 for k, v in pairs.items()})


def test_a_difference_is_worth_the_steps_that_change_the_baseline_as_much(finish):
    def loss(run) -> float:
        return 5 - 0.5 * math.log(run_settings(plan, run).optimizer.steps) - 0.005 * run.arm.startswith("rms")

    plan = Plan(vary={"norm": ["layer", "rms"], "steps": [600, 1200, 2400]}, seeds=3, rerun_seeds=0)
    by_length = finish(plan, loss).in_steps("layer, steps=1200", -0.005, [-0.006, -0.004])
    percents = [100 * math.expm1(difference / 0.5) for difference in (0.005, 0.004, 0.006)]
    assert (by_length.percent, by_length.low, by_length.high) == pytest.approx(percents, rel=1e-3)
    plan = Plan(vary={"norm": ["layer", "rms"]}, seeds=3, steps=1200, rerun_seeds=0)
    points = [(step, 5 - 0.5 * math.log(step)) for step in range(100, 1300, 100)]
    by_curve = finish(plan, loss, curve=points).in_steps("layer", -0.005, [-9.0, 9.0])
    assert by_curve == Worth(pytest.approx(percents[0], rel=1e-3), -50, 100, "curve")
    assert by_length.source == "length" and finish(plan, loss).in_steps("layer", -0.005, [0, 0]) is None


def test_the_error_of_curves_is_that_of_the_documents():
    lengths = {600: "budget-600", 1200: "budget-1200", 2400: "factorial"}
    loaded = [studies.load(STUDIES / name) for name in lengths.values()]
    losses = [study.mean_loss("layer", {"layer": 1.0}).estimate for study in loaded]
    slope = np.polyfit(np.log([*lengths]), losses, 1)[0]
    shares = [study.in_steps("layer", 0.001 * slope, [0, 0]).percent / 0.1 for study in loaded]
    assert shares == pytest.approx([0.78, 1.07, 1.16], abs=0.005)
