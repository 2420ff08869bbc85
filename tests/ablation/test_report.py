"""What a report says follows from the records."""

import dataclasses
import math

import pandas as pd
import pytest

from ablation import report, study
from ablation.plan import STUDIES, Plan
from ablation.records import JUDGEMENT, Judgement
from ablation.study import Study
from model.count import num_parameters

PLAN = Plan(vary={"norm": ["layer", "rms"]}, seeds=6, rerun_seeds=3, learning_rates=(1e-3,))


def losses(run) -> float:
    """Different in every run; rms is lower by 0.1."""
    return 3 + math.sin(run.seed * (1 + len(run.arm))) * 0.01 - 0.1 * run.arm.startswith("rms")


def rows_of(markdown: str, title: str) -> list[dict[str, str]]:
    """The rows of the table in a part of the report, by column."""
    section = markdown.split(f"## {title}\n")[1].split("\n## ")[0]
    head, _, *lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def markdown(finished: Study, folder) -> str:
    return report.markdown_text(finished, folder, report.difference_table(finished), ())


def test_the_numbers_are_those_of_the_study(finish, tmp_path):
    pair = finish(PLAN, losses, vocab_size=300)  # of a small text
    rms, layer = report.headline(pair)  # in order of the loss
    comparison = pair.comparisons[0]
    low, high = comparison.effect.interval
    loss = f"{pair.rows_of('final', 'layer').loss.mean():.4f}"
    assert layer.startswith(f"layer: {loss} nats per token")
    assert rms.startswith(f"rms: lower, {comparison.effect.estimate:+.4f} [{low:+.4f}, {high:+.4f}]")
    shown = report.write(pair, tmp_path).read_text(encoding="utf-8")
    assert "](differences.png)" in shown and (tmp_path / "differences.png").is_file()
    (row,) = rows_of(shown, "Differences")
    assert row["verdict"] == "lower" and row["pairs"] == "6"
    table = pd.read_csv(tmp_path / "differences.csv")
    assert table[["low", "mean", "high"]].iloc[0].tolist() == pytest.approx([low, comparison.effect.estimate, high])
    assert float(row["p (Holm)"]) == pytest.approx(comparison.p_holm, rel=5e-3)
    arm = rows_of(shown, "Arms")[0]
    assert arm["nats per token"].split()[0] == loss
    config = dataclasses.replace(PLAN.all_arms["layer"].settings.model, vocab_size=300)
    assert int(arm["parameters"].replace(",", "")) == num_parameters(config)


def test_the_effects_of_a_grid_have_a_table(finish, tmp_path):
    grid = finish(dataclasses.replace(PLAN, vary=PLAN.vary | {"qk_norm": [False, True]}, rerun_seeds=0), losses)
    report.write(grid, tmp_path)
    table = pd.read_csv(tmp_path / "effects.csv")
    assert table["mean"].tolist() == pytest.approx([effect.estimate for effect in grid.effects]) and len(table) == 3


def test_arms_that_are_open_unfinished_or_diverged_say_so(finish):
    pair = finish(PLAN, losses)
    grid = dataclasses.replace(PLAN, vary=PLAN.vary | {"qk_norm": [False, True]})
    words = [report.plan_in_words(Study(plan, pair.rows), 1) for plan in (grid, PLAN)]
    assert ["compared with the baseline before it" in text for text in words] == [True, False]
    noisy = finish(dataclasses.replace(PLAN, rerun_seeds=0), lambda run: 3 + math.sin(run.seed * len(run.arm)))
    assert noisy.comparisons[0].verdict == "inconclusive" and noisy.comparisons[0].pairs_for_power[0] > 6
    assert "it would take " + report.pairs_to_decide(noisy.comparisons[0]) in " ".join(report.headline(noisy))
    unfinished = Study(pair.plan, pair.rows[pair.rows.seed < 4])
    assert "rms: not finished, 3 final runs of 6" in report.headline(unfinished)
    diverged = finish(pair.plan, lambda run: None if (run.arm, run.seed) == ("rms", 2) else losses(run))
    assert any(line.startswith("rms: 5 of 6 runs completed") for line in report.headline(diverged))


def test_pairs_that_do_not_count_and_a_limit_that_was_reached_are_said(finish):
    pair = finish(PLAN, losses)
    fewer = Study(dataclasses.replace(PLAN, seeds=4), pair.rows)
    assert report.headline(fewer)[-1] == "note: runs of 6 seeds are there, and 4 of them count"
    slow = pair.rows.assign(seconds=3600.0, all_seconds=3600.0)
    limited = Study(dataclasses.replace(PLAN, seeds=9, hours=float(len(slow))), slow)
    assert report.headline(limited)[-1].startswith("note: 6 of 9 pairs, as the limit of ")
    none = Study(dataclasses.replace(PLAN, hours=1.0), slow[:1])
    assert report.headline(none)[-1] == "note: the limit of 1 hours is met before a pair counts; raise --hours"
    assert not any("note" in line for line in report.headline(pair))


def test_a_judged_folder_repeats_the_verdict_and_says_which_interval_is_right(finish, tmp_path):
    (tmp_path / "changes.jsonl").write_text('{"field": "seeds"}\n{"field": "margin"}\n')
    text = markdown(finish(PLAN, losses), tmp_path)
    assert all(f"Note: {words}." in text for words in report.CHANGED_LATE.values())
    about = {"baseline": "layer", "idea": "rms", "unit": "", "reason": "decided after 4 pairs", "level": 0.05}
    judgement = Judgement(**about, verdict="keep", difference=-0.1, interval=(-0.2, -0.05))
    (tmp_path / JUDGEMENT).write_text(str(judgement), encoding="utf-8")
    text = markdown(finish(PLAN, losses), tmp_path)
    assert "- judge: keep, -0.1 [-0.2, -0.05]; decided after 4 pairs\n" in text and "below are too narrow" in text
    assert not any(words in text for words in report.CHANGED_LATE.values())
    report.write(finish(PLAN, losses), tmp_path)
    assert pd.read_csv(tmp_path / "differences.csv").low[0] == -0.2
    assert "$-$0.1000 [$-$0.2000, $-$0.0500] & " in (tmp_path / "differences.tex").read_text()


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in STUDIES.glob("*/runs.jsonl")), ids=lambda path: path.name
)
def test_a_committed_report_is_what_its_records_give(folder):
    assert markdown(study.load(folder), folder) == (folder / "report.md").read_text(encoding="utf-8")
