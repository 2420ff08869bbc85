"""What a report says follows from the records, and a part that was not measured is left out."""

import dataclasses
import math

import pytest

from ablation import report
from ablation.plan import Plan
from ablation.records import append
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


def test_the_numbers_are_those_of_the_study(pair, tmp_path):
    rms, layer = report.headline(pair)  # in order of the loss
    found = pair.comparisons[0]
    low, high = found.effect.interval
    loss = f"{pair.final('layer').loss.mean():.4f}"
    assert layer.startswith(f"layer: {loss} nats per token")
    assert rms.startswith(f"rms: lower, {found.effect.estimate:+.4f} [{low:+.4f}, {high:+.4f}]")
    shown = text(pair, tmp_path)
    (row,) = rows_of(shown, "Differences")
    assert row["verdict"] == "lower" and row["pairs"] == "6"
    assert float(row["p (Holm)"]) == pytest.approx(found.p_holm, rel=1e-4)
    assert rows_of(shown, "Arms")[0]["nats per token"].split()[0] == loss
    spreads = rows_of(shown, "Rerun spread and placebo")
    assert [(row["perturbation"], row["runs"]) for row in spreads] == [("1e-06", "3"), ("0.05", "3")]


def test_arms_that_are_open_unfinished_diverged_or_at_the_edge_say_so(finish, pair):
    noisy = finish(dataclasses.replace(PLAN, rerun_seeds=0), lambda run: 3 + math.sin(run.seed * len(run.arm)))
    assert noisy.comparisons[0].verdict == "inconclusive" and noisy.comparisons[0].more_pairs[0] > 6
    assert "it would take " + report.pairs_needed(noisy.comparisons[0]) in " ".join(report.headline(noisy))
    unfinished = Study(pair.plan, pair.rows[pair.rows.seed < 4])
    assert "rms: not finished, 3 of 6 final runs" in report.headline(unfinished)
    diverged = finish(pair.plan, lambda run: None if (run.arm, run.seed) == ("rms", 2) else losses(run))
    assert any(line.startswith("rms: 5 of 6 runs completed") for line in report.headline(diverged))
    swept = Plan(vary=PAIR, seeds=3, rerun_seeds=0, learning_rates=(1e-3, 2e-3, 4e-3))
    falling = finish(swept, lambda run: 5 - math.log(run.learning_rate) + 0.001 * math.sin(run.seed * len(run.arm)))
    assert all("is at the edge of the sweep" in line for line in report.headline(falling))


def test_a_shared_learning_rate_is_marked_and_too_few_pairs_are_named(finish, tmp_path):
    few = text(finish(dataclasses.replace(PLAN, seeds=3), losses), tmp_path)
    assert "All arms share the learning rate 0.001" in few and "3 pairs cannot show equivalence" in few
    assert {row["learning rate"] for row in rows_of(few, "Arms")} == {"0.001 (shared)"}
    swept = text(finish(dataclasses.replace(PLAN, learning_rates=(1e-3, 2e-3)), losses), tmp_path)
    assert "share" not in swept and "cannot show" not in swept


def test_effects_of_a_grid_and_failed_runs_are_shown(finish, row, tmp_path):
    plan = Plan(vary=PAIR | {"qk_norm": [False, True]}, seeds=5, rerun_seeds=0, learning_rates=(1e-3,))
    study = finish(plan, losses)
    shown = [row["mean and 95% interval"].split()[0] for row in rows_of(text(study, tmp_path), "Effects of the grid")]
    assert shown == [f"{effect.estimate:+.4f}" for effect in study.effects] and len(shown) == 3
    failed = dataclasses.replace(row(study.wanted[0], None), status="failed", reason="its process was killed")
    study = Study(plan, as_table([*study.rows.to_dict("records"), dataclasses.asdict(failed)]))
    (found,) = rows_of(text(study, tmp_path), "Runs that did not complete")
    assert (found["arm"], found["status"], found["reason"]) == (failed.arm, "failed", "its process was killed")


def test_probes_changes_of_the_plan_and_times_are_shown_where_they_are_there(finish, tmp_path):
    study = finish(PLAN, losses, mean_over_std=0.25)
    assert "Changes of the plan" not in text(study, tmp_path) and "Time of" not in text(study, tmp_path)
    append(tmp_path / "changes.jsonl", {"field": "hours", "before": "12.0", "after": "4.0", "finished_runs": 7})
    seconds = {("a", "rms"): [1, 1, 9], ("a", "layer"): [2, 2, 2], ("b", "rms"): [3, 3, 3], ("b", "layer"): [4, 4, 4]}
    for (process, arm), found in seconds.items():
        time = {"variant": "eager", "part": "step", "process": process, "arm": arm, "seconds": found}
        append(tmp_path / report.TIMINGS, time)
    shown = text(study, tmp_path)
    assert [row["mean_over_std"] for row in rows_of(shown, "Inside the model")] == ["0.25", "0.25"]
    assert rows_of(shown, "Changes of the plan")[0]["after"] == "4.0"
    (timed,) = rows_of(shown, "Time of a run's parts over that of the baseline")
    assert timed["eager"].startswith("0.625 ")  # the mean of 0.5 and 0.75, the medians of each process
