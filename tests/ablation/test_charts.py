"""The charts of the report: to scale, each arm once, readable without colour vision and on a phone."""

import re
import xml.etree.ElementTree as xml

import pytest

from ablation import charts, report, report_curves
from ablation.page import DARK, LIGHT, STYLE

ARMS = ("rms", "layer", "center", "prms", "l2", "group", "batch", "none")


def of_class(svg: xml.Element, tag: str, kind: str) -> list[xml.Element]:
    return [element for element in svg.iter(tag) if kind in element.get("class", "").split()]


def chart(found: list[xml.Element], key: str) -> xml.Element:
    return next(svg for svg in found if svg.find("title").get("id") == f"{key}-t")


def boxes(svg: xml.Element) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right, bottom of every text, with characters as wide as those of a wide font."""
    found = []
    for text in svg.iter("text"):
        words = "".join(text.itertext())
        x, y, width = float(text.get("x")), float(text.get("y")), len(words) * charts.GLYPH
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        found.append((left, y - 0.75 * charts.FONT, left + width, y + 0.2 * charts.FONT, words))
    return found


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of the luminances of two colours."""
    luminances = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


def test_an_arm_with_diverged_runs_says_how_many_ended_and_has_no_interval(results, page, svgs):
    assert "| none | 0.002 | 3 of 5 | 3.6000 no interval |" in report.markdown(results)
    panel = next(svg for svg in svgs(page) if svg.find("title").text == "Loss of none")
    assert len(of_class(panel, "path", "cross")) == 2
    assert "none: 3 of 5 runs ended" in page


def test_every_chart_has_a_role_a_title_and_a_description(page, svgs):
    for svg in svgs(page):
        title, description = svg[0], svg[1]
        assert svg.get("role") == "img" and (title.tag, description.tag) == ("title", "desc")
        assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text and description.text


def test_there_is_a_curve_for_each_arm(page, svgs):
    panels = [svg for svg in svgs(page) if svg.find("title").get("id").startswith("loss-")]
    assert len(panels) == len(ARMS) and all(len(of_class(panel, "path", "curve")) == 1 for panel in panels)
    assert all(of_class(panel, "path", "band")[0].get("d") for panel in panels)
    for key in ("valley", "gradient_norm", "mean_over_deviation", "cosine_with_ones"):
        assert len(of_class(chart(svgs(page), key), "path", "curve")) == len(ARMS)
    assert len(of_class(chart(svgs(page), "forest"), "g", "series")) == len(ARMS) - 1


def test_the_band_of_a_panel_holds_every_seed_that_ended(results):
    runs = [run for run in results["runs"] if run["arm"] == "rms" and run["purpose"] == "final"]
    for x, low, middle, high in report_curves.over_seeds([run["curve"] for run in runs]):
        values = [loss for run in runs for step, loss in run["curve"] if step == x]
        assert (low, high) == (min(values), max(values)) and middle in values


def test_the_bound_and_the_intervals_of_the_forest_plot_are_to_scale(page, svgs):
    svg = chart(svgs(page), "forest")
    band = of_class(svg, "rect", "bound")[0]
    low, width = float(band.get("x")), float(band.get("width"))
    at = lambda value: low + width * (value + 0.01) / 0.02  # noqa: E731
    ends = [float(x) for x in re.findall(r"[ML]([\d.]+),", of_class(svg, "path", "whisker")[0].get("d"))]
    assert ends == pytest.approx([at(-0.0012 - 0.0031), at(-0.0012 + 0.0031)], abs=0.2)
    assert float(of_class(svg, "circle", "mark")[0].get("cx")) == pytest.approx(at(-0.0012), abs=0.2)


def test_a_rate_at_which_a_run_diverged_has_a_cross_above_all_losses(page, svgs):
    svg = chart(svgs(page), "valley")
    heights = [float(y) for c in of_class(svg, "path", "curve") for y in re.findall(r",([\d.]+)", c.get("d"))]
    crosses = [float(re.match(r"M[\d.]+,([\d.]+)", c.get("d"))[1]) + 8 for c in of_class(svg, "path", "cross")]
    assert len(crosses) == 2 and max(crosses) < min(heights)


def test_arms_differ_in_their_marker_and_in_more_than_colour(page, svgs):
    series = of_class(chart(svgs(page), "valley"), "g", "series")
    looks = set()
    for group in series:
        mark = group[1]  # after the curve; its corners seen from the first of them
        corners = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", mark.get("d", ""))]
        shape = tuple((round(x - corners[0][0]), round(y - corners[0][1])) for x, y in corners)
        looks.add((mark.tag, mark.get("class"), shape))
    assert len(looks) == len(ARMS) == 8
    assert len(set(LIGHT)) == len(set(DARK)) == 8


@pytest.mark.parametrize("colours, place", [(LIGHT, 0), (DARK, 1)], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(colours, place):
    paper, ink, muted = ([*re.findall(rf"--{name}: (#\w+)", STYLE)][place] for name in ("paper", "ink", "muted"))
    assert all(contrast(colour, paper) >= 3 for colour in colours)
    assert contrast(ink, paper) >= 7 and contrast(muted, paper) >= 4.5


def test_no_text_of_a_chart_is_cut_off_or_covers_another(page, svgs):
    for svg in svgs(page):
        width, height = (float(v) for v in svg.get("viewBox").split()[2:])
        texts = boxes(svg)
        for i, (left, top, right, bottom, words) in enumerate(texts):
            assert left >= -2 and right <= width + 2 and top >= -1 and bottom <= height + 1, words
            for other in texts[:i]:
                apart = left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]
                assert apart, (svg.find("title").text, words, other[4])


def test_long_names_many_arms_and_far_differences_still_fit(results, svgs):
    for names in ([f"{arm} with a long name" for arm in ARMS], [f"arm {i}" for i in range(14)]):
        runs = [
            {**run, "arm": name} for i, name in enumerate(names) for run in results["runs"] if run["arm"] == ARMS[i % 8]
        ]
        valleys = [{**results["valleys"][i % 8], "arm": name} for i, name in enumerate(names)]
        compared = [{**results["comparisons"][i % 7], "arm": name} for i, name in enumerate(names)]
        page = report.html({**results, "arms": [], "runs": runs, "valleys": valleys, "comparisons": compared})
        for svg in svgs(page):
            width, height = (float(v) for v in svg.get("viewBox").split()[2:])
            for left, top, right, bottom, words in boxes(svg):
                assert left >= -2 and right <= width + 2 and top >= -1 and bottom <= height + 1, words
