"""Charts as inline SVG text: lines over an axis, and rows of intervals (a forest plot). No script, no file, no font.

A chart is drawn 420 units wide, so that its text is still text on a phone, and takes its colours from the CSS of the
page (`ablation.page`), so that it turns dark with it. Nobody needs to see colours: arms differ in marker and in dash as
well, and their names stand at their curves. Values outside an axis are drawn on its edge. Numbers are finite, and below
1e99 so that their ratios are too.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ablation.axis import Axis, round_ticks, tick

WIDTH, FONT = 420, 12
GLYPH = 0.62 * FONT  # width of a character, on the generous side: the reader's font is not known
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4")
UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Series:
    """One arm: a curve with its band, the points that get a marker, and where (on x) runs diverged."""

    name: str
    style: int
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    marked: Sequence[tuple[float, float]] = ()
    crosses: Sequence[float] = ()


@dataclass(frozen=True)
class Row:
    """One line of a forest plot: an estimate, its interval if there is one, and what is said beside it."""

    name: str
    style: int
    value: float
    interval: tuple[float, float] | None
    numbers: str
    verdict: str


def lines(
    key: str,
    title: str,
    description: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    ghost: Sequence[tuple[float, float]] = (),
    level: float | None = None,
    names: bool = True,
    width: int = WIDTH,
    height: int = 270,
) -> str:
    """Curves, with their names at their ends; `ghost` is a grey dashed curve and `level` a height to compare with.

    `key` makes the chart's ids unique in its page.
    """
    longest = max((len(_short(s.name)) for s in series), default=0)
    diverged = [s for s in series if s.crosses] if names else []
    left = 14 + GLYPH * max((len(tick(v)) for v in y.ticks), default=0)
    left, right = max(left, 66 if diverged else 0), (width - 30 - longest * GLYPH) if names else width - 12
    top, bottom = 24 + 14 * len(diverged) + 8 * bool(diverged), height - 38

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + (right - left) * x.share(point[0]), bottom - (bottom - top) * y.share(point[1])

    parts = [_frame(x, y, left, right, top, bottom, width)]
    if diverged:
        parts.append(_text(left - 6, 30, "diverged", "faint", "end"))
        parts.append(_line("axis", left, top - 8, right, top - 8))
    if level is not None:
        parts.append(_line("axis", left, at((x.low, level))[1], right, at((x.low, level))[1]))
    if ghost:
        parts.append(_path("ghost", [at(p) for p in ghost]))
    for s in series:
        dash = DASHES[s.style % len(DASHES)]
        inside = [_path("curve", [at(p) for p in s.points], dash)]
        if s.band:
            edge = [at((b[0], b[2])) for b in s.band] + [at((b[0], b[1])) for b in reversed(s.band)]
            inside.insert(0, _path("band", edge, close=True))
        inside += [_marker(s.style, *at(p)) for p in s.marked or s.points[:: max(1, len(s.points) // 8)]]
        above = 26 + 14 * diverged.index(s) if s in diverged else top
        inside += [_cross(at((c, y.high))[0], above) for c in s.crosses]
        parts.append(f'<g class="series c{s.style % 8}">{"".join(inside)}</g>')
    if names:
        parts += [_text(right + 24, 30 + 14 * i, _short(s.name)) for i, s in enumerate(diverged)]
        parts += [_marker_group(s.style, right + 14, 26 + 14 * i) for i, s in enumerate(diverged)]
        parts += _names([(s, at(s.points[-1])) for s in series if s.points], right, top, bottom)
    return _svg(key, title, description, width, height, parts)


def forest(
    key: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    label: str,
    *,
    centre: float = 0.0,
    bound: float | None = None,
) -> str:
    """Intervals under each other; `centre` is where nothing differs, the shaded band reaches `bound` to each side."""
    x = Axis(label, *_reach(rows, centre, bound))
    x = Axis(label, x.low, x.high, ticks=tuple(round_ticks(x.low, x.high)))
    left, right, room = 12, WIDTH - 12, int((WIDTH - 24) / GLYPH)
    short = all(len(row.name + row.verdict + row.numbers) + 5 <= room for row in rows)  # on one line of text
    pitch, down = (42, 27) if short else (56, 41)
    bottom = 4 + pitch * len(rows)

    def at(value: float) -> float:
        return left + (right - left) * x.share(value)

    parts = [_frame(x, None, left, right, 0, bottom, WIDTH)]
    for i, row in enumerate(rows):
        y, inside = 4 + pitch * i, []
        if bound:
            low, high = at(centre - bound), at(centre + bound)
            parts.append(f'<rect class="bound" x="{low:.1f}" y="{y + down - 9}" width="{high - low:.1f}" height="18"/>')
        parts += [
            _line("grid", left, y + down, right, y + down),
            _line("axis", at(centre), y + down - 9, at(centre), y + down + 9),
        ]
        outside = 1 if row.value > x.high else -1 if row.value < x.low else 0
        if row.interval and not outside:
            inside.append(_path("whisker", [(at(row.interval[0]), y + down), (at(row.interval[1]), y + down)]))
        if outside:
            tip, back = (right - 2, right - 16) if outside > 0 else (left + 2, left + 16)
            inside.append(_path("mark", [(tip, y + down), (back, y + down - 6), (back, y + down + 6)], close=True))
        else:
            inside.append(_marker(row.style, at(row.value), y + down, 6))
        parts.append(f'<g class="series c{row.style % 8}">{"".join(inside)}</g>')
        name = _text(left, y + 12, _short(row.name, 18), "strong")
        beside = f'<tspan class="faint" dx="8">{escape(printable(row.verdict))}</tspan></text>'
        parts.append(name.replace("</text>", beside) if short else name)
        parts.append(_text(right, y + 12, row.numbers, "", "end"))
        if not short:
            parts.append(_text(left, y + 26, row.verdict, "faint", limit=room))
    return _svg(key, title, description, WIDTH, bottom + 38, parts)


def printable(text: object) -> str:
    """The text without characters that XML and UTF-8 have no place for, or that turn the reading direction."""
    return UNPRINTABLE.sub("�", str(text))


def _svg(key: str, title: str, description: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(printable(title))}</title>'
        f'<desc id="{key}-d">{escape(printable(description))}</desc>{"".join(parts)}</svg>'
    )


def _frame(x: Axis, y: Axis | None, left: float, right: float, top: float, bottom: float, width: float) -> str:
    parts, used = [_line("axis", left, bottom, right, bottom)], -math.inf
    for value in x.ticks:
        place, half = left + (right - left) * x.share(value), len(tick(value)) * GLYPH / 2
        if place - half > used + 6 and place + half < width:
            parts.append(_line("axis", place, bottom, place, bottom + 4))
            parts.append(_text(place, bottom + 17, tick(value), "faint", "middle"))
            used = place + half
    parts.append(_text(width - 12, bottom + 33, x.label, "faint", "end"))
    if y is None:
        return "".join(parts)
    used = math.inf
    for value in y.ticks:
        place = bottom - (bottom - top) * y.share(value)
        if place < used - 18 and place > top - 2:
            parts.append(_line("grid", left, place, right, place))
            parts.append(_text(left - 6, place + 4, tick(value), "faint", "end"))
            used = place
    parts.append(_text(4, 10, y.label, "faint"))
    return "".join(parts)


def _names(ends: list[tuple[Series, tuple[float, float]]], right: float, top: float, bottom: float) -> list[str]:
    """Names beside the ends of their curves, pushed apart until none covers another."""
    ends = sorted(ends, key=lambda end: end[1][1])
    gap = min(14.0, (bottom - top) / max(len(ends), 1))
    places = [y for _, (_, y) in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], places[i + 1] - gap if i + 1 < len(places) else bottom)
    parts = []
    for (s, (x, y)), place in zip(ends, places, strict=True):
        parts.append(_line("leader", x, y, right + 8, place))
        parts.append(_marker_group(s.style, right + 14, place))
        parts.append(_text(right + 24, place + 4, _short(s.name)))
    return parts


def _reach(rows: Sequence[Row], centre: float, bound: float | None) -> tuple[float, float]:
    """The range of a forest plot: rows far beyond the others (10 bounds) become an arrow and squash nobody."""
    reaches = [max(abs(v - centre) for v in (row.value, *(row.interval or ()))) for row in rows]
    if bound:
        reaches = [2 * bound, *(reach for reach in reaches if reach <= 10 * bound)]
    reach = max(reaches, default=1.0) * 1.08 or 1.0
    return centre - reach, centre + reach


def _short(name: str, limit: int = 16) -> str:
    name = printable(name)
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start", limit: int = 64) -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{of_kind}>{escape(_short(text, limit))}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _path(kind: str, points: Sequence[tuple[float, float]], dash: str = "", close: bool = False) -> str:
    content = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points) + ("Z" if close else "") if points else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{kind}"{dashed} d="{content}"/>'


def _cross(x: float, y: float, r: float = 4) -> str:
    return (
        f'<path class="cross" d="M{x - r:.1f},{y - r:.1f}l{2 * r},{2 * r}M{x + r:.1f},{y - r:.1f}l-{2 * r},{2 * r}"/>'
    )


def _marker_group(style: int, x: float, y: float) -> str:
    return f'<g class="c{style % 8}">{_marker(style, x, y)}</g>'


def _marker(style: int, x: float, y: float, r: float = 4.5) -> str:
    """Circle, square, triangle, diamond: filled, and after these four open."""
    kind = "open" if style % 8 >= 4 else "mark"
    if style % 4 == 0:
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
    corners = {
        1: ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        2: ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
        3: ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    }[style % 4]
    return _path(kind, [(x + r * dx, y + r * dy) for dx, dy in corners], close=True)
