"""The reports: derived from the records alone, without anything fetched, whatever the records say."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from ablation import report
from ablation.claims import CLAIMS, judge_all
from ablation.plan import Plan, save_plan
from errors import UserError

FILES = ("results.json", "report.md", "report.html")


class Reader(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes


@pytest.fixture(scope="module")
def folder(experiment):
    """The folder of the comparison with its reports, real pictures among them."""
    report.write(experiment.study, experiment.folder)
    return experiment.folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_reports_are_the_same_bytes_from_the_records_alone(folder, tmp_path):
    for name in ("plan.toml", "runs.jsonl"):
        shutil.copy(folder / name, tmp_path / name)
    report.write(report.load_study(tmp_path), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "plan.toml", "runs.jsonl"])
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no plan\.toml and runs\.jsonl"):
        report.load_study(tmp_path)


def test_results_json_has_the_conclusions(folder, study):
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [arm["label"] for arm in found["arms"]] == [arm.label for arm in study.arms]
    for arm, expected in zip(found["arms"], study.arms, strict=True):
        assert arm["loss"]["estimate"] == expected.loss.estimate and arm["parameters"] == expected.parameters
        if expected.comparison is not None:
            comparison = arm["comparison"]
            assert comparison["verdict"] == expected.comparison.verdict
            assert comparison["explanation"] == expected.comparison.explanation
            assert comparison["p_holm"] == expected.comparison.p_holm
    assert [claim["verdict"] for claim in found["claims"]] == [j.verdict for j in judge_all(CLAIMS, study)]
    center = next(sweep for sweep in found["sweeps"] if sweep["arm"] == "center")
    assert center["losses"]["0.5"] is None and center["best"] == 2e-2  # it diverged there


def test_the_page_fetches_nothing_and_runs_nothing(page):
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    names = {name for name, _ in reader.attributes}
    assert not {"src", "srcset", "data"} & names and not any(name.startswith("on") for name in names)
    links = [value for name, value in reader.attributes if name in ("href", "xlink:href")]
    assert all(value.startswith("#") for value in links)
    addresses = re.findall(r'[\w:]+="(?:https?:)?//[^"]*"', page)
    assert all(address.startswith("xmlns") for address in addresses)  # names of formats, not addresses
    assert not re.search(r"url\((?!#)|@import|@font-face", page)


def test_the_tables_tell_the_numbers_of_the_study(folder, study):
    text = (folder / "report.md").read_text(encoding="utf-8")
    for comparison in study.comparisons:
        row = next(line for line in text.splitlines() if line.startswith(f"| {comparison.arm} minus layer |"))
        low, high = comparison.loss.interval
        assert f"| {comparison.loss.estimate:+.4f} [{low:+.4f}, {high:+.4f}] | {comparison.verdict} |" in row
        assert f"| {comparison.p_holm:.5g} | {comparison.p_equivalence:.5g} |" in row
        assert f"| {comparison.std:.5g} | {comparison.correlation:.5g} | {comparison.loss.p:.5g} |" in row
    losses, center = study.sweeps[0].losses, study.sweeps[2].losses
    assert f"| rms | {losses[5e-3]:.5g} | {losses[2e-2]:.5g} | {losses[0.5]:.5g} | 0.02 | 0 of 6 |" in text
    assert "2 of 6" in next(line for line in text.splitlines() if line.startswith(f"| center | {center[5e-3]:.5g}"))
    assert text.count("| sweep |") == 18 and text.count("| final |") == 9
    final = next(r for r in study.results if r.phase == "final")
    assert f"| final | 1 | 0.02 | completed | {final.validation_loss:.5g} | {final.bits_per_byte:.5g} |" in text


def test_a_report_can_be_written_after_any_number_of_runs(study, panels, tmp_path):
    for number in (0, 1, 7, 18, 19, 21, 22):
        report.write(dataclasses.replace(study, results=study.results[:number]), tmp_path)
        assert (tmp_path / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_the_stability_table_is_the_range_over_seeds(study, panels):
    (table,) = report.inside(study).tables
    runs = [r for r in study.results if r.phase == "final" and r.arm.norm == "layer"]
    largest = [r.probes.largest_activation for r in runs]
    last = [r.gradient_norm[-1][1] for r in runs]
    row = next(row for row in table.rows if row["arm"] == "layer")
    assert row["largest activation"] == f"{min(largest):.3g} to {max(largest):.3g}"
    assert row["gradient norm, last part of the run"] == f"{min(last):.3g} to {max(last):.3g}"


def test_one_table_of_claims_takes_each_from_the_first_folder_that_measured_it(study, experiment, config, tmp_path):
    save_plan(Plan(norms=("rms",), config=str(config)), tmp_path / "plan.toml")
    (tmp_path / "runs.jsonl").write_text("", encoding="utf-8")
    both, alone = (report.claims_table(folders) for folders in ((tmp_path, experiment.folder), (experiment.folder,)))
    assert both == alone == report.markdown_table(report.claim_rows(judge_all(CLAIMS, study)))
    lines = report.claims_table((tmp_path,)).splitlines()
    assert len(lines) == 2 + len(CLAIMS)
    assert next(line for line in lines if line.startswith("| C2 ")).endswith("| - | not measured |")
