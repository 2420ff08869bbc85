"""From rows to what is still wanted and what is shown; rows are made up, with the type that real runs have."""

import dataclasses
import math
import random

import numpy as np
import pytest

from ablation.plan import Plan
from ablation.study import Study, as_table

ARMS = {"layer": {"norm": "layer"}, "rms": {"norm": "rms"}, "none": {"norm": "none"}}
PLAN = Plan(arms=ARMS, seeds=5, rerun_seeds=1, learning_rates=(1e-2, 2e-2, 4e-2))


def rows_of(study: Study) -> list[dict]:
    """The rows as `finish` takes them."""
    return study.rows.astype(object).where(study.rows.notna(), None).to_dict("records")


def test_a_sweep_comes_first_then_reruns_and_final_pairs_at_its_best_learning_rates(finish, bowl):
    empty = Study(PLAN, as_table([]))
    assert {run.phase for run in empty.wanted} == {"sweep"} and len(empty.wanted) == 3 * 3 * 3
    assert empty.comparisons == [] and not empty.final_seeds and empty.learning_rates == {}
    study = finish(PLAN, bowl)
    assert study.learning_rates == dict.fromkeys(ARMS, 2e-2) and study.final_seeds == {1, 2, 3, 4, 5}
    counts = study.rows.phase.value_counts().to_dict()
    assert counts == {"sweep": 27, "rerun": 2, "final": 15}
    assert study.wanted[0].seed == 1001 and study.of("final", "rms").seed.tolist() == [1, 2, 3, 4, 5]
    assert sorted(study.rows[study.rows.phase == "rerun"].perturbation) == [1e-6, 0.05]


def test_a_learning_rate_at_which_a_run_diverged_or_is_missing_is_not_chosen(finish, bowl):
    bad = ("rms", 1002, 2e-2)
    study = finish(PLAN, lambda run: None if (run.arm, run.seed, run.learning_rate) == bad else bowl(run))
    assert study.best_rates["layer"] == 2e-2 != study.best_rates["rms"]
    rows = study.rows
    swept = Study(PLAN, rows[(rows.arm != "rms") | (rows.seed != 1002) | (rows.learning_rate != 2e-2)])
    assert math.isnan(swept.sweep.loc["rms", 2e-2]) and swept.learning_rates == {}
    nowhere = finish(PLAN, lambda run: None if run.arm == "none" else bowl(run))
    assert {*nowhere.learning_rates} == {"layer", "rms"} and [c.arm for c in nowhere.comparisons] == ["rms"]


def test_pairs_are_of_a_seed_whatever_the_order_of_the_rows(finish, bowl):
    study = finish(PLAN, bowl)
    shuffled = rows_of(study)
    random.Random(3).shuffle(shuffled)
    found = {c.arm: c for c in Study(PLAN, as_table(shuffled)).comparisons}
    finals = study.rows[study.rows.phase == "final"].pivot_table("loss", "seed", "arm")
    assert found["rms"].differences == pytest.approx((finals["rms"] - finals["layer"]).tolist())
    assert [c.arm for c in study.comparisons] == ["rms", "none"] and found["none"].comparisons == 2


def test_arms_of_a_pair_never_come_from_different_devices(finish, bowl, row):
    study = finish(PLAN, bowl)
    rows = rows_of(study)
    for each in rows:
        if (each["phase"], each["arm"], each["seed"]) == ("final", "rms", 3):
            each["device"] = "another GPU"
    found = {c.arm: c.effect.n for c in Study(PLAN, as_table(rows)).comparisons}
    assert found == {"rms": 4, "none": 5}


def test_a_pilot_fixes_the_number_of_final_pairs_and_decides_nothing_else(finish):
    plan = Plan(arms={"a": {"norm": "layer"}, "b": {"norm": "rms"}}, learning_rates=(1e-3,), rerun_seeds=0, margin=0.01)

    def noisy(run):
        return 3 + (np.random.default_rng([run.seed, len(run.phase)]).normal(0, 0.01) if run.arm == "b" else 0)

    study = finish(plan, noisy)
    pilot = study.paired("pilot", "b").difference
    assert len(pilot) == 8 and study.pairs == len(study.final("b")) > 5
    assert len(study.comparisons[0].differences) == study.pairs and not {*pilot} & {*study.comparisons[0].differences}
    started = Study(plan, study.rows[study.rows.phase == "pilot"].iloc[:-1])
    assert started.pairs is None and {run.phase for run in started.missing(started.wanted)} == {"pilot"}


def test_hours_limit_all_runs_and_cut_whole_seeds(finish, bowl):
    limited = dataclasses.replace(PLAN, hours=(27 + 2 + 3 * 3 + 1) * 10 / 3600)
    study = finish(limited, bowl, seconds=20.0, workers=2)
    assert len(study.final_seeds) == 3 and {c.effect.n for c in study.comparisons} == {3} and study.pairs == 5
    hardly = finish(dataclasses.replace(PLAN, hours=30 / 3600), bowl, seconds=20.0, workers=2)
    assert hardly.comparisons == [] and not hardly.final_seeds


def test_reruns_tell_rounding_from_a_change_that_means_nothing(finish, bowl):
    study = finish(dataclasses.replace(PLAN, rerun_seeds=2), lambda run: bowl(run) + 30 * run.perturbation * run.seed)
    assert study.spread.index.tolist() == [("layer", 2e-2, 1e-6), ("layer", 2e-2, 0.05)]
    assert study.spread.iloc[:, 0].tolist() == pytest.approx([3e-5 * math.sqrt(2.5), 1.5 * math.sqrt(2.5)])
    diverged = finish(PLAN, lambda run: None if run.perturbation == 0.05 else bowl(run))
    assert diverged.spread.iloc[:, 0].isna().tolist() == [False, True]


GRID = Plan(vary={"norm": ["layer", "rms"], "qk_norm": [False, True]}, seeds=4, rerun_seeds=0, learning_rates=(1e-3,))


def test_a_grid_has_main_effects_and_interactions_averaged_within_a_seed(finish):
    def loss(run):
        rms, qk = run.arm.startswith("rms"), "no " not in run.arm
        return 3 + 0.1 * rms + 0.02 * qk + 0.04 * (rms and qk) + 0.001 * run.seed * rms

    found = {effect.name: effect for effect in finish(GRID, loss).effects}
    assert {name: round(effect.estimate, 6) for name, effect in found.items()} == {
        "norm: rms minus layer": 0.1225,
        "qk_norm: True minus False": 0.04,
        "norm: rms minus layer x qk_norm: True minus False": 0.04,
    }
    assert found["norm: rms minus layer"].n == 4 and found["norm: rms minus layer"].p < 0.01
    assert finish(PLAN, lambda run: 3.0).effects == []  # one setting is no grid


def test_arms_without_common_batches_are_compared_in_bits_per_byte(finish, bowl):
    study = finish(PLAN, bowl)
    rows = [dict(row, batches_hash=row["arm"]) for row in rows_of(study)]
    other = Study(PLAN, as_table(rows))
    assert (study.unit, other.unit) == ("nats per token", "bits per byte")
    pairs = {c.arm: c.effect.estimate for c in study.comparisons}
    assert {c.arm: c.effect.estimate for c in other.comparisons} == pytest.approx({k: v / 2 for k, v in pairs.items()})
