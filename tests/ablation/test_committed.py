"""The committed comparisons: what they showed before their records were converted, they show now."""

import csv
from pathlib import Path

import pytest

from ablation import study
from ablation.study import Study

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
