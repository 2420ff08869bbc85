"""The committed comparisons: what was published is what their records show."""

import csv
from pathlib import Path

import pytest

from ablation import plots, report, study
from ablation.study import Study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = sorted(folder.name.removeprefix("ablation-") for folder in RESULTS.glob("ablation-*"))


@pytest.fixture(scope="module")
def studies() -> dict[str, Study]:
    return {name: study.load(RESULTS / f"ablation-{name}") for name in STUDIES}


def test_every_comparison_has_the_mean_the_interval_and_the_verdict_that_were_published(studies):
    found = {(name, c.arm): c for name in STUDIES for c in studies[name].comparisons}
    with Path(__file__).with_name("comparisons.csv").open(encoding="utf-8") as file:
        published = {(row["study"], row["arm"]): row for row in csv.DictReader(file)}
    assert len(published) == 47
    for key, row in published.items():
        effect = found[key].effect
        numbers = [float(row[name]) for name in ("mean", "low", "high")]
        assert [effect.estimate, *effect.interval] == pytest.approx(numbers, abs=1e-6), key
        assert found[key].verdict == row["verdict"], key


def test_what_mean_and_bias_do_is_the_effect_of_each_factor_and_is_drawn_for_every_study(studies):
    found = studies["factorial"]
    for effect, name in zip(found.effects, ("no mean", "no bias"), strict=False):
        assert found.parts[""][name].interval == pytest.approx(effect.interval)
    drawn = plots.parts([studies["factorial"], studies["budget-600"]]).axes[0]
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["factorial, 30 pairs", "budget-600, 6 pairs"]


@pytest.mark.parametrize("name", ["factorial-tuned", "norms-amd", "qk-norm"])
def test_a_committed_report_is_what_its_records_give(studies, name):
    folder = RESULTS / f"ablation-{name}"
    drawn = report.pictures(studies[name])
    assert {path.stem for path in folder.glob("*.png")} == drawn.keys()
    assert report.markdown_text(studies[name], folder, drawn) == (folder / "report.md").read_text(encoding="utf-8")
