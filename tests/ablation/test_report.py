"""What a report says follows from the records, and a part that was not measured is left out."""

import dataclasses
import json
import math
import shutil
import sys

import numpy as np
import pytest

from ablation import plots, report
from ablation.plan import Plan
from ablation.records import Change, append
from ablation.stats import mean_effect
from ablation.study import Study, as_table

PAIR = {"norm": ["layer", "rms"]}
GRID = {"norm": ["layer", "rms"], "qk_norm": [False, True]}


def losses(run) -> float:
    """Different in every run; rms is lower by 0.1."""
    return 3 + math.sin(run.seed * (1 + len(run.arm))) * 0.01 - 0.1 * run.arm.startswith("rms")


@pytest.fixture
def pair(finish) -> Study:
    return finish(Plan(vary=PAIR, seeds=6, rerun_seeds=3, learning_rates=(1e-3,)), losses)


def text(study: Study, folder) -> str:
    return report.markdown_text(study, folder, report.pictures(study))


def rows_of(markdown: str, title: str) -> list[dict[str, str]]:
    """The rows of the table in a part of the report, by column."""
    part = markdown.split(f"## {title}\n")[1].split("\n## ")[0]
    head, _, *lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_headline_says_of_every_arm_the_verdict_the_effect_and_the_pairs(pair):
    layer, rms = sorted(report.headline(pair))
    found = pair.comparisons[0].effect
    assert f"{pair.final('layer').loss.mean():.4f} nats per token over 6 seeds" in layer
    assert rms.startswith(f"rms: lower, {found.estimate:+.4f} [{found.interval[0]:+.4f}, {found.interval[1]:+.4f}]")
    assert rms.endswith("against layer over 6 pairs")


def test_the_headline_orders_arms_by_their_loss(pair):
    assert [line.split(":")[0] for line in report.headline(pair)] == ["rms", "layer"]


def test_an_inconclusive_arm_names_the_pairs_that_it_would_take(finish):
    study = finish(Plan(vary=PAIR, seeds=6, rerun_seeds=0), lambda run: 3 + math.sin(run.seed * len(run.arm)))
    needed = study.comparisons[0].more_pairs
    assert study.comparisons[0].verdict == "inconclusive" and needed[0] > 6
    assert f"it would take {report.pairs_needed(study.comparisons[0])}" in " ".join(report.headline(study))


def test_a_chaotic_comparison_says_how_far_equal_runs_drift_apart(finish):
    def chaotic(run):
        return losses(run) + math.sin(run.seed) * (run.phase == "rerun")

    study = finish(Plan(vary=PAIR, seeds=6, rerun_seeds=3, learning_rates=(1e-3,)), chaotic)
    spread = study.comparisons[0].rerun_spread
    assert f"equal runs drift apart by {spread:.4f}" in next(x for x in report.headline(study) if x.startswith("rms"))


def test_unfinished_diverged_and_unchosen_arms_say_so(finish, row, pair):
    unfinished = Study(pair.plan, pair.rows[pair.rows.seed < 4])
    assert "rms: not finished, 3 of 6 final runs" in report.headline(unfinished)
    diverged = finish(pair.plan, lambda run: None if (run.arm, run.seed) == ("rms", 2) else losses(run))
    assert any(line.startswith("rms: 5 of 6 runs completed") for line in report.headline(diverged))
    swept = Plan(vary=PAIR, seeds=2, learning_rates=(1e-3, 2e-3))
    assert all("no learning rate" in line for line in report.headline(Study(swept, as_table([]))))


def test_an_arm_at_the_edge_of_the_sweep_and_one_that_is_not_well_tuned_say_so(finish, tmp_path):
    plan = Plan(vary=PAIR, seeds=3, rerun_seeds=0, learning_rates=(1e-3, 2e-3, 4e-3))
    falling = finish(plan, lambda run: 5 - math.log(run.learning_rate) + 0.001 * math.sin(run.seed * len(run.arm)))
    assert all("is at the edge of the sweep" in line for line in report.headline(falling))
    assert {row["learning rate"] for row in rows_of(text(falling, tmp_path), "Arms")} == {"0.064 (at the edge)"}

    def misled(run):  # the final runs end higher than those of the sweep
        return losses(run) + 0.1 * (run.learning_rate != 2e-3) + (run.phase == "final")

    study = finish(plan, misled)
    assert all("not well tuned: at " in line for line in report.headline(study))
    assert rows_of(text(study, tmp_path), "Differences")[0]["arm"] == "rms minus layer (not well tuned)"


def test_a_shared_learning_rate_is_marked_and_too_few_pairs_are_named(finish, tmp_path):
    few = text(finish(Plan(vary=PAIR, seeds=3, rerun_seeds=0, learning_rates=(1e-3,)), losses), tmp_path)
    assert "All arms share the learning rate 0.001" in few and "3 pairs cannot show equivalence" in few
    assert {row["learning rate"] for row in rows_of(few, "Arms")} == {"0.001 (shared)"}
    swept = text(finish(Plan(vary=PAIR, seeds=5, rerun_seeds=0, learning_rates=(1e-3, 2e-3)), losses), tmp_path)
    assert "share" not in swept and "cannot show" not in swept


def test_the_table_of_differences_has_the_numbers_of_the_comparisons(pair, tmp_path):
    (row,) = rows_of(text(pair, tmp_path), "Differences")
    found = pair.comparisons[0]
    assert row["verdict"] == found.verdict and row["pairs"] == "6"
    assert float(row["p (Holm)"]) == pytest.approx(found.p_holm, rel=1e-4)
    assert row["nats per token, mean and 95% interval"] == report.with_interval(found.effect)


def test_a_grid_has_its_effects_as_a_table_and_as_a_picture(finish, tmp_path):
    study = finish(Plan(vary=GRID, seeds=5, rerun_seeds=0, learning_rates=(1e-3,)), losses)
    rows = rows_of(text(study, tmp_path), "Effects of the grid")
    assert [row["effect"] for row in rows] == [effect.name for effect in study.effects] and len(rows) == 3
    labels = [label.get_text() for label in report.pictures(study)["effects"].axes[0].get_yticklabels()]
    assert [label.replace("\nx ", " x ") for label in labels] == [effect.name for effect in study.effects]


def test_runs_that_failed_or_diverged_are_named_with_their_reason(pair, row, tmp_path):
    failed = dataclasses.replace(row(pair.wanted[0], None), status="failed", reason="its process was killed")
    study = Study(pair.plan, as_table([*pair.rows.to_dict("records"), dataclasses.asdict(failed)]))
    (found,) = rows_of(text(study, tmp_path), "Runs that did not complete")
    assert (found["arm"], found["status"], found["reason"]) == (failed.arm, "failed", "its process was killed")
    assert "did not complete" not in text(pair, tmp_path)


def test_the_rerun_spread_and_the_placebo_are_root_mean_squares_of_their_runs(pair, tmp_path):
    (row,) = rows_of(text(pair, tmp_path), "Rerun spread and placebo")
    for size in (1e-6, 0.05):
        differences = pair.spread("layer", 1e-3, size)
        expected = f"{np.sqrt(np.mean(np.square(differences))):.4f} (3 runs)"
        assert row[f"root mean square difference, weights changed by {size:g}"] == expected


def test_probes_changes_of_the_plan_and_times_are_shown_where_they_are_there(finish, tmp_path):
    study = finish(Plan(vary=PAIR, seeds=2, rerun_seeds=0), losses, mean_over_std=0.25, kurtosis=3.0)
    for title in ("Changes of the plan", "Time of"):
        assert title not in text(study, tmp_path)
    append(tmp_path / "changes.jsonl", Change("hours", "12.0", "4.0", 7))
    timing = {"variant": "eager", "part": "step", "peak_bytes": None}
    times = [
        timing | {"process": p, "arm": arm, "seconds": [t, t]} for p in (1, 2) for arm, t in (("rms", 1), ("layer", 2))
    ]
    (tmp_path / report.TIMINGS).write_text("\n".join(map(json.dumps, times)), encoding="utf-8")
    shown = text(study, tmp_path)
    assert [row["mean_over_std"] for row in rows_of(shown, "Inside the model")] == ["0.25", "0.25"]
    assert "first_token_attention" not in shown
    assert rows_of(shown, "Changes of the plan")[0]["after"] == "4.0"
    assert rows_of(shown, "Time of a run's parts over that of the baseline")[0]["eager"].startswith("0.500")


def test_times_are_medians_of_neighboring_blocks_within_each_process(finish):
    seconds = {("a", "rms"): [1, 1, 9], ("a", "layer"): [2, 2, 2], ("b", "rms"): [3, 3, 3], ("b", "layer"): [4, 4, 4]}
    timings = [
        {"variant": "v", "part": "step", "process": p, "arm": arm, "seconds": s} for (p, arm), s in seconds.items()
    ]
    (found,) = report.time_ratios(timings, "step", "rms", "layer")
    assert found == mean_effect("v", [0.5, 0.75], "ratio")
    assert report.time_ratios(timings, "forward", "rms", "layer") == []


def test_the_difference_over_steps_is_the_mean_of_the_pairs_at_every_step(finish):
    def curve(run):
        return [(10, losses(run) + run.seed), (20, losses(run))]

    plan = Plan(vary=PAIR, seeds=3, rerun_seeds=0, learning_rates=(1e-3,))
    study = finish(plan, losses)
    rows = [vars(run) | {"curve": curve(run)} for run in study.wanted]
    curves = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    table = study.rows.assign(
        curve=[curves[arm, seed] for arm, seed in zip(study.rows.arm, study.rows.seed, strict=True)]
    )
    (first, last) = plots.curve_differences(Study(plan, table), "rms")
    expected = [curves["rms", seed][1][1] - curves["layer", seed][1][1] for seed in (1, 2, 3)]
    assert (first[0], last[0]) == (10, 20)
    assert last[1].estimate == pytest.approx(np.mean(expected)) and first[1].estimate == pytest.approx(
        np.mean(expected)
    )


def test_arms_with_other_batches_are_compared_in_bits_per_byte_and_not_over_steps(finish, row, tmp_path):
    study = finish(Plan(vary=PAIR, seeds=5, rerun_seeds=0, learning_rates=(1e-3,)), losses, curve=[(1, 2.0), (2, 1.0)])
    assert "steps" in report.pictures(study)
    others = study.rows.assign(batches_hash=study.rows.arm + study.rows.seed.astype(str))
    study = Study(study.plan, others)
    assert "steps" not in report.pictures(study) and "the measure is bits per byte" in text(study, tmp_path)


def test_labels_of_the_learning_rates_do_not_touch_at_the_width_of_a_phone(finish):
    rates = tuple(5e-4 * 2**i for i in range(8))
    study = finish(Plan(vary=PAIR, seeds=2, rerun_seeds=0, learning_rates=rates), losses)
    figure = plots.sweep(study)
    figure.set_dpi(390 / plots.WIDTH)
    figure.draw_without_rendering()
    labels = figure.axes[0].get_xticklabels()
    bases = [label.get_window_extent().x1 for label in labels]
    assert len(labels) == len(study.rates) and min(np.diff(bases)) > labels[0].get_fontsize()


def test_the_report_is_written_with_its_pictures_and_as_html_where_the_library_is_there(pair, tmp_path, monkeypatch):
    written = report.write(pair, tmp_path)
    assert written[0] == tmp_path / "report.md" and all(path.is_file() for path in written)
    markdown = written[0].read_text(encoding="utf-8")
    assert all(f"({path.name})" in markdown for path in written if path.suffix == ".png")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(
        sys.modules, "markdown", type("", (), {"markdown": staticmethod(lambda text, extensions: text)})
    )
    page = report.write(pair, tmp_path)[-1]
    assert page.name == "report.html" and page.read_text(encoding="utf-8").endswith(markdown)
