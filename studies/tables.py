"""Tables of docs/ from the records of studies: `python -m studies.tables` writes them again between their marks."""

import functools
import re
from pathlib import Path

import numpy as np
import pandas as pd

from ablation.report import table, with_interval
from ablation.stats import standard_error
from ablation.study import Study, load
from files import replace_text
from studies.claims import judge_all
from studies.effects import PARTS, named, parts

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (\w+) ([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = {"rms": "RMSNorm", "layer": "LayerNorm", "with bias": "with a bias", "without bias": "without a bias"}
WORDS |= {"higher": "worse", "lower": "better", "different, within": "worse, but within", "learning_rate=": "rate "}
load_study = functools.cache(lambda name: load(ROOT / "studies" / name))


def in_words(text: str) -> str:
    return re.sub(rf"\b({'|'.join(WORDS)})", lambda match: WORDS[match[0]], text)


def shown(effect) -> str:  # with a fifth digit where the interval is that narrow
    return with_interval(effect, "+.5f" if effect and effect.interval[1] - effect.interval[0] < 3.5e-4 else "+.4f")


def parts_rows(*studies: Study) -> list[dict]:
    """What the bias, the mean and both do, for each study or choice of its other settings."""
    rows = []
    for study in studies:
        for group, effects in parts(study).items():
            row = {"runs": f"[{named(study, group)}](studies/{study.plan.name}/report.md)"}
            row |= {"pairs": max(effect.n for effect in effects.values())}
            rows.append(row | {part: shown(effects.get(part)) for part in reversed(PARTS)})
    return rows


def difference_rows(*studies: Study) -> list[dict]:
    """Every arm of the studies against its baseline."""
    rows = []
    for study in studies:
        for c in study.comparisons:
            runs = {"runs": f"[{named(study, '')}](studies/{study.plan.name}/report.md)"} if len(studies) > 1 else {}
            row = {"arm": in_words(c.arm), "pairs": c.effect.n, "worse in": sum(d > 0 for d in c.differences)}
            rows.append(runs | row | {"mean and 95% interval": shown(c.effect), "verdict": in_words(c.verdict)})
    return rows


def set_rows(*studies: Study) -> list[dict]:
    """RMSNorm minus LayerNorm in sets of pairs at 5e-4, and all pairs together."""
    rows = [row for row in difference_rows(*studies) if row["arm"] == "RMSNorm"]
    for row in rows:
        del row["arm"]
    few = load_study("factorial-tuned").rows.query("phase == 'sweep' and learning_rate == 5e-4").set_index("seed")
    sets = [study.paired("final", "rms").difference for study in studies]  # then a pilot, and three pairs of a sweep
    sets += [studies[0].paired("pilot", "rms").difference, few.loss[few.arm == "rms"] - few.loss[few.arm == "layer"]]
    for name, chosen in {"these, a pilot and a sweep together": sets, "the same without the first": sets[1:]}.items():
        row = {"runs": name, "pairs": sum(map(len, chosen)), "worse in": sum((pairs > 0).sum() for pairs in chosen)}
        rows.append(row | {"mean and 95% interval": pooled(chosen), "verdict": "exploratory"})
    return rows


def pooled(sets: list[pd.Series]) -> str:
    """The mean of the sets' means, weighted by the inverse of their squared standard errors, and its 95% interval."""
    precisions = np.array([standard_error(pairs) ** -2 for pairs in sets])
    estimate = precisions @ [pairs.mean() for pairs in sets] / precisions.sum()
    reach = 1.96 * precisions.sum() ** -0.5
    return f"{estimate:+.4f} [{estimate - reach:+.4f}, {estimate + reach:+.4f}]"


def claim_rows(*studies: Study) -> list[dict]:
    """Each claim with the first effect that decides, but those not measured or true by arithmetic alone."""
    rows = []
    for claim in judge_all([ROOT / "studies" / study.plan.name for study in studies]):
        name, text, source, region, measured, place, verdict = claim.values()
        if verdict == "not measured" or (place, verdict) == ("arithmetic", "holds"):
            continue
        effect = next((effect for effect in measured.split("; ") if f"({verdict})" in effect), measured)
        effect = effect.replace(f" ({verdict})", "").replace(" nats per token", "")
        effect = re.sub(r"[\d.]+e-\d+", lambda small: f"{float(small[0]):.2g}", effect)  # more depends on the processor
        row = {"": name, "claim": text, "arXiv": source.partition("arXiv ")[2]}
        row |= {"measured": re.sub(r"\b(\w+): \1\b", r"\1", in_words(effect))}  # once "LayerNorm", not twice
        region = re.sub("above (.*) and below", r"between \1 and", region)
        rows.append(row | {"holds if": region, "verdict": verdict})
    return rows


def filled(text: str, depth: int) -> str:
    """A document in `depth` folders with its tables, from `<!-- table: KIND STUDY ... -->` to `<!-- end -->`."""
    kinds = {"parts": parts_rows, "differences": difference_rows, "sets": set_rows, "claims": claim_rows}
    for match in MARKED.finditer(text):
        rows = table(kinds[match[2]](*map(load_study, match[3].split())))
        rows = rows.replace("](studies/", f"]({'../' * depth}studies/")
        text = text.replace(match[0], f"{match[1]}{rows}\n{match[4]}")
    return text


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").rglob("*.md")):
        replace_text(path, filled(path.read_text(encoding="utf-8"), len(path.relative_to(ROOT).parts) - 1))
