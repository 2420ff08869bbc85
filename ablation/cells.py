"""One question over many comparisons: two norms' pairs at every model size, number of tokens, text and learning rate.

`python ablate.py --cells FOLDER ... --picture norms.png` prints the table and draws the two pictures.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullFormatter, NullLocator

from ablation.analysis import Study
from ablation.comparison import Noise
from ablation.effects import Effect
from ablation.plan import Arm, arm_settings, baseline
from ablation.plots import MARKERS, XLABEL, Style
from errors import UserError
from model.count import num_parameters

NORMS = ("rms", "layer")  # that the question is about
LINEAR = 0.01  # nats: closer to 0 the axis is linear, beyond it logarithmic, so that calm and noisy cells fit into one


@dataclass(frozen=True)
class Cell:
    """An arm minus its baseline in one study at one learning rate, pair by pair."""

    study: Study
    arm: Arm
    learning_rate: float
    differences: list[float]
    """Of each pair, nats per token."""
    loss: Effect
    bits: Effect | None
    """Bits per byte; None in a sweep."""
    noise: Noise | None
    verdict: str
    """As in the study; "sweep" where the pairs only chose a learning rate."""

    @property
    def compared(self) -> str:
        return f"{self.study.label(self.arm)} minus {self.study.label(baseline(self.study.plan, self.arm))}"

    @property
    def steps(self) -> int:
        return arm_settings(self.study.plan, self.arm).optimizer.steps

    @property
    def tokens(self) -> int:
        data = arm_settings(self.study.plan, self.arm).data
        return self.steps * data.batch_size * data.sequence_length

    @property
    def parameters(self) -> int:
        return num_parameters(arm_settings(self.study.plan, self.arm).model)

    @property
    def place(self) -> str:
        """Where it was measured, in a few words."""
        where = "" if self.text == "python" else f", {self.text}"
        return f"{millions(self.parameters)}, {millions(self.tokens)} tokens, {self.rates}{where}"

    @property
    def rates(self) -> str:
        """The learning rate, or that of the arm and that of its baseline."""
        rates = self.study.learning_rates
        other = self.learning_rate if self.verdict == "sweep" else rates[baseline(self.study.plan, self.arm)]
        return f"{self.learning_rate:g}" + ("" if other == self.learning_rate else f" and {other:g}")

    @property
    def text(self) -> str:
        return ", ".join(arm_settings(self.study.plan, self.arm).data.data)

    @property
    def deviation(self) -> float:
        """Standard deviation of a pair's difference, nats per token."""
        return float(np.std(self.differences, ddof=1))


def millions(number: int) -> str:
    return f"{number / 1e6:.3g}M"


def cells(studies: Sequence[Study]) -> list[Cell]:
    """The cells of all studies: the final pairs first, then those of the sweeps."""
    found = []
    for study in studies:
        arms = {study.label(arm): arm for arm in study.plan.arms}
        for c in study.comparisons:
            arm = arms[c.arm]
            if is_about_norms(arm, arms[c.baseline]):
                rate = study.learning_rates[arm]
                found.append(Cell(study, arm, rate, c.differences, c.loss, c.bits, c.noise, c.verdict))
    for study in studies:
        for point in study.curve:
            if is_about_norms(point.arm, baseline(study.plan, point.arm)):
                rate, loss = point.learning_rate, point.loss
                found.append(Cell(study, point.arm, rate, point.differences, loss, None, point.noise, "sweep"))
    return found


def is_about_norms(arm: Arm, base: Arm) -> bool:
    """Whether two arms are RMSNorm or LayerNorm, with or without a bias, and differ in nothing else."""
    return {arm.norm, base.norm} <= {*NORMS} and base == replace(arm, norm=base.norm, norm_bias=base.norm_bias)


def save_pictures(found: Sequence[Cell], path: Path) -> list[Path]:
    """Draw the pairs into `path` (PNG or SVG) and what they scatter into a file beside it; returns both."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--picture {path} must end in .png or .svg.")
    if not found:
        raise UserError("--cells: these folders have no pairs of rms and layer to draw.")
    beside = path.with_name(f"{path.stem}-noise{path.suffix}")
    pairs = Canvas(figsize=(5.4, 1.3 + 0.3 * len(found)), dpi=150, layout="constrained")
    draw_pairs(pairs.add_subplot(), found)
    noise = Canvas(figsize=(5.4, 4.4), dpi=150, layout="constrained")
    draw_noise(noise.add_subplot(), found)
    try:
        pairs.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        noise.savefig(beside, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"--picture {path} cannot be written ({error.strerror}).") from None
    return [path, beside]


def draw_pairs(axes: Axes, found: Sequence[Cell]) -> None:
    """A row for each cell: a dot for each pair, a bar for the mean's 95% interval, and the noise shaded."""
    style, order = Style("light"), list(dict.fromkeys(cell.compared for cell in found))
    axes.axvline(0, color=style.muted, linewidth=1)
    for row, cell in enumerate(found):
        number = order.index(cell.compared)
        color = style.color(number)
        if cell.noise is not None and math.isfinite(cell.noise.deviation):
            reach = cell.noise.deviation
            axes.fill_betweenx((row - 0.45, row + 0.45), -reach, reach, color=style.muted, alpha=0.25, linewidth=0)
        if cell.verdict != "sweep":
            margin = cell.study.plan.margin
            for end in (-margin, margin):
                axes.plot((end, end), (row - 0.45, row + 0.45), color=style.muted, linewidth=1)
        axes.plot(cell.loss.interval, (row, row), color=color, linewidth=3, alpha=0.45, solid_capstyle="butt")
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(cell.differences, [row] * len(cell.differences), marker, color=color, markersize=3.5)
    for number, compared in enumerate(order):
        marker = MARKERS[number % len(MARKERS)]
        axes.plot([], [], marker, color=style.color(number), markersize=5, label=compared)
    axes.set_xscale("symlog", linthresh=LINEAR, linscale=2)
    reach = 1.3 * max(abs(value) for cell in found for value in (*cell.differences, cell.study.plan.margin))
    axes.set_xlim(-reach, reach)  # the interval of three pairs may be longer than this: it is cut at the axis
    ticks = [tick for tick in (0.01, 0.1, 1.0) if tick < reach]
    ticks = [*(-tick for tick in reversed(ticks)), 0, *ticks]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_yticks(range(len(found)), [cell.place for cell in found], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel(XLABEL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=2)


def pooled(found: Sequence[Cell]) -> tuple[list[float], list[float]]:
    """Learning rates, and at each the deviation of the pairs of all cells, each about the mean of its own cell."""
    rates = sorted({cell.learning_rate for cell in found})
    deviations = []
    for rate in rates:
        at_rate = [cell for cell in found if cell.learning_rate == rate]
        freedom = [len(cell.differences) - 1 for cell in at_rate]
        variance = sum(f * cell.deviation**2 for f, cell in zip(freedom, at_rate, strict=True)) / sum(freedom)
        deviations.append(math.sqrt(variance))
    return rates, deviations


def draw_noise(axes: Axes, found: Sequence[Cell]) -> None:
    """Deviation of pairs and of equal runs over the learning rate, of the comparison with most cells; a line a size."""
    style = Style("light")
    compared = Counter(cell.compared for cell in found).most_common(1)[0][0]
    shown = [cell for cell in found if cell.compared == compared and len(cell.differences) > 1]
    shown = [cell for cell in shown if " and " not in cell.rates]
    groups = sorted({(cell.parameters, cell.steps, cell.text) for cell in shown})
    for number, group in enumerate(groups):
        of_group = [cell for cell in shown if (cell.parameters, cell.steps, cell.text) == group]
        color, marker = style.color(number), MARKERS[number % len(MARKERS)]
        name = f"{millions(group[0])}, {group[1]:,} steps" + ("" if group[2] == "python" else f", {group[2]}")
        axes.plot(*pooled(of_group), marker=marker, color=color, label=name, markersize=5)
        equal: dict[float, list[float]] = {}
        for cell in of_group:
            equal.setdefault(cell.learning_rate, []).extend(cell.noise.differences if cell.noise is not None else [])
        curve = sorted((rate, Noise(values).deviation) for rate, values in equal.items() if values)
        if curve:
            hollow = {"marker": marker, "markerfacecolor": "white", "markersize": 5}
            axes.plot(*zip(*curve, strict=True), "--", color=color, **hollow)
    axes.plot([], [], "-", color=style.muted, label=f"filled: {compared}")
    axes.plot([], [], "--", color=style.muted, label="hollow: equal runs")
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = sorted({cell.learning_rate for cell in shown})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("learning rate")
    axes.set_ylabel("standard deviation, nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=2)
