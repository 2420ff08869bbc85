"""The pictures of a report, drawn by matplotlib in a light and a dark theme, as SVG to be inlined."""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ablation.analysis import Study
from ablation.effects import Effect
from ablation.plan import baseline
from ablation.results import Curve
from errors import UserError
from training.plot import COLOURS

# The README's colors first. The hues are the same in both themes. Any two colors are at least 0.11 apart in Oklab, and
# their contrast to the page is at least 3.
PALETTE = {
    "light": (
        *(*COLOURS, "#8A6A00", "#35A0C8", "#1B1B1B"),  # blue, orange, green, pink, ochre, sky blue, ink
        *("#4B2A9E", "#7A7A7A", "#8C0F2E", "#1F5200", "#B400DC"),  # violet, gray, red, leaf green, magenta
    ),
    "dark": (
        *("#3D9BD9", "#F0793A", "#1DB992", "#DD94BC", "#D9A800", "#7FE3F2", "#F2F2F2"),
        *("#9A6BFA", "#8F8F8F", "#F2355B", "#A6E03C", "#F04BF0"),
    ),
}
INK = {"light": "#1b1b1b", "dark": "#ececec"}
MUTED = {"light": "#6b6b6b", "dark": "#a9a9a9"}
MARKERS = "os^DvPX*<>phd"  # one more than colors: the first 12 x 13 arms differ in color or marker
XLABEL = "difference in loss, nats per token"
FAR = 4.0  # times the median distance
CLIP_QUANTILE = 0.99  # of the losses: the axis ends there, so that one spike does not flatten all curves


@dataclass(frozen=True)
class Picture:
    """A picture as two SVG elements, and in words."""

    caption: str
    alt: str
    light: str
    dark: str


def render(draw: "Draw", caption: str, alt: str, width: float = 4.8, height: float = 3.2) -> Picture:
    """Draw in the light and in the dark theme; sizes in inches."""
    svgs = {}
    for theme in ("light", "dark"):
        ink = INK[theme]
        colors = {key: ink for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
        settings = {"svg.fonttype": "none", "svg.hashsalt": f"{caption} {theme}", "font.size": 10}
        with matplotlib.rc_context(colors | settings | {"figure.facecolor": "none", "axes.facecolor": "none"}):
            canvas = Canvas(figsize=(width, height), layout="constrained")
            axes = canvas.add_subplot()
            axes.grid(color=MUTED[theme], alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes, Style(theme))
            file = io.StringIO()
            canvas.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.05)
        svg = file.getvalue()[file.getvalue().index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", re.sub(r'<g id="[^"]*"', "<g", svg), flags=re.DOTALL)
        # A hundredth of a point is fine enough for attributes; the numbers of labels are text and stay as they are.
        svg = re.sub(r'"[^"]*"', lambda attribute: re.sub(r"(\d\.\d\d)\d+", r"\1", attribute.group()), svg)
        svgs[theme] = svg.replace("<svg ", '<svg aria-hidden="true" ', 1)
    return Picture(caption, alt, **svgs)


@dataclass(frozen=True)
class Style:
    """Colors and markers of one theme; an arm keeps its number, and so its look, in all pictures."""

    theme: str

    def color(self, number: int) -> str:
        return PALETTE[self.theme][number % len(PALETTE[self.theme])]

    @property
    def muted(self) -> str:
        return MUTED[self.theme]


Draw = Callable[[Axes, Style], None]


def numbers(study: Study) -> dict[str, int]:
    return {study.label(arm): number for number, arm in enumerate(study.plan.arms)}


def forest(effects: Sequence[tuple[str, int, Effect]], xlabel: str, center: float, margin: float | None = None) -> Draw:
    """Estimates with their 95% intervals, one row each: (name, number of the color, effect)."""

    def draw(axes: Axes, style: Style) -> None:
        if margin is not None:
            axes.axvspan(-margin, margin, color=style.muted, alpha=0.2, linewidth=0)
        axes.axvline(center, color=style.muted, linewidth=1)
        far = clip_far([effect for _, _, effect in effects], center)
        for row, (_, number, effect) in enumerate(effects):
            color = style.color(number)
            if abs(effect.estimate - center) > far:
                end = center + math.copysign(far, effect.estimate - center)
                arrow = {"arrowstyle": "->", "color": color, "linewidth": 2}
                axes.plot(end, row, alpha=0)  # annotations do not widen the axis
                axes.annotate("", (end, row), (center + 0.9 * (end - center), row), arrowprops=arrow)
                axes.text(center + 0.88 * (end - center), row, f"{effect.estimate:+.3f}", ha="right", va="center")
                continue
            if effect.interval is not None:
                axes.plot(effect.interval, (row, row), color=color, linewidth=4, alpha=0.5, solid_capstyle="butt")
            axes.plot(effect.estimate, row, MARKERS[number % len(MARKERS)], color=color, markersize=7)
        axes.set_yticks(range(len(effects)), [name for name, _, _ in effects])
        axes.set_ylim(len(effects) - 0.5, -0.5)
        axes.set_xlabel(xlabel)
        axes.grid(visible=False, axis="y")

    return draw


def clip_far(effects: Sequence[Effect], center: float) -> float:
    """The distance from the center beyond which an effect becomes an arrow, so that it does not flatten the others."""
    reach = [max(abs(end - center) for end in e.interval or (e.estimate, e.estimate)) for e in effects]
    near = [distance for distance in reach if distance <= FAR * np.median(reach)]
    return 1.15 * max(near)


def forest_picture(effects: Sequence[tuple[str, int, Effect]], draw: Draw, caption: str) -> Picture:
    spoken = "; ".join(f"{name}: {effect.estimate:.4g}" for name, _, effect in effects)
    return render(draw, caption, spoken, height=0.9 + 0.36 * len(effects))


def difference_rows(study: Study) -> list[tuple[str, int, Effect]]:
    number = numbers(study)
    return [(c.arm, number[c.arm], c.loss) for c in study.comparisons]


def differences(study: Study) -> Picture:
    """Every comparison, with the equivalence margin shaded."""
    rows = difference_rows(study)
    caption = (
        f"Validation loss minus that of {base_name(study)} over {study.comparisons[0].loss.n} paired seeds, with 95% "
        f"intervals. Shaded: the equivalence margin, ±{study.plan.margin:g}."
    )
    far = clip_far([effect for _, _, effect in rows], 0.0)
    if any(abs(effect.estimate) > far for _, _, effect in rows):
        caption += " Arrow: beyond the axis."
    return forest_picture(rows, forest(rows, XLABEL, 0.0, study.plan.margin), caption)


def base_name(study: Study) -> str:
    baselines = {comparison.baseline for comparison in study.comparisons}
    return next(iter(baselines)) if len(baselines) == 1 else "its baseline"


def loss_curves(study: Study) -> list[Picture]:
    """A panel for each arm: training loss, validation loss where it was stored, and where runs diverged."""
    runs = {study.label(arm): list(study.final(arm).result) for arm in study.plan.arms}
    runs = {name: found for name, found in runs.items() if any(run.training_curve for run in found)}
    completed = {name: [run for run in found if run.status == "completed"] for name, found in runs.items()}
    training = {name: middle([run.training_curve for run in found]) for name, found in completed.items()}
    validation = {name: middle([run.validation_curve for run in found]) for name, found in completed.items()}
    values = [loss for found in completed.values() for run in found for _, loss in run.training_curve]
    values += [loss for curve in validation.values() for loss in curve[1]]
    if not values:
        return []
    low, high = min(values), float(np.quantile(values, CLIP_QUANTILE))
    bases = {c.arm: c.baseline for c in study.comparisons}
    pictures = []
    for name, found in runs.items():
        above = sum(loss > high for run in completed[name] for _, loss in run.training_curve)
        parts = ["line: training loss, median of seeds"]
        parts += ["dots: validation loss"] if len(validation[name][0]) else []
        parts += [f"dashed: training loss of {bases[name]}"] if name in bases and bases[name] in training else []
        count = f"{above} point{'s' if above != 1 else ''}"
        parts += [f"{count} above the axis, which ends at the {CLIP_QUANTILE:.0%} quantile"] if above else []
        diverged = [run for run in found if run.status == "diverged"]
        parts += [f"crosses: {len(diverged)} of {len(found)} runs diverged"] if diverged else []

        def draw(axes: Axes, style: Style, name: str = name, diverged: list = diverged) -> None:
            color = style.color(numbers(study)[name])
            if bases.get(name) in training:
                axes.plot(*training[bases[name]], "--", color=style.muted, linewidth=1)
            axes.plot(*training[name], color=color, linewidth=1.4)
            axes.plot(*validation[name], "o", color=color, markersize=3.5)
            steps = [run.training_curve[-1][0] for run in diverged if run.training_curve]
            axes.plot(steps, [high] * len(steps), "x", color=color)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.set_ylim(low * 0.98, high * 1.02)
            axes.set_xlabel("step")
            axes.set_ylabel("nats per token")

        pictures.append(render(draw, f"{name} ({'; '.join(parts)})", f"Loss of {name} over steps", 3.8, 2.7))
    return pictures


def sweep_curves(study: Study) -> Picture:
    """Mean loss of every arm over the learning rates of its sweep."""
    rates = study.rates

    def draw(axes: Axes, style: Style) -> None:
        for sweep in study.sweeps:
            number = numbers(study)[study.label(sweep.arm)]
            known = [(rate, loss) for rate, loss in sweep.losses.items() if np.isfinite(loss)]
            marker, color = MARKERS[number % len(MARKERS)], style.color(number)
            axes.plot(*zip(*known, strict=True), marker=marker, color=color, markersize=5, label=study.label(sweep.arm))
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlabel("learning rate")
        axes.set_ylabel("validation loss, nats per token")
        if axes.lines:
            axes.figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=4)

    seeds = study.plan.sweep_seeds
    caption = f"Mean of {seeds} seeds that the comparison does not use; no point where a run diverged or is missing."
    return render(draw, caption, "Loss of each arm by learning rate", height=4.2)


def difference_curves(study: Study) -> list[Picture]:
    """A panel for each arm that is compared: its pairs' differences at every learning rate, and the noise."""
    return [_difference_curve(study, name) for name in dict.fromkeys(study.label(p.arm) for p in study.curve)]


def _difference_curve(study: Study, name: str) -> Picture:
    points = [point for point in study.curve if study.label(point.arm) == name]
    base = study.label(baseline(study.plan, points[0].arm))

    def draw(axes: Axes, style: Style) -> None:
        color = style.color(numbers(study)[name])
        rates = [point.learning_rate for point in points]
        measured = [point for point in points if point.noise is not None and math.isfinite(point.noise.deviation)]
        noise = [point.noise.deviation for point in measured]
        at = [point.learning_rate for point in measured]
        axes.fill_between(at, np.negative(noise), noise, color=style.muted, alpha=0.25, linewidth=0)
        for end in (-study.plan.margin, study.plan.margin):
            axes.axhline(end, color=style.muted, linewidth=1, linestyle="--")
        for point in points:
            rate = [point.learning_rate] * len(point.differences)
            axes.plot(rate, point.differences, "o", color=color, markersize=4, alpha=0.7)
            axes.plot(rate[:2], point.loss.interval, color=color, linewidth=1.5)
        reach = max(abs(value) for point in points for value in point.differences)
        reach = 1.3 * max(reach, study.plan.margin, *noise)
        axes.set_ylim(-reach, reach)  # an interval from three pairs is often far longer than they reach
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlabel("learning rate")
        axes.set_ylabel(XLABEL)

    caption = (
        f"{name} minus {base}: each pair of the sweep, the mean's 95% interval (it may leave the axis), the noise "
        "between equal runs (shaded), the margin (dashed)."
    )
    return render(draw, caption, f"{name} minus {base} by learning rate")


def conversion_curves(study: Study) -> list[Picture]:
    """What each conversion that trains nothing would cost along the training of the runs that are converted."""
    runs = [run for arm in study.plan.arms for run in study.final(arm).result if run.measured_curves]
    if not runs:
        return []
    curves = {name: middle([run.measured_curves[name] for run in runs]) for name in runs[0].measured_curves}

    def draw(axes: Axes, style: Style) -> None:
        for number, (name, curve) in enumerate(curves.items()):
            axes.plot(*curve, marker=MARKERS[number], color=style.color(number), label=name, markersize=4)
        axes.set_xlabel("step")
        axes.set_ylabel("change of the loss, nats per token")
        axes.figure.legend(loc="outside lower center", frameon=False, fontsize=8)

    caption = f"Each conversion at once, along the training, median of {len(runs)} seeds."
    return [render(draw, caption, "Cost of each conversion by step", height=4.2)]


def probe_curves(study: Study) -> list[Picture]:
    """What was measured inside the model: by depth at the end of the runs, and by step."""

    def by_depth(field: str) -> dict[str, list[Curve]]:
        return {
            study.label(arm): [
                list(enumerate(getattr(run.probes, field), start=1)) for run in study.final(arm).result if run.probes
            ]
            for arm in study.plan.arms
        }

    def by_step(field: str) -> dict[str, list[Curve]]:
        return {study.label(arm): [getattr(run, field) for run in study.final(arm).result] for arm in study.plan.arms}

    panels = (
        ("|Mean| over standard deviation of a norm's input", "norm, by depth", by_depth("mean_over_std"), study.chance),
        ("Norm of the gradient", "step", by_step("gradient_norm"), None),
        ("Length of an update over the length of the weights", "step", by_step("update_ratio"), None),
    )
    return [_panel(study, *panel) for panel in panels if any(map(any, panel[2].values()))]


def _panel(study: Study, title: str, xlabel: str, curves: dict[str, list[Curve]], level: float | None) -> Picture:
    def draw(axes: Axes, style: Style) -> None:
        for name, found in curves.items():
            number = numbers(study)[name]
            if any(found):
                axes.plot(*middle(found), color=style.color(number), label=name, linewidth=1.4)
        if level is not None:
            axes.axhline(level, color=style.muted, linewidth=1, linestyle="--", label="chance: rows of random numbers")
        axes.set_yscale("log")
        axes.set_xlabel(xlabel)
        axes.figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=4)

    return render(draw, f"{title}, median of the final seeds", title, 4.6, 3.0)


def time_ratios(study: Study, base: str) -> Picture | None:
    """Time of a training step of every arm over the baseline's, in each variant of the code."""
    rows = []
    for arm in study.plan.arms:
        name = study.label(arm)
        if name != base:
            rows += [(f"{name}, {e.name}", numbers(study)[name], e) for e in study.time_ratios("step", name, base)]
    if not rows:
        return None
    caption = f"Time of a training step over that of {base}, mean over processes with its 95% interval."
    return forest_picture(rows, forest(rows, "ratio of times (below 1: faster)", 1.0), caption)


def middle(curves: Iterable[Curve]) -> tuple[list[float], list[float]]:
    """Steps and, at each, the median over the curves that have it."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            at.setdefault(step, []).append(value)
    steps = sorted(at)
    return steps, [float(np.median(at[step])) for step in steps]


def save_differences(study: Study, path: Path) -> None:
    """The comparisons as a file for a README, in the light theme; PNG or SVG by the path's ending."""
    if not study.comparisons:
        raise UserError("--picture: this folder has no finished comparison to draw.")
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--picture {path} must end in .png or .svg.")
    canvas = Canvas(figsize=(8, 1.0 + 0.4 * len(study.comparisons)), dpi=120, layout="constrained")
    axes = canvas.add_subplot()
    axes.grid(alpha=0.25)
    xlabel = f"validation loss minus that of {base_name(study)}, nats per token"
    forest(difference_rows(study), xlabel, 0.0, study.plan.margin)(axes, Style("light"))
    try:
        canvas.savefig(path)
    except OSError as error:
        raise UserError(f"--picture {path} cannot be written ({error.strerror}).") from None
