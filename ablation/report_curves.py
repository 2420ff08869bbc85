"""Sections of the report that are drawn as curves: over steps, over learning rates, over the depth of the network.

Where a curve stands for several seeds it is the middle one, and a band or a table gives the least and the greatest.
A section is an empty list where nothing was measured.
"""

from collections.abc import Iterable
from statistics import median_low

from ablation import charts
from ablation.axis import axis
from ablation.document import Block, Figures, table
from ablation.report_comparisons import styles
from ablation.wording import NOTHING, finite, number, spread, whole

PROBES = {  # key: name, short, by depth (else by step), logarithmic
    "mean_over_deviation": ("Mean over standard deviation of a norm's input", "mean / standard deviation", True, False),
    "cosine_with_ones": ("Cosine of a norm's input with the vector of ones", "cosine", True, False),
    "gradient_norm": ("Norm of the gradient", "norm", False, True),
    "update_share": ("Size of an update over size of the weights", "share", False, True),
}
Points = list[tuple[float, float]]
Band = list[tuple[float, float, float, float]]  # x, least, middle, greatest


def losses(results: dict) -> list[Block]:
    """A panel of losses over steps for each arm."""
    style = styles(results)
    runs = {arm: _final(results, arm) for arm in style}
    runs = {arm: of for arm, of in runs.items() if any(_pairs(run.get("curve")) for run in of)}
    ended = {arm: [run for run in of if run.get("status") == "done"] for arm, of in runs.items()}
    bands = {arm: over_seeds(_pairs(run.get("curve")) for run in of) for arm, of in ended.items()}
    dots = {arm: _middle(over_seeds(_pairs(run.get("validation")) for run in of)) for arm, of in ended.items()}
    heights = [v for band in bands.values() for point in band for v in point[1:]]
    heights += [v for points in dots.values() for _, v in points]
    steps = [step for of in runs.values() for run in of for step, _ in _pairs(run.get("curve"))]
    x, y = axis("step", steps), axis("loss, nats per token", heights, log=True)
    baseline, items = results.get("baseline"), []
    for arm, band in bands.items():
        cut = [_pairs(run.get("curve")) for run in runs[arm] if run.get("status") != "done"]
        edges = [(step, low, high) for step, low, _, high in band]
        crosses = [curve[-1][0] for curve in cut if curve]
        series = charts.Series(str(arm), style[arm], _middle(band), edges, dots[arm], crosses)
        ghost = _middle(bands[baseline]) if baseline in bands and baseline != arm else []
        count = f"{len(ended[arm])} of {len(runs[arm])} runs ended"
        key, title = f"loss-{len(items)}", f"Loss of {arm}"
        spoken = f"Training and validation loss over steps; {count}."
        panel = charts.lines(key, title, spoken, [series], x, y, ghost=ghost, names=False, width=300, height=210)
        items.append((f"{arm}: {count}", panel))
    words = (
        "Line: training loss, the middle seed; band: from the least to the greatest seed; markers: validation loss; "
        f"cross at the top: a run diverged, and is in no band; grey dashes: {baseline}. All panels have the same axes."
    )
    return [Figures(items, "panels", words)] if items else []


def valleys(results: dict) -> list[Block]:
    """Loss by learning rate."""
    found, style = {v.get("arm"): v for v in results.get("valleys") or []}, styles(results)
    at = {arm: dict(zip(v.get("rates") or [], v.get("losses") or [], strict=False)) for arm, v in found.items()}
    rates = sorted({rate for of in at.values() for rate in of if finite(rate) and rate > 0})
    if not rates:
        return []
    series = []
    for arm, of in at.items():
        points = [(rate, of[rate]) for rate in rates if finite(of.get(rate)) is not None]
        crosses = [rate for rate in rates if rate in of and finite(of[rate]) is None]
        series.append(charts.Series(str(arm), style[arm], points, marked=points, crosses=crosses))
    x = axis("learning rate", rates, log=True, ticks=rates)
    y = axis("validation loss, nats per token", [loss for s in series for _, loss in s.points], log=True)
    columns = {
        "arm": lambda arm: arm,
        **{number(rate, "g"): lambda arm, rate=rate: _loss_at(at[arm], rate) for rate in rates},
        "best rate": lambda arm: (
            number(best := found[arm].get("best"), "g")
            + (" (at the edge)" if best and found[arm].get("at_edge") else "")
        ),
    }
    spoken = "; ".join(f"{arm}: " + ", ".join(f"{_loss_at(at[arm], rate)} at {rate:g}" for rate in rates) for arm in at)
    chart = charts.lines("valley", "Loss by learning rate", spoken, series, x, y, height=310)
    words = "On seeds that the final table does not use. A cross at the top: diverged, at that rate."
    numbers = table("Validation loss, nats per token, by learning rate", list(found), columns)
    return [Figures([(words, chart)]), numbers]


def inside(results: dict) -> list[Block]:
    """What was measured within the network, by depth or by step."""
    style = styles(results)
    runs = {arm: of for arm in style if (of := [run for run in _final(results, arm) if run.get("probes")])}
    figures, tables = [], []
    for key, (name, short, by_depth, log) in PROBES.items():
        seeds = {arm: [_probe(run["probes"].get(key), by_depth, log) for run in of] for arm, of in runs.items()}
        bands = {arm: over_seeds(curves) for arm, curves in seeds.items() if any(curves)}
        if not bands:
            continue
        places = sorted({point[0] for band in bands.values() for point in band})
        x = axis("norm, by depth" if by_depth else "step", places, ticks=places if by_depth else ())
        y = axis(short, [point[2] for band in bands.values() for point in band], log=log)
        series = [charts.Series(str(arm), style[arm], _middle(band)) for arm, band in bands.items()]
        zero = 0.0 if not log and y.low < 0 < y.high else None
        spoken = f"One curve for each of {', '.join(map(str, bands))}."
        figures.append((name, charts.lines(key, name, spoken, series, x, y, level=zero)))
        if by_depth:
            at = {(arm, place): spread(ends) for arm, band in bands.items() for place, *ends in band}
            columns = {"norm": whole, **{str(a): lambda place, a=a, at=at: at.get((a, place), NOTHING) for a in bands}}
            tables.append(table(f"{name}, least to greatest seed, by depth", places, columns, folded=True))
    columns = {
        "arm": lambda arm: arm,
        "last gradient's norm": lambda arm: spread(
            norm for run in runs[arm] for _, norm in _pairs(run["probes"].get("gradient_norm"))[-1:]
        ),
        "largest activation": lambda arm: spread(run["probes"].get("largest_activation") for run in runs[arm]),
        "loss spikes of a run": lambda arm: spread((run.get("spikes") for run in runs[arm]), ",.0f"),
    }
    words = "Curves: the middle of the final seeds. Norms are counted from the input on."
    drawn = [Figures(figures, "pairs", words)] if figures else []
    stability = table("Stability, least to greatest seed", list(runs), columns)
    return [*drawn, stability, *tables] if runs else []


def over_seeds(curves: Iterable[Points]) -> Band:
    """The band of the curves, at each x that any of them has."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            at.setdefault(x, []).append(y)
    return [(x, min(ys), median_low(ys), max(ys)) for x, ys in sorted(at.items())]


def _middle(band: Band) -> Points:
    return [(x, middle) for x, _, middle, _ in band]


def _final(results: dict, arm: str) -> list[dict]:
    return [run for run in results.get("runs") or [] if run.get("arm") == arm and run.get("purpose") == "final"]


def _pairs(points: object) -> Points:
    """The points whose two numbers are finite."""
    return [(x, y) for x, y in points or [] if finite(x) is not None and finite(y) is not None]


def _probe(values: object, by_depth: bool, log: bool) -> Points:
    points = _pairs(enumerate(values or [], start=1) if by_depth else values)
    return [(x, y) for x, y in points if y > 0 or not log]


def _loss_at(found: dict, rate: float) -> str:
    return NOTHING if rate not in found else "diverged" if finite(found[rate]) is None else number(found[rate])
