"""The pictures of a report, which can be read at the width of a phone."""

import pandas as pd
from matplotlib.figure import Figure

from ablation.stats import Effect, mean_effect
from ablation.study import Study
from training.plot import COLOURS, MUTED, panels


def forest(effects: dict[str, Effect], xlabel: str, margin: float) -> Figure | None:
    """Effects: a dot with its 95% interval each, below its name; the margin is shaded. None without effects."""
    if not effects:
        return None
    figure, [axes] = panels(0.8 + 0.6 * len(effects))
    axes.axvspan(-margin, margin, color=MUTED, alpha=0.2, linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=1)
    for row, (name, effect) in enumerate(effects.items()):
        axes.text(0.01, row - 0.15, name, transform=axes.get_yaxis_transform(), fontsize=9, va="bottom")
        axes.plot(effect.interval, (row, row), color=COLOURS[0], linewidth=4, alpha=0.45, solid_capstyle="butt")
        axes.plot(effect.estimate, row, "o", color=COLOURS[0], markersize=6)
    axes.set(yticks=[], ylim=(len(effects) - 0.6, -0.8))
    figure.supxlabel(xlabel, fontsize=9)  # in the middle of the figure: below the axes it would leave it
    axes.locator_params(axis="x", nbins=4)
    return figure


def differences_over_steps(study: Study) -> Figure | None:
    """A panel for each comparison: the mean difference along the runs, and its 95% interval; None without curves."""
    curves = {}
    for c in study.comparisons:
        pairs = study.paired("final", c.arm)
        own, base = (pd.DataFrame([*map(dict, curve)]) for curve in (pairs.curve, pairs.curve_base))  # (run, step)
        differences = (own - base).dropna(axis=1)  # at steps at which all final runs of both were evaluated
        if differences.shape[1] > 1:
            curves[c.arm] = [(step, mean_effect(c.arm, values, study.unit)) for step, values in differences.items()]
    if not curves or study.loss_column != "loss":  # with other tokens, curves in nats are not comparable
        return None
    figure, every = panels(0.6 + 1.6 * len(curves), len(curves))
    margin = study.plan.margin
    # Limits for all, to be compared. The first quarter may leave them: it would flatten the rest.
    late = [end for curve in curves.values() for _, effect in curve[len(curve) // 4 :] for end in effect.interval]
    for (arm, curve), axes in zip(curves.items(), every, strict=True):
        steps, effects = zip(*curve, strict=True)
        low, high = zip(*(effect.interval for effect in effects), strict=True)
        axes.axhspan(-margin, margin, color=MUTED, alpha=0.2, linewidth=0)
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.25, linewidth=0)
        axes.plot(steps, [effect.estimate for effect in effects], "o-", color=COLOURS[0], markersize=3)
        axes.set_ylim(min(0, *late) - margin, max(0, *late) + margin)
        axes.set_title(arm, fontsize=9)
        axes.locator_params(nbins=5)
    figure.supxlabel("step\nline: mean of the pairs; band: its 95% interval; lower: better", fontsize=9)
    figure.supylabel("loss minus baseline's, nats", fontsize=9)
    return figure


def sweep(study: Study) -> Figure | None:
    """Mean loss of every arm over the learning rates of the sweep, if there is one; no point where a run diverged."""
    losses = study.sweep
    if losses.empty:
        return None
    figure, [axes] = panels(3.6 + 0.1 * len(losses))
    for i, (arm, of_arm) in enumerate(losses.iterrows()):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": "os^D"[i // len(COLOURS) % 4]}
        axes.plot(losses.columns, of_arm, **style, markersize=5, linewidth=1, label=arm)
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation loss, {study.unit}")
    axes.set_xticks(losses.columns, [f"{rate:g}" for rate in losses.columns], rotation=45)
    axes.minorticks_off()
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    return figure
