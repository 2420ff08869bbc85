"""RMSNorm minus LayerNorm, and what the mean and the bias do in it, one picture for many studies: `python -m
studies.effects` draws docs/effects.png.
"""

import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ablation.plan import STUDIES, label
from ablation.stats import Effect, mean_effect
from ablation.study import Study, load
from errors import run_main
from files import replacing
from training.plot import COLOURS, MUTED, panels

CONTRASTS = {  # pairs of arms by their norm, each with and without a bias; the second of a pair is the baseline
    "RMSNorm minus LayerNorm": [("rms", "layer and bias")],
    "no mean": [("rms and bias", "layer and bias"), ("rms", "layer")],
    "no bias": [("layer", "layer and bias"), ("rms", "rms and bias")],
}
SETS = ("factorial", "budget-1200", "budget-600", "placebo", "scale-4m", "scale-10m", "shakespeare")  # pairs at 5e-4
DRAWN = ("factorial", "budget-1200", "budget-600", "scale-4m", "scale-10m", "shakespeare", "tuned-2e-3", "recipe")
DRAWN += ("length-20", "default-recipe", "bias-rates", "bias-2e-3", "branches", "branches-2e-3")
TICKS = (-0.1, -0.03, -0.01, -0.005, 0, 0.005, 0.01, 0.03, 0.1)


@functools.cache
def load_study(name: str) -> Study:
    return load(STUDIES / name)


def title(study: Study, group: str = "") -> str:
    return study.plan.titles.get(group, f"{study.plan.name} {group}".strip())


def arms_by_norm(study: Study) -> dict[str, dict[str, str]]:
    """For each choice of the settings that vary beside the norm: the arm with each norm, as `CONTRASTS` name them."""
    others = {*study.plan.varied} - {"norm", "norm_bias", "center_weights"}
    models = {name: arm.settings.model for name, arm in study.plan.all_arms.items()}
    norms = {name: f"{model.norm} and bias" if model.has_norm_bias else model.norm for name, model in models.items()}
    groups: dict[str, dict[str, str]] = {}
    for name, arm in study.plan.all_arms.items():
        group = ", ".join(label(key, value) for key, value in arm.changes.items() if key in others)
        arms = groups.setdefault(group, {})
        if arm.baseline is not None and "init_from" in arm.changes:  # a branch is compared with the run it left
            arms.setdefault(norms[arm.baseline], arm.baseline)
        arms[norms[name]] = name
    return groups


def contrasts(study: Study) -> dict[str, dict[str, Effect]]:
    """By the values of the other settings: each contrast that the study has arms for, a mean over its pairs of arms."""
    effects: dict[str, dict[str, Effect]] = {}
    for group, arms in arms_by_norm(study).items():
        for name, pairs in CONTRASTS.items():
            available = [pair for pair in pairs if arms.keys() >= {*pair}]
            weights = {}
            for norm, base in available:
                weights |= {arms[norm]: 1 / len(available), arms[base]: -1 / len(available)}
            if weights and (effect := study.mean_loss(name, weights)) is not None:
                effects.setdefault(group, {})[name] = effect
    return effects


def pairs_at_5e_4(names: Sequence[str] = SETS) -> list[pd.Series]:
    """The losses of RMSNorm minus those of LayerNorm in these studies, in the first one's pilot and in two sweeps."""
    studies = [*map(load_study, names)]
    differences = [study.paired("final", "rms").difference for study in studies]
    differences.append(studies[0].paired("pilot", "rms").difference)
    for name in ("factorial-tuned", "family"):
        sweep = load_study(name).rows.query("phase == 'sweep' and learning_rate == 5e-4").set_index("seed")
        differences.append(sweep.loss[sweep.arm == "rms"] - sweep.loss[sweep.arm == "layer"])
    return differences


def pooled(sets: Sequence[pd.Series]) -> Effect:
    """The mean of all pairs. Weights by standard errors, of sets so small, would give too narrow an interval."""
    return mean_effect("RMSNorm minus LayerNorm", pd.concat(sets), "nats per token")


def draw(studies: Sequence[Study]) -> Figure:
    """A row for each study, or choice of its other settings, with a mark and a 95% interval for each contrast.

    The last row is the mean of `pairs_at_5e_4`.
    """
    rows = []
    for study in studies:
        rows += [(title(study, group), effects, study.plan.margin) for group, effects in contrasts(study).items()]
    every_pair = {"RMSNorm minus LayerNorm": pooled(pairs_at_5e_4())}
    rows.append(("all at rate 5e-4, exploratory", every_pair, studies[0].plan.margin))
    figure, [axes] = panels(1.6 + 0.42 * len(rows))
    axes.axvline(0, color=MUTED, linewidth=1)
    shaded = {"color": MUTED, "alpha": 0.15, "linewidth": 0, "label": "margin: counts as equal"}
    for row, (_, effects, margin) in enumerate(rows):
        axes.fill_betweenx((row - 0.5, row + 0.5), -margin, margin, **shaded)
        for index, (contrast, marker) in enumerate(zip(CONTRASTS, "os^", strict=True)):
            if contrast in effects:
                effect, y = effects[contrast], row + 0.22 * (index - 1)
                legend = contrast.replace("no mean", "mean not subtracted")
                axes.hlines(y, *effect.interval, color=COLOURS[index], linewidth=3, alpha=0.5)
                axes.plot(effect.estimate, y, marker, color=COLOURS[index], markersize=4, label=legend)
    labels = [f"{words}\n{next(iter(effects.values())).n} pairs" for words, effects, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], fontsize=8)
    units = {effect.unit for _, effects, _ in rows for effect in effects.values()}
    reach = 1.1 * np.abs(axes.dataLim.intervalx).max()
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.5, -0.5), xlabel=f"difference in loss, {' or '.join(units)}")
    axes.set_title("← better", loc="left", fontsize=9)
    axes.set_title("worse →", loc="right", fontsize=9)
    figure.suptitle("Is RMSNorm worse than LayerNorm, and by which part?", fontsize=11)
    handles, names = axes.get_legend_handles_labels()
    shown = dict(zip(names, handles, strict=True))  # each name once
    figure.legend(shown.values(), shown, loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return figure


def main() -> None:
    """Draw docs/effects.png."""
    path = STUDIES.parent / "docs" / "effects.png"
    with replacing(path) as file:
        draw([*map(load_study, DRAWN)]).savefig(file)
    print(f"written: {path}")


if __name__ == "__main__":
    run_main("studies.effects")
