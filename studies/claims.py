"""Verdicts on published claims about norms, which `python -m studies.tables` writes into docs/lab/claims.md.

A claim of claims.toml names effects and the region in which they lie. It is judged from the first of the studies that
measured one of its effects, and speed from a record of speed/. Claims that need no run are in claims.md alone.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from ablation.plan import arm_settings
from ablation.report import MISSING, with_interval
from ablation.stats import MIN_PAIRS_FOR_EQUIVALENCE, Effect, mean_effect
from ablation.study import Study
from files import read_toml

CLAIMS = Path(__file__).with_suffix(".toml")
SPEED = CLAIMS.parent.parent / "speed"
TIMES = "training-norms-amd-epyc"  # the record of a training step with both norms
VERDICTS = ("does not hold", "inconclusive", "holds")  # the first of these counts where there are several effects


def measured(study: Study) -> list[Effect]:
    """Everything that a study has measured."""
    pairs = itertools.permutations(study.plan.all_arms, 2)
    differences = [study.mean_loss(f"{arm} minus {base}", {arm: 1.0, base: -1.0}) for arm, base in pairs]
    return [*filter(None, differences), *study.effects, *sweeps(study), *streams(study)]


def sweeps(study: Study) -> Iterator[Effect]:
    """For each setting, how much more the losses of arms with one of its values vary over the learning rates than those
    of arms with its first value. A seed with a diverged run is left out: leaving out the learning rate would flatter.
    """
    losses = study.rows[study.rows.phase == "sweep"].groupby(["arm", "seed"], observed=True)[study.loss_column]
    spreads = (losses.max() - losses.min()).where(losses.count() == losses.size()).unstack("seed")
    spreads = spreads.reindex(study.plan.all_arms)
    for setting in study.plan.varied:
        values = [str(study.plan.value(arm, setting)) for arm in study.plan.all_arms.values()]
        (first, base), *others = spreads.groupby(np.array(values), sort=False).mean(skipna=False).iterrows()
        for value, spread in others:
            differences = (spread - base).dropna()
            if len(differences):
                yield mean_effect(f"{setting}: {value} minus {first}, spread over the sweep", differences, study.unit)


def streams(study: Study) -> Iterator[Effect]:
    """What a norm before a block gets: |mean| / std over that of random rows, and the cosine with x minus its mean."""
    for name, arm in study.plan.all_arms.items():
        model, rows = arm_settings(study.plan, arm).model, study.rows_of("final", name)
        over_chance = rows.mean_over_std * math.sqrt(math.pi * model.hidden_size / 2)
        cosine = (1 - rows.cosine_with_ones**2) ** 0.5
        for what, column in (("mean over chance", over_chance), ("cosine without mean", cosine)):
            values = column.dropna()
            if model.norm_placement == "pre" and len(values) > 1:
                yield mean_effect(f"{what}: {name}", values, "")


def read_speed(name: str) -> list[dict]:
    """The tables of a record in speed/."""
    return json.loads((SPEED / f"{name}.json").read_text(encoding="utf-8"))["tables"]


def norm_times(name: str, section: str) -> dict[str, Effect]:
    """RMSNorm's time over LayerNorm's for each variant of the code: means over the tables, each of one process, of the
    median ratio within turns.
    """
    ratios: dict[str, list[float]] = {}
    for seconds in (process["seconds"] for process in read_speed(name)):
        for variant in (program.removesuffix(", rms") for program in seconds if program.endswith(", rms")):
            rms, layer = (np.array(seconds[f"{variant}, {norm}"][section]) for norm in ("rms", "layer"))
            ratios.setdefault(variant, []).append(np.median(rms / layer))
    return {variant: mean_effect(f"{section}: {variant}", values, "ratio") for variant, values in ratios.items()}


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


def claim_row(name: str, claim: dict, effects_by_page: dict[str, list[Effect]]) -> dict[str, str]:
    """A claim with its verdict, and of its effects the first that decides it, with a link to its page."""
    low, high = claim.get("low", -math.inf), claim.get("high", math.inf)
    region = f"{low:.3g} to {high:g}" if "low" in claim else f"below {high:g}"
    row = {"": name, "claim": claim["text"] + (f" ({claim['arxiv']})" if "arxiv" in claim else "")}
    row |= {"measured": MISSING, "holds if": region if "high" in claim else f"above {low:g}", "verdict": "not measured"}
    for page, effects in effects_by_page.items():
        named = [effect for effect in effects if any(fnmatchcase(effect.name, name) for name in claim["effects"])]
        if named:
            deciding = min(named, key=lambda effect: VERDICTS.index(judge(effect, low, high)))
            numbers = with_interval(deciding, ".4g")
            # Two digits: further digits of so small a number differ between processors.
            numbers = re.sub(r"[\d.]+e-\d+", lambda small: f"{float(small[0]):.2g}", numbers)
            mean, interval = numbers.split(" ", 1)
            return row | {"measured": f"[{mean}]({page}) {interval}", "verdict": judge(deciding, low, high)}
    return row


def judge_all(studies: list[Study]) -> list[dict[str, str]]:
    """The rows of all claims."""
    effects_by_page = {f"studies/{study.plan.name}/report.md": measured(study) for study in studies}
    times = [norm_times(TIMES, section).values() for section in ("step", "forward")]
    effects_by_page[f"speed/{TIMES}.json"] = [*itertools.chain(*times)]
    return [claim_row(name, claim, effects_by_page) for name, claim in read_toml(CLAIMS).items()]
