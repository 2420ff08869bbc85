"""The reports: derived from the records alone, without anything fetched, whatever the records say."""

import dataclasses
import json
import math
import re
import shutil
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from ablation import plots, report
from ablation.analysis import Study
from ablation.claims import CLAIMS, judge_all
from ablation.plan import Plan, arm_settings, save_plan
from benchmarks import training as step_benchmark
from benchmarks.training import time_together
from errors import UserError

FILES = ("results.json", "report.md", "report.html")
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Collects visible text, tags and attributes; every tag must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes, self.open = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attributes

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def folder(experiment):
    """The folder of the comparison with its reports, real pictures among them."""
    report.write(experiment.study, experiment.folder)
    return experiment.folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def timings(experiment):
    """Real times of every arm, eager variants and two parts alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_benchmark, "why_not_compile", lambda device: "not in this test")
        plan, device = experiment.plan, torch.device("cpu")
        arms = {experiment.study.label(arm): arm_settings(plan, arm) for arm in plan.arms}
        entries = {(v, name): settings for v in step_benchmark.variants(device) for name, settings in arms.items()}
        timed = time_together(entries, ("norm forward", "step"), device, 6)
        slower = [dataclasses.replace(t, process=1, seconds=[2 * s for s in t.seconds]) for t in timed]
        return [*timed, *slower]


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


def test_the_page_is_closed_in_order_and_has_no_id_twice(page):
    reader = Reader(page)
    assert reader.tags.count("h1") == 1 and ("lang", "en") in reader.attributes
    ids = [value for name, value in reader.attributes if name == "id"]
    assert ids and len(ids) == len(set(ids))
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', page)
    assert set(references) <= set(ids)


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


def test_every_picture_has_a_light_and_a_dark_rendering_and_words(page):
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(figures) == 1 + 3 + (1 + 2) + 3  # differences, an arm's losses each, sweep and pairs of two arms, probes
    for figure in figures:
        light, dark = (
            re.search(rf'<div class="{theme}">(<svg.*?</svg>)\s*</div>', figure, re.DOTALL).group(1)
            for theme in ("light", "dark")
        )
        assert xml.fromstring(light).tag.endswith("svg") and xml.fromstring(dark).tag.endswith("svg")
        assert plots.INK["light"] in light and plots.INK["dark"] in dark and plots.INK["dark"] not in light
        assert re.search(r'aria-label="[^"]+"', figure) and re.search(r"<figcaption>.+</figcaption>", figure)
    assert "prefers-color-scheme: dark" in page


def test_the_markdown_and_the_page_have_the_same_numbers(folder, page):
    text = (folder / "report.md").read_text(encoding="utf-8")
    cells = {
        cell.strip().replace("\\|", "|")
        for line in text.splitlines()
        if line.startswith("| ")
        for cell in line.strip("| ").split(" | ")
    }
    shown = {"".join(part) for part in re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", page)}
    unescaped = {cell.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'") for cell in shown}
    assert cells - {"---"} == unescaped


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


def sections(study: Study) -> dict[str, report.Section]:
    return {section.title: section for section in report.sections(study, judge_all(CLAIMS, study))}


def test_parts_with_nothing_to_show_are_left_out(study, panels, config):
    empty = sections(Study(Plan(config=str(config)), [], []))
    assert list(empty) == ["Paired differences", "Claims", "How it was made", "What not to conclude"]
    full = sections(study)
    assert list(full) == [
        *("Paired differences", "Loss curves", "Learning rates", "Inside the model", "Claims", "How it was made"),
        *("What not to conclude", "Every run"),
    ]
    assert all(table.rows for part in [*full.values(), *empty.values()] for table in part.tables)
    one = dataclasses.replace(study, plan=dataclasses.replace(study.plan, learning_rates=(2e-2,)))
    assert "Learning rates" not in sections(one)


def test_a_report_can_be_written_after_any_number_of_runs(study, panels, tmp_path):
    for number in (0, 1, 7, 18, 19, 21, 22):
        report.write(dataclasses.replace(study, results=study.results[:number]), tmp_path)
        Reader((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_times_are_shown_for_every_part_arm_and_variant(study, timings, panels):
    found = sections(dataclasses.replace(study, timings=timings))["Time"]
    rows = [(row["part"], row["arm"], row["variant"], row["processes"]) for row in found.tables[0].rows]
    variants = ("reference, eager", "CPU functions")
    parts = ("norm forward", "step")
    assert rows == [(part, arm, v, 2) for part in parts for arm in ("rms", "center") for v in variants]
    ratio = dataclasses.replace(study, timings=timings).time_ratios("step", "rms", "layer")[0]
    low, high = ratio.interval
    shown = found.tables[0].rows[4]["time over the baseline's"]
    assert shown == f"{ratio.estimate:.3f} [{low:.3f}, {high:.3f}]" and "baseline: layer" in found.tables[0].caption
    assert len(found.pictures) == 1 and "that of layer" in found.pictures[0].caption


@pytest.mark.parametrize("name", ["</title></svg><script>alert(1)</script>", "a | b", "\" onload='x' <img src=x>"])
def test_hostile_text_stays_text(study, panels, tmp_path, name):
    with pytest.raises(UserError, match="must be 1 to 64 letters"):
        dataclasses.replace(study.plan, name=name)
    plan = dataclasses.replace(study.plan)
    object.__setattr__(plan, "name", name)
    report.write(dataclasses.replace(study, plan=plan), tmp_path)
    reader = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(reader.tags) and not any(n.startswith("on") for n, _ in reader.attributes)
    assert f"Ablation: {name}" in "".join(reader.text)
    for table in re.findall(r"(?:^\|.*\n)+", (tmp_path / "report.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_spike_does_not_flatten_the_curves_and_the_caption_counts_what_is_above(study, change, panels):
    key = next(r.key for r in study.results if r.phase == "final" and r.arm.norm == "rms")

    def fields(result) -> dict:
        if result.key != key:
            return {}
        spiked = [(step, 1e6 if step == 5 else loss) for step, loss in result.training_curve]
        return {"training_curve": spiked}

    found = change(study, fields)
    plots.loss_curves(found)
    final = [r for r in found.results if r.phase == "final"]
    validation = [
        np.median([[loss for _, loss in r.validation_curve] for r in final if r.arm == arm], axis=0)
        for arm in study.plan.arms
    ]
    training = {arm.norm: [v for r in final if r.arm == arm for _, v in r.training_curve] for arm in study.plan.arms}
    limit = np.quantile(np.concatenate([*training.values(), *validation]), 0.99)
    assert limit < 100
    for caption, axes in panels.items():
        assert axes.get_ylim()[1] <= 1.03 * limit, caption
        above = sum(loss > limit for loss in training[caption.split(" ")[0]])
        said = re.search(r"(\d+) points? above the axis, which ends at the 99% quantile", caption)
        assert (int(said.group(1)) if said else 0) == above
    assert " above the axis" in next(caption for caption in panels if caption.startswith("rms"))


def test_diverged_runs_are_crosses_at_their_last_step_and_counted_in_the_caption(study, with_losses, change, panels):
    diverged = with_losses(study, {"rms": (None, 3.0, None)})
    cut = change(diverged, lambda r: {"training_curve": r.training_curve[:4]} if r.status == "diverged" else {})
    plots.loss_curves(cut)
    caption, axes = next((caption, axes) for caption, axes in panels.items() if caption.startswith("rms"))
    assert "crosses: 2 of 3 runs diverged" in caption
    (crosses,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert crosses.get_xdata().tolist() == [4, 4]


def test_the_differences_are_drawn_to_scale_with_the_margin(study, with_losses, panels):
    layer = np.array([3.0, 3.1, 3.05])
    found = with_losses(
        study,
        {"layer": layer, "rms": np.add(layer, [0.01, 0.02, 0.04]), "center": np.subtract(layer, [0.01, 0.03, 0.02])},
    )
    picture = plots.differences(found)
    assert "that of layer over 3 paired seeds" in picture.caption and "±0.005" in picture.caption
    axes = panels[picture.caption]
    center, rms = found.comparisons
    for row, comparison in enumerate((center, rms)):
        drawn = [line.get_xydata().tolist() for line in axes.lines if set(line.get_ydata()) == {row}]
        assert [[end, row] for end in comparison.loss.interval] in drawn
        assert [[comparison.loss.estimate, row]] in drawn
    assert [text.get_text() for text in axes.get_yticklabels()] == ["center", "rms"]
    (shaded,) = axes.patches
    assert shaded.get_x() == -0.005 and shaded.get_width() == pytest.approx(0.01)
    assert "Arrow" not in picture.caption


def test_an_effect_far_beyond_the_others_becomes_an_arrow_with_its_number(study, with_losses, panels):
    layer, noise = np.array([3.0, 3.1, 3.05]), np.array([-1, 0, 1]) * 1e-3
    rows = plots.difference_rows(
        with_losses(study, {"layer": layer, "rms": layer + noise, "center": layer + 5 + noise})
    )
    third = ("more", 1, dataclasses.replace(rows[0][2], name="more"))
    assert plots.clip_far([effect for _, _, effect in (*rows, third)], 0.0) < 0.1
    plots.forest_picture([*rows, third], plots.forest([*rows, third], "x", 0.0), "arrows")
    texts = [text.get_text() for text in panels["arrows"].texts]
    assert "+5.000" in texts and max(abs(np.array(panels["arrows"].get_xlim()))) < 0.2


def test_probe_curves_show_every_arm(study, panels):
    pictures = plots.probe_curves(study)
    assert [picture.alt.split(" ")[0] for picture in pictures] == ["|Mean|", "Norm", "Length"]
    for picture in pictures:
        axes = panels[picture.caption]
        assert [line.get_label() for line in axes.lines][:3] == ["rms", "layer", "center"]
    *_, level = panels[pictures[0].caption].lines
    assert level.get_ydata() == pytest.approx([math.sqrt(2 / (math.pi * 32))] * 2) and "chance" in level.get_label()
    runs = [r for r in study.results if r.phase == "final" and r.arm.norm == "rms"]
    deep = np.median([r.probes.mean_over_std for r in runs], axis=0)
    assert panels[pictures[0].caption].lines[0].get_xydata().tolist() == [[i + 1, v] for i, v in enumerate(deep)]


def test_the_stability_table_is_the_range_over_seeds(study, panels):
    (table,) = report.inside(study).tables
    runs = [r for r in study.results if r.phase == "final" and r.arm.norm == "layer"]
    largest = [r.probes.largest_activation for r in runs]
    last = [r.gradient_norm[-1][1] for r in runs]
    row = next(row for row in table.rows if row["arm"] == "layer")
    assert row["largest activation"] == f"{min(largest):.3g} to {max(largest):.3g}"
    assert row["gradient norm, last part of the run"] == f"{min(last):.3g} to {max(last):.3g}"


def test_the_picture_for_a_readme_is_written(study, tmp_path):
    plots.save_differences(study, tmp_path / "differences.svg")
    drawn = xml.parse(tmp_path / "differences.svg").getroot()
    assert drawn.tag.endswith("svg")
    plots.save_differences(study, tmp_path / "differences.png")
    assert (tmp_path / "differences.png").read_bytes().startswith(b"\x89PNG")


def test_one_table_of_claims_takes_each_from_the_first_folder_that_measured_it(study, experiment, config, tmp_path):
    save_plan(Plan(norms=("rms",), config=str(config)), tmp_path / "plan.toml")
    (tmp_path / "runs.jsonl").write_text("", encoding="utf-8")
    both, alone = (report.claims_table(folders) for folders in ((tmp_path, experiment.folder), (experiment.folder,)))
    assert both == alone == report.markdown_table(report.claim_rows(judge_all(CLAIMS, study)))
    lines = report.claims_table((tmp_path,)).splitlines()
    assert len(lines) == 2 + len(CLAIMS)
    assert next(line for line in lines if line.startswith("| C2 ")).endswith("| - | not measured |")


def test_numbers_that_are_none_are_a_dash():
    assert [report.cell(value) for value in (None, float("nan"), 0.1234567, 3, "x")] == ["-", "-", "0.12346", "3", "x"]
    assert report.interval(None, ".2f") == "[no interval]" and report.effect(None, ".2f") == "-"
