"""The committed comparisons: what was published is what their records show."""

from pathlib import Path

import pytest

from ablation import report, study

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path.parent.name for path in (ROOT / "studies").glob("*/runs.jsonl"))


@pytest.mark.parametrize("name", STUDIES)
def test_a_committed_report_is_what_its_records_give(name):
    folder = ROOT / "studies" / name
    assert report.markdown_text(study.load(folder), folder, {}) == (folder / "report.md").read_text(encoding="utf-8")
