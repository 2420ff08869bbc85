"""The report of an ablation: the same numbers in Markdown and on the page, nothing fetched, no input that breaks it."""

import json
import math
import random
import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import pytest

from ablation import charts, demonstrations, report, report_curves, wording
from ablation.page import DARK, LIGHT, STYLE

ARMS = ("rms", "layer", "center", "prms", "l2", "group", "batch", "none")
WORSE = {
    "rms": -0.0012,
    "layer": 0,
    "center": 0.031,
    "prms": 0.002,
    "l2": 0.05,
    "group": 0.004,
    "batch": 0.9,
    "none": 0.4,
}
RATES = [0.0005, 0.001, 0.002, 0.004]


def a_run(arm: str, purpose: str, seed: int, rate: float, diverged: bool) -> dict:
    noise = random.Random(f"{arm} {seed} {rate}")
    level = 3.2 + WORSE[arm] + 0.05 * abs(math.log2(rate / 0.002))
    loss = None if diverged else level + noise.gauss(0, 0.004)
    steps = range(1, 230 if diverged else 400, 7)
    fall = [[s, level + 5.1 * math.exp(-s / 60) + noise.gauss(0, 0.02)] for s in steps]
    depths = range(9)
    probes = {
        "mean_over_deviation": [noise.gauss(0.05, 0.03) * (d + 1) for d in depths],
        "cosine_with_ones": [noise.gauss(0.02, 0.03) for d in depths],
        "gradient_norm": [[s, 0.4 + 6 * math.exp(-s / 50) + noise.random() / 20] for s in steps],
        "largest_activation": 12.3 + noise.random(),
        "update_share": [[s, 0.002 * math.exp(-s / 200)] for s in steps],
    }
    return {
        **{"arm": arm, "purpose": purpose, "seed": seed, "learning_rate": rate},
        **{"status": "diverged" if diverged else "done", "validation_loss": loss},
        **{"bits_per_byte": loss and loss * 0.4156, "spikes": seed % 2, "seconds": 21.3 + seed, "curve": fall},
        **{"validation": [[s, level + 5.1 * math.exp(-s / 60)] for s in range(50, 400, 50)], "probes": probes},
    }


def make_results() -> dict:
    runs = [a_run(arm, "rate", 99, rate, arm in ("none", "l2") and rate > 0.002) for arm in ARMS for rate in RATES]
    runs += [a_run(arm, "final", s, 0.002, arm == "none" and s > 3) for arm in ARMS for s in range(1, 6)]
    arms, comparisons = [], []
    for i, arm in enumerate(ARMS):
        mean, n = 3.2 + WORSE[arm], 3 if arm == "none" else 5
        arms.append(
            {
                **{"arm": arm, "learning_rate": 0.002, "n": n, "of": 5, "mean": mean, "bits_per_byte": mean * 0.4156},
                **{"interval": [mean - 0.0051, mean + 0.0051] if n == 5 else None},
                **{"parameters": 1234567 + i, "norm_parameters": 1152},
            }
        )
        if arm == "layer":
            continue
        half, small = 0.0031 + 0.0007 * i, abs(WORSE[arm]) < 0.003
        verdict = "equivalent" if small else "not resolved, needs 12 seeds" if arm == "group" else "higher"
        comparisons.append(
            {
                **{"arm": arm, "baseline": "layer", "n": n, "mean": WORSE[arm], "verdict": verdict},
                **{"interval": [WORSE[arm] - half, WORSE[arm] + half] if n == 5 else None},
                **{"interval_90": [WORSE[arm] - 0.8 * half, WORSE[arm] + 0.8 * half] if n == 5 else None},
                **{"standard_deviation": 0.0025, "correlation": 0.971, "p_value": 0.4, "p_holm": 0.0002},
                **{"resolvable": 0.0042, "seeds_needed": 3},
                **{"bits_per_byte": {"mean": WORSE[arm] * 0.41, "interval": [-0.0021, 0.0009] if n == 5 else None}},
            }
        )
    builds, parts = ("eager", "torch.compile"), ("norm forward", "norm backward", "forward", "backward", "step")
    return {
        **{"name": "norms", "command": "python ablate.py --config configs/ablation.toml --seeds 5", "bound": 0.01},
        **{"metric": "validation loss, nats per token", "baseline": "layer", "hours": 0.71},
        "machine": {
            **{"device": "cpu", "processor": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "threads": 2},
            **{"torch": "2.13.0+cpu", "python": "3.11.2", "system": "Linux 6.1", "kernels": "composed"},
            "dtype": "bfloat16",
        },
        "text": {"hash": "5c0c21f7", "bytes": 8504019, "validation_tokens": 124358, "validation_bytes": 431402},
        "shape": {"parameters": 1234567, "layers": 4, "hidden_size": 128, "steps": 400, "tokens": 819200},
        **{"runs": runs, "arms": arms, "comparisons": comparisons},
        "valleys": [
            {
                **{"arm": arm, "rates": RATES, "best": 0.002, "at_edge": arm == "group"},
                "losses": [r["validation_loss"] for r in runs if r["arm"] == arm and r["purpose"] == "rate"],
            }
            for arm in ARMS
        ],
        "speed": [
            {
                **{"build": build, "part": part, "rms": 0.0213 * (i + 1), "layer": 0.0215 * (i + 1), "n": 20},
                **{"ratio": 0.99 + 0.01 * i * j, "interval": [0.98 + 0.01 * i * j, 1.0021 + 0.01 * i * j]},
            }
            for j, build in enumerate(builds)
            for i, part in enumerate(parts)
        ],
        "switched": [
            {
                **{"seed": seed, "before": 3.2, "variant": variant, "steps": steps},
                **{"status": "diverged" if loss is None else "done", "validation_loss": loss},
            }
            for variant, steps, losses in (
                ("rms at once", 0, (5.4, 5.0)),
                ("rms, norms trained", 50, (3.3, 3.2)),
                ("layer, all trained", 50, (3.1, None)),
            )
            for seed, loss in enumerate(losses, start=1)
        ],
        "demonstrations": {
            **{"rms_change_by_scale": 4.63e-6, "rms_cosine_with_input": 1.0, "rms_gradient_by_scale": 0.1},
            **{"layer_change_by_scale": 5.05e-6, "layer_cosine_with_input": 0.957248, "layer_gradient_by_scale": 0.1},
            **{"float16_error_with_upcast": 2.08e-4, "float16_rows_lost_without_upcast": 0.996},
        },
        "norm_share": {"rms": 0.0612, "layer": 0.0641},
        "memory": {"rms": 104857600, "layer": None},
        "claims": [
            {
                "id": "C1",
                "claim": "RMSNorm trains 7 to 15% faster than LayerNorm end to end",
                "verdict": "does not hold",
            }
            | {"measured": "ratio of step times 0.990 [0.980, 1.002]"},
            {"id": "C2", "claim": "RMSNorm and LayerNorm reach the same loss", "measured": "", "verdict": "holds"},
            {"id": "C10", "claim": "Pre-norm trains more stably than post-norm", "verdict": "not tested"},
        ],
        "notes": ["Nothing here says how a model of a thousand times the size behaves.", "One corpus, one shape."],
    }


@pytest.fixture(scope="module")
def results() -> dict:
    return make_results()


@pytest.fixture(scope="module")
def page(results) -> str:
    return report.html(results)


class Reader(HTMLParser):
    """Collects the visible text, the tags and the attributes, and insists that every tag is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes, self.open, self.quiet = [], [], [], [], 0
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
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


def svgs(page: str) -> list[xml.Element]:
    return [xml.fromstring(svg) for svg in re.findall("<svg.*?</svg>", page, re.DOTALL)]


def of_class(svg: xml.Element, tag: str, kind: str) -> list[xml.Element]:
    return [element for element in svg.iter(tag) if kind in element.get("class", "").split()]


def chart(page: str, key: str) -> xml.Element:
    return next(svg for svg in svgs(page) if svg.find("title").get("id") == f"{key}-t")


def change(value, leaf):
    """The same lists and dicts with every other value changed."""
    if isinstance(value, dict):
        return {key: change(of, leaf) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [change(of, leaf) for of in value]
    return leaf(value)


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


def test_the_first_sentences_are_the_difference_its_verdict_and_the_time_of_a_step(results, page):
    words = " ".join("".join(Reader(page).text).split())
    for text in (report.markdown(results), words):
        assert text.index("rms minus layer, is −0.0012 nats per token (95% interval [−0.0043, +0.0019])") < 200
        assert "and −0.0005 bits per byte ([−0.0021, +0.0009]), over 5 paired seeds: equivalent within ±0.01" in text
        assert "0.990 [0.980, 1.002] in eager; 1.030 [1.020, 1.042] in torch.compile." in text


def test_every_number_of_the_markdown_stands_in_the_page_and_the_other_way_round(results, page):
    markdown = report.markdown(results)
    tables = [line for line in markdown.splitlines() if line.startswith("| ")]
    cells = {cell.strip().replace("&lt;", "<") for line in tables for cell in line.strip("| ").split(" | ")}
    assert {cell for cell in cells if not set(cell) <= set("-:")} == {
        "".join(cell.itertext()) for cell in xml.fromstring(page[15:]).iter() if cell.tag in ("td", "th")
    } - {""}


def test_numbers_of_the_results_are_in_both(results, page):
    for text in (report.markdown(results), page):
        for number in ("3.2000 [3.1949, 3.2051]", "5 of 5", "1,234,567", "8,504,019", "5c0c21f7", "0.71 hours", "6.1%"):
            assert number in text
        for number in ("100.0 MiB", "21.30 ms", "0.971", "[−0.0037, +0.0013]", "0.0042", "−0.0005 [−0.0021, +0.0009]"):
            assert number in text
        assert "python ablate.py --config configs/ablation.toml --seeds 5" in text


def test_an_arm_with_diverged_runs_says_how_many_ended_and_has_no_interval(results, page):
    assert "| none | 0.002 | 3 of 5 | 3.6000 no interval |" in report.markdown(results)
    panel = next(svg for svg in svgs(page) if svg.find("title").text == "Loss of none")
    assert len(of_class(panel, "path", "cross")) == 2
    assert "none: 3 of 5 runs ended" in page


def test_the_page_is_closed_in_order_and_well_formed(page):
    reader = Reader(page)
    assert reader.tags.count("h1") == 1 and reader.tags.count("svg") == len(svgs(page)) > 8
    assert ("name", "viewport") in reader.attributes and ("lang", "en") in reader.attributes
    assert xml.fromstring(page[len("<!doctype html>") :]).tag == "html"
    ids = [value for name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_page_fetches_nothing_and_runs_nothing(page):
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    names = {name for name, _ in reader.attributes}
    assert not {"src", "href", "srcset", "style", "data"} & names and not any(name.startswith("on") for name in names)
    assert not re.search(r"https?:|//|url\(|@import|@font-face", page)


def test_every_chart_has_a_role_a_title_and_a_description(page):
    for svg in svgs(page):
        title, description = svg[0], svg[1]
        assert svg.get("role") == "img" and (title.tag, description.tag) == ("title", "desc")
        assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text and description.text


def test_there_is_a_curve_for_each_arm(page):
    panels = [svg for svg in svgs(page) if svg.find("title").get("id").startswith("loss-")]
    assert len(panels) == len(ARMS) and all(len(of_class(panel, "path", "curve")) == 1 for panel in panels)
    assert all(of_class(panel, "path", "band")[0].get("d") for panel in panels)
    for key in ("valley", "gradient_norm", "mean_over_deviation", "cosine_with_ones"):
        assert len(of_class(chart(page, key), "path", "curve")) == len(ARMS)
    assert len(of_class(chart(page, "forest"), "g", "series")) == len(ARMS) - 1


def test_the_band_of_a_panel_holds_every_seed_that_ended(results):
    runs = [run for run in results["runs"] if run["arm"] == "rms" and run["purpose"] == "final"]
    for x, low, middle, high in report_curves.over_seeds([run["curve"] for run in runs]):
        values = [loss for run in runs for step, loss in run["curve"] if step == x]
        assert (low, high) == (min(values), max(values)) and middle in values


def test_the_bound_and_the_intervals_of_the_forest_plot_are_to_scale(page):
    svg = chart(page, "forest")
    band = of_class(svg, "rect", "bound")[0]
    low, width = float(band.get("x")), float(band.get("width"))
    at = lambda value: low + width * (value + 0.01) / 0.02  # noqa: E731
    ends = [float(x) for x in re.findall(r"[ML]([\d.]+),", of_class(svg, "path", "whisker")[0].get("d"))]
    assert ends == pytest.approx([at(-0.0012 - 0.0031), at(-0.0012 + 0.0031)], abs=0.2)
    assert float(of_class(svg, "circle", "mark")[0].get("cx")) == pytest.approx(at(-0.0012), abs=0.2)


def test_a_rate_at_which_a_run_diverged_has_a_cross_above_all_losses(page):
    svg = chart(page, "valley")
    heights = [float(y) for c in of_class(svg, "path", "curve") for y in re.findall(r",([\d.]+)", c.get("d"))]
    crosses = [float(re.match(r"M[\d.]+,([\d.]+)", c.get("d"))[1]) + 8 for c in of_class(svg, "path", "cross")]
    assert len(crosses) == 2 and max(crosses) < min(heights)


def test_arms_differ_in_their_marker_and_in_more_than_colour(page):
    series = of_class(chart(page, "valley"), "g", "series")
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


def test_no_text_of_a_chart_is_cut_off_or_covers_another(page):
    for svg in svgs(page):
        width, height = (float(v) for v in svg.get("viewBox").split()[2:])
        texts = boxes(svg)
        for i, (left, top, right, bottom, words) in enumerate(texts):
            assert left >= -2 and right <= width + 2 and top >= -1 and bottom <= height + 1, words
            for other in texts[:i]:
                apart = left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]
                assert apart, (svg.find("title").text, words, other[4])


def test_long_names_many_arms_and_far_differences_still_fit(results):
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


@pytest.mark.parametrize("empty", [{}, {"name": "norms", "runs": [], "arms": None, "speed": [], "norm_share": {}}])
def test_parts_without_a_measurement_say_so_in_one_line(empty):
    markdown, page = report.markdown(empty), report.html(empty)
    parts = len(report.SECTIONS) - len(report.RARE) - 1  # notes are no measurement
    assert markdown.count("This part is not measured.") == page.count("This part is not measured.") == parts
    for text in (markdown, page):
        assert "The difference in validation loss is not measured." in text
        assert "The time of a training step is not measured." in text
    assert Reader(page).tags.count("svg") == 0


def test_a_switch_of_norms_is_counted_per_variant_over_the_seeds_that_ended(results, page):
    markdown = report.markdown(results)
    assert "| rms at once | 2 of 2 | 0 | +2.0000 | +1.8000 to +2.2000 |" in markdown
    assert "| rms, norms trained | 2 of 2 | 50 | +0.0500 | 0.0000 to +0.1000 |" in markdown
    assert "| layer, all trained | 1 of 2 | 50 | −0.1000 | −0.1000 |" in markdown
    assert "A LayerNorm model switched to RMSNorm" in page


@pytest.mark.parametrize("rest", [{"switched": []}, {"switched": None}, {}])
def test_without_a_switch_of_norms_nothing_is_said_of_one(results, rest):
    content = {key: value for key, value in results.items() if key != "switched"} | rest
    for text in (report.markdown(content), report.html(content)):
        assert "switched to RMSNorm" not in text and "This part is not measured" not in text


def test_a_norm_alone_is_told_in_plain_words_with_a_column_for_each_norm(results):
    markdown = report.markdown(results)
    assert "| what | rms | layer |" in markdown
    assert "| input 10 times as large: relative change of the output | 4.6e−06 | 5.0e−06 |" in markdown
    assert "| cosine of output and input | 1.000000 | 0.957248 |" in markdown
    assert "share lost without the upcast | 99.6% | – |" in markdown


def test_every_demonstration_has_its_words():
    found = demonstrations.all_of_them()
    rows = report.markdown({"demonstrations": found}).split("## A norm alone")[1]
    assert len(re.findall(r"(?m)^\| .*?\d.* \|$", rows)) == len({re.sub("^[a-z0-9]+_", "", name) for name in found})


@pytest.mark.parametrize("part", sorted(make_results()))
def test_any_part_can_be_missing(results, part):
    rest = {key: value for key, value in results.items() if key != part}
    assert report.markdown(rest) and Reader(report.html(rest)).tags


def test_any_value_can_be_missing(results):
    chance = random.Random(0)
    for _ in range(8):
        holed = change(results, lambda value: None if chance.random() < 0.3 else value)
        assert report.markdown(holed)
        xml.fromstring(report.html(holed)[15:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, 9e98, -9e98, 9e-300, 10**400, 0, 0.0])
def test_a_number_that_is_none_is_never_printed_as_one(results, value):
    broken = change(results, lambda old: old if isinstance(old, str | bool) or old is None else value)
    chance = random.Random(1)
    some = change(results, lambda old: value if isinstance(old, float) and chance.random() < 0.2 else old)
    for content in (broken, some):
        page = report.html(content)
        for text in (report.markdown(content), " ".join(Reader(page).text), *re.findall("<svg.*?</svg>", page)):
            assert not re.search(r"(?i)(?<![a-z])(nan|inf|infinity)(?![a-z])", text)
        for svg in svgs(page):
            assert not [v for e in svg.iter() for v in e.attrib.values() if re.search(r"nan|inf\b|e\+", v)]


HOSTILE = [
    "</title></svg><script>alert(1)</script>",
    "\" onload='x' <img src=x>",
    "a | b\n# c\n```\n</td>",
    "[x](javascript:1) ![y][z] <b>&amp;",
    "\x00\x1b[31m\ud800\u202e]]>",
    "`" * 5,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(results, text, tmp_path):
    hostile = change(results, lambda old: f"{old} {text}" if isinstance(old, str) else old)
    for run, kind in zip(hostile["runs"], results["runs"], strict=True):
        run |= {"purpose": kind["purpose"], "status": kind["status"]}
    page = report.html(hostile)
    before, after = Reader(report.html(results)), Reader(page)
    assert set(after.tags) <= set(before.tags) and {n for n, _ in after.attributes} <= {n for n, _ in before.attributes}
    root = xml.fromstring(page[15:])
    assert charts.printable(text).split()[-1] in "".join(root.itertext())
    markdown = re.sub(r"(`{3,})\n.*?\n\1\n", "", report.markdown(hostile), flags=re.DOTALL)  # code is as typed
    assert "<" not in markdown and not re.search(r"(?<!\\)\][(\[:]", markdown) and not re.search(r"(?<!\\)`", markdown)
    assert sum(line.startswith("#") for line in markdown.splitlines()) == 1 + len(report.SECTIONS)
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    report.write(hostile, tmp_path)


@pytest.mark.parametrize(
    "seconds, text", [(21.34, "21.34 s"), (0.0213, "21.30 ms"), (4.56e-5, "45.60 µs"), (0, "0.000 µs")]
)
def test_times_are_in_the_unit_that_suits_them(seconds, text):
    assert wording.seconds(seconds) == text


def test_small_numbers_round_to_a_zero_without_a_sign_and_large_ones_keep_their_size():
    assert wording.number(-0.00001, "+.4f") == "0.0000" and wording.number(-0.01, "+.4f") == "−0.0100"
    assert wording.number(2.5e30) == "2.5000e+30" and wording.whole(1234567) == "1,234,567"
    assert wording.number(math.nan) == wording.number(None) == wording.number("3") == wording.number(True) == "–"


def test_files_are_written_whole_and_nothing_else_is_left(results, tmp_path, monkeypatch):
    report.write({}, tmp_path / "new" / "folder")
    old = (tmp_path / "new" / "folder" / "report.html").read_text(encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(report, "html", lambda results: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            report.write(results, tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "report.html").read_text(encoding="utf-8") == old
    assert (tmp_path / "new" / "folder" / "report.md").read_text(encoding="utf-8") == report.markdown({})
    report.write(results, tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["report.html", "report.md"]
    assert (tmp_path / "new" / "folder" / "report.html").read_text(encoding="utf-8") == report.html(results)


def test_the_report_of_results_that_went_through_a_file_is_the_same(results):
    again = json.loads(json.dumps(results))
    assert report.html(again) == report.html(results) and report.markdown(again) == report.markdown(results)


def test_arms_with_baselines_of_their_own_are_each_named_with_theirs(results):
    compared = [{**c, "arm": f"{c['arm']}, post", "baseline": "layer, post"} for c in results["comparisons"]]
    content = {**results, "comparisons": results["comparisons"] + compared}
    for text in (report.markdown(content), report.html(content)):
        assert "Validation loss minus that of its baseline" in text and "higher than layer, post" in text
    assert "| rms, post | layer, post | 5 |" in report.markdown(content)


def test_an_arm_that_could_not_be_compared_is_named(results):
    compared = [c for c in results["comparisons"] if c["arm"] != "none"]
    text = "Not compared, because runs diverged: none (3 of 5 runs ended)."
    assert text in report.markdown({**results, "comparisons": compared}) and text not in report.markdown(results)
    assert text in report.html({**results, "comparisons": compared})


def test_underscores_within_a_word_of_the_markdown_stay_as_they_are(results):
    assert "Linux x86_64 and \\_this\\_;" in report.markdown(
        {**results, "machine": {"a": "Linux x86_64 and _this_", "b": 1}}
    )
