"""The report of an ablation: the same numbers in Markdown and on the page, nothing fetched, no input that breaks it."""

import json
import math
import random
import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import pytest

from ablation import charts, demonstrations, report, wording

HOSTILE = [
    "</title></svg><script>alert(1)</script>",
    "\" onload='x' <img src=x>",
    "a | b\n# c\n```\n</td>",
    "[x](javascript:1) ![y][z] <b>&amp;",
    "\x00\x1b[31m\ud800\u202e]]>",
    "`" * 5,
]


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


def change(value, leaf):
    """The same lists and dicts with every other value changed."""
    if isinstance(value, dict):
        return {key: change(of, leaf) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [change(of, leaf) for of in value]
    return leaf(value)


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


def test_the_page_is_closed_in_order_and_well_formed(page, svgs):
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


def test_any_part_can_be_missing(results):
    for part in sorted(results):
        rest = {key: value for key, value in results.items() if key != part}
        assert report.markdown(rest) and Reader(report.html(rest)).tags


def test_any_value_can_be_missing(results):
    chance = random.Random(0)
    for _ in range(8):
        holed = change(results, lambda value: None if chance.random() < 0.3 else value)
        assert report.markdown(holed)
        xml.fromstring(report.html(holed)[15:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, 9e98, -9e98, 9e-300, 10**400, 0, 0.0])
def test_a_number_that_is_none_is_never_printed_as_one(results, value, svgs):
    broken = change(results, lambda old: old if isinstance(old, str | bool) or old is None else value)
    chance = random.Random(1)
    some = change(results, lambda old: value if isinstance(old, float) and chance.random() < 0.2 else old)
    for content in (broken, some):
        page = report.html(content)
        for text in (report.markdown(content), " ".join(Reader(page).text), *re.findall("<svg.*?</svg>", page)):
            assert not re.search(r"(?i)(?<![a-z])(nan|inf|infinity)(?![a-z])", text)
        for svg in svgs(page):
            assert not [v for e in svg.iter() for v in e.attrib.values() if re.search(r"nan|inf\b|e\+", v)]


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
