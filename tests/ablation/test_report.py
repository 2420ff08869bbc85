"""What a report says follows from the records, and a part that was not measured is left out."""

import dataclasses
import json
import math

import numpy as np
import pytest

from ablation import plots, report
from ablation.plan import Plan
from ablation.records import append
from ablation.stats import mean_effect
from ablation.study import Study, as_table

PAIR = {"norm": ["layer", "rms"]}
PLAN = Plan(vary=PAIR, seeds=6, rerun_seeds=3, learning_rates=(1e-3,))


def losses(run) -> float:
    """Different in every run; rms is lower by 0.1."""
    return 3 + math.sin(run.seed * (1 + len(run.arm))) * 0.01 - 0.1 * run.arm.startswith("rms")


@pytest.fixture
def pair(finish) -> Study:
    return finish(PLAN, losses)


def text(study: Study, folder) -> str:
    return report.markdown_text(study, folder, report.pictures(study))


def rows_of(markdown: str, title: str) -> list[dict[str, str]]:
    """The rows of the table in a part of the report, by column."""
    part = markdown.split(f"## {title}\n")[1].split("\n## ")[0]
    head, _, *lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_headline_orders_arms_by_loss_and_says_verdict_effect_and_pairs(pair, tmp_path):
    rms, layer = report.headline(pair)
    found = pair.comparisons[0]
    low, high = found.effect.interval
    assert layer == f"layer: {pair.final('layer').loss.mean():.4f} nats per token over 6 seeds"
    assert rms.startswith(f"rms: lower, {found.effect.estimate:+.4f} [{low:+.4f}, {high:+.4f}]")
    assert rms.endswith("against layer over 6 pairs")
    (row,) = rows_of(text(pair, tmp_path), "Differences")
    assert row["verdict"] == "lower" and row["pairs"] == "6"
    assert float(row["p (Holm)"]) == pytest.approx(found.p_holm, rel=1e-4)


def test_arms_that_are_open_unfinished_diverged_or_at_the_edge_say_so(finish, pair):
    noisy = finish(dataclasses.replace(PLAN, rerun_seeds=0), lambda run: 3 + math.sin(run.seed * len(run.arm)))
    assert noisy.comparisons[0].verdict == "inconclusive" and noisy.comparisons[0].more_pairs[0] > 6
    assert "it would take " + report.pairs_needed(noisy.comparisons[0]) in " ".join(report.headline(noisy))
    unfinished = Study(pair.plan, pair.rows[pair.rows.seed < 4])
    assert "rms: not finished, 3 of 6 final runs" in report.headline(unfinished)
    diverged = finish(pair.plan, lambda run: None if (run.arm, run.seed) == ("rms", 2) else losses(run))
    assert any(line.startswith("rms: 5 of 6 runs completed") for line in report.headline(diverged))
    swept = Plan(vary=PAIR, seeds=3, rerun_seeds=0, learning_rates=(1e-3, 2e-3, 4e-3))
    assert all("no learning rate" in line for line in report.headline(Study(swept, as_table([]))))
    falling = finish(swept, lambda run: 5 - math.log(run.learning_rate) + 0.001 * math.sin(run.seed * len(run.arm)))
    assert all("is at the edge of the sweep" in line for line in report.headline(falling))


def test_a_shared_learning_rate_is_marked_and_too_few_pairs_are_named(finish, tmp_path):
    few = text(finish(dataclasses.replace(PLAN, seeds=3), losses), tmp_path)
    assert "All arms share the learning rate 0.001" in few and "3 pairs cannot show equivalence" in few
    assert {row["learning rate"] for row in rows_of(few, "Arms")} == {"0.001 (shared)"}
    swept = text(finish(dataclasses.replace(PLAN, learning_rates=(1e-3, 2e-3)), losses), tmp_path)
    assert "share" not in swept and "cannot show" not in swept


def test_a_grid_has_its_effects_as_a_table_and_as_a_picture(finish, tmp_path):
    plan = Plan(vary=PAIR | {"qk_norm": [False, True]}, seeds=5, rerun_seeds=0, learning_rates=(1e-3,))
    study = finish(plan, losses)
    rows = rows_of(text(study, tmp_path), "Effects of the grid")
    assert [row["effect"] for row in rows] == [effect.name for effect in study.effects] and len(rows) == 3
    labels = [label.get_text() for label in report.pictures(study)["effects"].axes[0].get_yticklabels()]
    assert [label.replace("\nx ", " x ") for label in labels] == [effect.name for effect in study.effects]


def test_failed_runs_and_the_spread_of_equal_ones_are_shown(pair, row, tmp_path):
    failed = dataclasses.replace(row(pair.wanted[0], None), status="failed", reason="its process was killed")
    study = Study(pair.plan, as_table([*pair.rows.to_dict("records"), dataclasses.asdict(failed)]))
    (found,) = rows_of(text(study, tmp_path), "Runs that did not complete")
    assert (found["arm"], found["status"], found["reason"]) == (failed.arm, "failed", "its process was killed")
    spreads = rows_of(text(pair, tmp_path), "Rerun spread and placebo")
    assert [(row["perturbation"], row["runs"]) for row in spreads] == [("1e-06", "3"), ("0.05", "3")]


def test_probes_changes_of_the_plan_and_times_are_shown_where_they_are_there(finish, tmp_path):
    study = finish(PLAN, losses, mean_over_std=0.25, kurtosis=3.0)
    assert "Changes of the plan" not in text(study, tmp_path) and "Time of" not in text(study, tmp_path)
    append(tmp_path / "changes.jsonl", {"field": "hours", "before": "12.0", "after": "4.0", "finished_runs": 7})
    seconds = {("a", "rms"): [1, 1, 9], ("a", "layer"): [2, 2, 2], ("b", "rms"): [3, 3, 3], ("b", "layer"): [4, 4, 4]}
    times = [
        {"variant": "eager", "part": "step", "process": process, "arm": arm, "seconds": found}
        for (process, arm), found in seconds.items()
    ]
    (tmp_path / report.TIMINGS).write_text("".join(json.dumps(time) + "\n" for time in times), encoding="utf-8")
    shown = text(study, tmp_path)
    assert [row["mean_over_std"] for row in rows_of(shown, "Inside the model")] == ["0.25", "0.25"]
    assert "first_token_attention" not in shown and rows_of(shown, "Changes of the plan")[0]["after"] == "4.0"
    ratio = mean_effect("eager", [0.5, 0.75], "ratio")  # medians of each process
    (timed,) = rows_of(shown, "Time of a run's parts over that of the baseline")
    assert timed["eager"] == report.with_interval(ratio, ".3f")


def test_the_difference_over_steps_is_the_mean_of_the_pairs_and_absent_where_batches_differ(pair, tmp_path):
    study = Study(pair.plan, pair.rows.assign(curve=[[(1, loss + 1), (2, loss)] for loss in pair.rows.loss]))
    first, last = plots.curve_differences(study, "rms")
    assert (first[0], last[0]) == (1, 2) and "steps" in report.pictures(study)
    assert last[1].estimate == pytest.approx(pair.comparisons[0].effect.estimate) == first[1].estimate
    others = study.rows.assign(batches_hash=study.rows.arm + study.rows.seed.astype(str))
    other = Study(study.plan, others)
    assert "steps" not in report.pictures(other) and "the measure is bits per byte" in text(other, tmp_path)


def test_labels_of_the_learning_rates_do_not_touch_at_the_width_of_a_phone(finish):
    rates = tuple(5e-4 * 2**i for i in range(8))
    figure = plots.sweep(finish(Plan(vary=PAIR, seeds=2, rerun_seeds=0, learning_rates=rates), losses))
    figure.set_dpi(390 / plots.WIDTH)
    figure.draw_without_rendering()
    labels = figure.axes[0].get_xticklabels()
    bases = [label.get_window_extent().x1 for label in labels]
    assert len(labels) == 8 and min(np.diff(bases)) > labels[0].get_fontsize()
