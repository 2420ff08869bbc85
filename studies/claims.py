"""Verdicts on published claims about norms, which `python -m studies.tables` writes into docs/lab/claims.md.

A claim is judged from the first of the studies that measured one of its effects, and speed from a record of speed/.
Claims that need no run are in claims.md alone.
"""

import itertools
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

import numpy as np

from ablation.plan import STUDIES
from ablation.report import MISSING, with_interval
from ablation.stats import MIN_PAIRS_FOR_EQUIVALENCE, Effect, mean_effect
from ablation.study import Study
from benchmarks.timing import Table
from files import read_json, read_toml
from studies.effects import load_study

TIMES = "training-norms-amd-epyc"  # the record of a training step with both norms
VERDICTS = ("does not hold", "inconclusive", "holds")  # a claim about several effects gets the first of theirs


def claim_rows(*studies: str) -> list[dict[str, str]]:
    """A row for each claim: its verdict, and the effect that decides, with a link to its page."""
    effects_by_page = {f"studies/{name}/report.md": measured_effects(load_study(name)) for name in studies}
    of_step, of_forward = norm_times(TIMES, "step"), norm_times(TIMES, "forward")
    effects_by_page[f"speed/{TIMES}.json"] = [*of_step.values(), *of_forward.values()]
    return [claim_row(name, claim, effects_by_page) for name, claim in read_toml(STUDIES / "claims.toml").items()]


def claim_row(name: str, claim: dict, effects_by_page: dict[str, list[Effect]]) -> dict[str, str]:
    low, high = claim["region"]
    bounds = f"{low:.3g} to {high:g}" if math.isfinite(low) else f"below {high:g}"
    holds_if = bounds if math.isfinite(high) else f"above {low:g}"
    row = {"": name, "claim": claim["text"], "measured": MISSING, "holds if": holds_if, "verdict": "not measured"}
    for page, measured in effects_by_page.items():
        named = [effect for effect in measured if any(fnmatchcase(effect.name, glob) for glob in claim["effects"])]
        if named:
            deciding = min(named, key=lambda effect: VERDICTS.index(judge(effect, low, high)))
            # Two digits: further digits of so small a number differ between processors.
            form = ".2g" if abs(deciding.estimate) < 1e-4 else ".4g"
            mean, interval = with_interval(deciding, form).split(" ", 1)
            return row | {"measured": f"[{mean}]({page}) {interval}", "verdict": judge(deciding, low, high)}
    return row


def judge(effect: Effect, low: float, high: float) -> str:
    """Whether the effect lies between low and high: where its 95% interval lies inside, or outside. Between two finite
    bounds it is inside where that of 90% is, which is two one-sided tests at 5% and takes five pairs.
    """
    if effect.interval[1] <= low or effect.interval[0] >= high:
        return "does not hold"
    two_sided = math.isfinite(low) and math.isfinite(high)
    inside = effect.interval_90 if two_sided else effect.interval
    enough = not two_sided or effect.n >= MIN_PAIRS_FOR_EQUIVALENCE
    return "holds" if enough and low < inside[0] and inside[1] < high else "inconclusive"


def measured_effects(study: Study) -> list[Effect]:
    pairs = itertools.permutations(study.plan.all_arms, 2)
    differences = [study.mean_loss(f"{arm} minus {base}", {arm: 1.0, base: -1.0}) for arm, base in pairs]
    return [*filter(None, differences), *study.effects, *sweeps(study), *streams(study)]


def sweeps(study: Study) -> Iterator[Effect]:
    """For each setting, how much more the losses of arms with one of its values vary over the learning rates than those
    of arms with its first value. A seed with a diverged run is left out: without that run alone, its losses
    would seem to vary less.
    """
    rows = study.rows[study.rows.phase == "sweep"]
    ranges = rows.pivot_table(study.loss_column, "arm", "seed", aggfunc=np.ptp, observed=True)  # NaN: a run diverged
    ranges = ranges.reindex(study.plan.all_arms)
    for setting in study.plan.varied:
        values = np.array([str(arm.value(setting)) for arm in study.plan.all_arms.values()])
        means = ranges.groupby(values, sort=False).mean(skipna=False)
        for value in means.index[1:]:
            differences = (means.loc[value] - means.iloc[0]).dropna()
            if len(differences):
                name = f"{setting}: {value} minus {means.index[0]}, spread over the sweep"
                yield mean_effect(name, differences, study.unit)


def streams(study: Study) -> Iterator[Effect]:
    """What a norm before a block gets: |mean| / std over that of random rows, and the cosine with x minus its mean."""
    for name, arm in study.plan.all_arms.items():
        model = arm.settings.model
        rows = study.rows_of("final", name)[["mean_over_std", "cosine_with_ones"]].dropna()
        if model.norm_placement == "pre" and len(rows) > 1:
            over_chance = rows.mean_over_std * math.sqrt(math.pi * model.hidden_size / 2)
            yield mean_effect(f"mean over chance: {name}", over_chance, "")
            yield mean_effect(f"cosine without mean: {name}", (1 - rows.cosine_with_ones**2) ** 0.5, "")


def read_speed(record: str) -> list[Table]:
    return [Table(**table) for table in read_json(STUDIES.parent / "speed" / f"{record}.json")["tables"]]


def norm_times(record: str, section: str) -> dict[str, Effect]:
    """RMSNorm's time over LayerNorm's for each variant of the code: means over the tables, each of one process, of the
    median ratio within turns.
    """
    processes = [table.seconds for table in read_speed(record)]
    effects = {}
    for variant in (name.removesuffix(", rms") for name in processes[0] if name.endswith(", rms")):
        rms, layer = ([times[f"{variant}, {norm}"][section] for times in processes] for norm in ("rms", "layer"))
        effects[variant] = mean_effect(f"{section}: {variant}", np.median(np.divide(rms, layer), axis=1), "ratio")
    return effects
