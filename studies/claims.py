"""Verdicts on published claims about norms: `python -m studies.claims FOLDER ...` prints them as a table in Markdown.

Each claim of claims.toml names effects, and the region in which they lie. It is judged from the first of the folders
that measured one of them, or else from arithmetic.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import tyro

from ablation.report import MISSING, table, with_interval
from ablation.stats import MIN_PAIRS_FOR_EQUIVALENCE, Effect
from ablation.study import Study
from errors import exit_on_user_error
from files import read_toml
from studies.known_effects import facts, measured

CLAIMS = Path(__file__).with_suffix(".toml")
VERDICTS = ("does not hold", "inconclusive", "holds")  # the first of these counts where there are several effects


def judge(effect: Effect, low: float, high: float) -> str:
    """Whether the effect lies between low and high: where its 95% interval lies inside, or outside. Between two finite
    bounds it is inside where that of 90% is, which is two one-sided tests at 5% and takes five pairs.
    """
    if effect.interval[1] <= low or effect.interval[0] >= high:
        return "does not hold"
    two_sided = math.isfinite(low) and math.isfinite(high)
    inside = effect.interval_90 if two_sided else effect.interval
    enough = not two_sided or effect.n == 0 or effect.n >= MIN_PAIRS_FOR_EQUIVALENCE
    return "holds" if enough and low < inside[0] and inside[1] < high else "inconclusive"


def judged_at(study: Study, effects: list[Effect]) -> str:
    """Scale and learning rates of the runs that the effects are of."""
    named = {arm for effect in effects for arm in effect.name.split(" minus ") if arm in study.learning_rates}
    swept = any("sweep" in effect.name for effect in effects)
    rates = study.rates if swept else {study.learning_rates[arm] for arm in named or study.learning_rates}
    scale = f"{study.rows.parameters.max() / 1e6:.3g}M parameters, {study.rows.tokens.max() / 1e6:.2g}M tokens"
    shared = " of all arms" if study.shares_rate else ""
    return f"{scale}, learning rate {', '.join(f'{rate:g}' for rate in sorted(rates))}{shared}"


def judge_claim(claim: dict, effects: list[Effect], study: Study | None) -> dict[str, str]:
    """The last cells of a claim's row: each effect with its verdict if there are several, and where."""
    verdicts = [judge(effect, claim.get("low", -math.inf), claim.get("high", math.inf)) for effect in effects]
    texts = [f"{effect.name} {with_interval(effect, '.4g')} {effect.unit}".rstrip() for effect in effects]
    if len(effects) > 1:
        texts = [f"{text} ({verdict})" for text, verdict in zip(texts, verdicts, strict=True)]
    place = "arithmetic" if study is None else judged_at(study, effects)
    return {"measured": "; ".join(texts), "judged at": place, "verdict": min(verdicts, key=VERDICTS.index)}


def claim_row(claim: dict, sources: list[tuple[Study | None, list[Effect]]]) -> dict[str, str]:
    """A claim and its verdict, from the first of the studies that has an effect of it."""
    ends = [f"{word} {claim[end]:g}" for word, end in (("above", "low"), ("below", "high")) if end in claim]
    row = {"id": claim["id"], "claim": claim["text"], "source": claim["source"]}
    row["region"] = " and ".join(ends) or MISSING
    for study, effects in sources:
        about = [effect for effect in effects if any(fnmatchcase(effect.name, name) for name in claim["effects"])]
        if about:
            return row | judge_claim(claim, about, study)
    return row | {"measured": MISSING, "judged at": MISSING, "verdict": "not measured"}


def judge_all(folders: Sequence[Path]) -> list[dict[str, str]]:
    """The rows of all claims."""
    sources = [*map(measured, folders), (None, facts("rms") + facts("layer"))]
    return [claim_row(claim, sources) for claim in read_toml(CLAIMS)["claims"]]


def main(folders: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> None:
    """Verdicts on published claims about norms, as a table: of several folders of studies, the first is asked first."""
    print(table(judge_all(folders)))


if __name__ == "__main__":
    with exit_on_user_error():
        tyro.cli(main, prog="python -m studies.claims")
