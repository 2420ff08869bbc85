"""RMSNorm minus LayerNorm, and what the mean and the bias do in it, one picture for many studies: `python -m
studies.effects` draws docs/effects.png.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ablation.plan import STUDIES, arm_settings, label
from ablation.plots import COLOURS, MUTED, panels
from ablation.stats import Effect, standard_error
from ablation.study import Study, load
from files import replacing

LAYER, LAYER_NO_BIAS, RMS_BIAS, RMS = itertools.product(("layer", "rms"), (True, False))  # the norm, and its bias
CONTRASTS = {
    "RMSNorm minus LayerNorm": [(RMS, LAYER)],
    "no mean": [(RMS_BIAS, LAYER), (RMS, LAYER_NO_BIAS)],
    "no bias": [(LAYER_NO_BIAS, LAYER), (RMS, RMS_BIAS)],
}
LEGEND = {"no mean": "mean not subtracted"}
MARGIN = "margin: counts as equal"
SETS = ("factorial", "budget-1200", "budget-600", "placebo", "scale-4m", "scale-10m", "shakespeare")  # pairs at 5e-4
DRAWN = ("factorial", "budget-1200", "budget-600", "scale-4m", "scale-10m", "shakespeare", "tuned-2e-3", "recipe")
DRAWN += ("default-recipe", "bias-rates", "bias-2e-3", "branches", "branches-2e-3")
TICKS = (-0.1, -0.03, -0.01, -0.005, 0, 0.005, 0.01, 0.03, 0.1)


@functools.cache
def load_study(name: str) -> Study:
    """A study of this folder, for tables and pictures that share it."""
    return load(STUDIES / name)


def cells_of(study: Study) -> dict[str, dict[tuple[str, bool], str]]:
    """For each choice of the settings that vary beside the norm: the arm with each norm, with and without a bias."""
    others = {*study.plan.varied} - {"norm", "norm_bias", "center_weights"}
    groups: dict[str, dict[tuple[str, bool], str]] = {}
    for name, arm in study.plan.all_arms.items():
        group = ", ".join(label(key, value) for key, value in arm.settings.items() if key in others)
        cells, model = groups.setdefault(group, {}), arm_settings(study.plan, arm).model
        if arm.baseline is not None and "init_from" in arm.settings:  # a branch is compared with the run it left
            base = arm_settings(study.plan, study.plan.all_arms[arm.baseline]).model
            cells.setdefault((base.norm, base.has_norm_bias), arm.baseline)
        cells[model.norm, model.has_norm_bias] = name
    return groups


def contrasts(study: Study) -> dict[str, dict[str, Effect]]:
    """By the values of the other settings: each contrast that the study has arms for, a mean over its pairs of arms."""
    effects: dict[str, dict[str, Effect]] = {}
    for group, cells in cells_of(study).items():
        for name, pairs in CONTRASTS.items():
            available = [(cells[arm], cells[base]) for arm, base in pairs if arm in cells and base in cells]
            weights = {arm: 1 / len(available) for arm, _ in available}
            weights |= {base: -1 / len(available) for _, base in available}
            effect = study.mean_loss(name, weights) if available else None
            if effect is not None:
                effects.setdefault(group, {})[name] = effect
    return effects


def pairs_at_5e_4(names: Sequence[str] = SETS) -> list[pd.Series]:
    """The losses of RMSNorm minus those of LayerNorm in these studies, in the first one's pilot and in a sweep."""
    studies = [*map(load_study, names)]
    sweep = load_study("factorial-tuned").rows.query("phase == 'sweep' and learning_rate == 5e-4").set_index("seed")
    differences = [study.paired("final", "rms").difference for study in studies]
    differences.append(studies[0].paired("pilot", "rms").difference)
    return [*differences, sweep.loss[sweep.arm == "rms"] - sweep.loss[sweep.arm == "layer"]]


def pooled(sets: Sequence[pd.Series]) -> Effect:
    """The mean of the sets' means, weighted by the inverse of their squared standard errors."""
    precisions = np.array([standard_error(pairs) ** -2 for pairs in sets])
    estimate, error = precisions @ [pairs.mean() for pairs in sets] / precisions.sum(), precisions.sum() ** -0.5
    intervals = [(estimate - z * error, estimate + z * error) for z in (1.96, 1.645)]
    return Effect("RMSNorm minus LayerNorm", estimate, *intervals, math.nan, "nats per token", sum(map(len, sets)))


def title(study: Study, group: str = "") -> str:
    """What these runs are, in words."""
    return study.plan.titles.get(group, f"{study.plan.name} {group}".strip())


def draw(studies: Sequence[Study]) -> Figure:
    """A row for each study, or choice of its other settings, with a mark and a 95% interval for each contrast.

    The last row is the mean of `pairs_at_5e_4`.
    """
    every = [(study, group, effects) for study in studies for group, effects in contrasts(study).items()]
    rows = [(title(study, group), study.plan.margin, effects) for study, group, effects in every]
    all_pairs = pooled(pairs_at_5e_4())
    rows.append(("all at rate 5e-4, exploratory", rows[0][1], {all_pairs.name: all_pairs}))
    figure, [axes] = panels(1.6 + 0.42 * len(rows))
    axes.axvline(0, color=MUTED, linewidth=1)
    for row, (_, margin, effects) in enumerate(rows):
        axes.fill_betweenx((row - 0.5, row + 0.5), -margin, margin, color=MUTED, alpha=0.15, linewidth=0, label=MARGIN)
        for name, effect in effects.items():
            index = [*CONTRASTS].index(name)
            place, colour = row + 0.22 * (index - 1), COLOURS[index]
            axes.plot(effect.interval, (place, place), color=colour, linewidth=3, alpha=0.5, solid_capstyle="butt")
            axes.plot(effect.estimate, place, "os^"[index], color=colour, markersize=4, label=LEGEND.get(name, name))
    names = [f"{name}\n{next(iter(effects.values())).n} pairs" for name, _, effects in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], fontsize=8)
    units = {effect.unit for _, _, effects in rows for effect in effects.values()}
    reach = 1.1 * max(abs(end) for _, _, effects in rows for effect in effects.values() for end in effect.interval)
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.5, -0.5), xlabel=f"difference in loss, {' or '.join(units)}")
    axes.set_title("← better", loc="left", fontsize=9)
    axes.set_title("worse →", loc="right", fontsize=9)
    figure.suptitle("Is RMSNorm worse than LayerNorm, and by which part?", fontsize=11)
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown, loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return figure


if __name__ == "__main__":
    with replacing(STUDIES.parent / "docs" / "effects.png") as file:
        draw([*map(load_study, DRAWN)]).savefig(file)
