"""Tables of docs/ from the records in studies/ and speed/: `python -m studies.tables` writes them between marks."""

import re

import numpy as np
import pandas as pd

from ablation.plan import STUDIES
from ablation.report import table, with_interval
from ablation.stats import Effect
from ablation.study import Study
from benchmarks.timing import three_digits
from errors import run_main
from files import replace_text
from model.count import num_parameters
from studies.claims import claim_rows, norm_times, read_speed
from studies.effects import CONTRASTS, contrasts, load_study, pairs_at_5e_4, pooled, title

DOCS = STUDIES.parent / "docs"
MARKED = re.compile(r"(<!-- table: (\w+) ([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)
UNITS = {"ms": 1e3, "µs": 1e6}


def shown(effect: Effect | None) -> str:
    """A difference and its interval, with a fifth digit where the interval is that narrow."""
    return with_interval(effect, "+.5f" if effect and effect.interval[1] - effect.interval[0] < 3.5e-4 else "+.4f")


def link(study: Study, group: str = "") -> str:
    return f"[{title(study, group)}](studies/{study.plan.name}/report.md)"


def contrast_rows(*names: str) -> list[dict]:
    """What the bias, the mean and both do, for each study or choice of its other settings."""
    rows = []
    for study in map(load_study, names):
        for group, effects in contrasts(study).items():
            row = {"runs": link(study, group), "pairs": max(effect.n for effect in effects.values())}
            rows.append(row | {name: shown(effects.get(name)) for name in reversed(CONTRASTS)})
    return rows


def set_rows(*names: str) -> list[dict]:
    """RMSNorm minus LayerNorm in sets of pairs at 5e-4, and all pairs together."""
    measured = []
    for study in map(load_study, names):
        comparison = next(comparison for comparison in study.comparisons if comparison.arm == "rms")
        verdict = {"lower": "better", "higher": "worse"}.get(comparison.verdict, comparison.verdict)
        measured.append((link(study), comparison.differences, comparison.effect, verdict))
    sets = pairs_at_5e_4(names)
    without = f"the same without the {len(sets[0])} pairs of the first"  # its pilot has other seeds, and stays
    for words, chosen in (("these, a pilot and two sweeps together", sets), (without, sets[1:])):
        measured.append((words, pd.concat(chosen), pooled(chosen), "exploratory"))
    rows = []
    for runs, differences, mean, verdict in measured:
        row = {"runs": runs, "pairs": mean.n, "worse in": np.greater(differences, 0).sum()}
        rows.append(row | {"mean and 95% interval": shown(mean), "verdict": verdict})
    return rows


def length_rows(*names: str) -> list[dict]:
    """RMSNorm minus LayerNorm by tokens for each parameter, beside how far reruns of LayerNorm end apart.

    A name is a study's, or STUDY:RERUNS where another study of this length has the reruns.
    """
    rows = []
    for name in names:
        study, reruns = load_study(name.partition(":")[0]), load_study(name.rpartition(":")[2])
        comparison = next(comparison for comparison in study.comparisons if comparison.arm == "rms")
        settings, rate = study.plan.all_arms["layer"].settings, study.chosen_learning_rates["layer"]
        tokens = settings.optimizer.steps * settings.data.batch_size * settings.data.sequence_length
        length = f"[{tokens / num_parameters(settings.model):.1f}](studies/{study.plan.name}/report.md)"
        row = {"tokens for each parameter": length, "rate": f"{rate:g}", "pairs": comparison.effect.n}
        scatter = reruns.spread["root mean square difference"]["layer", rate, 1e-6]
        rows.append(row | {"RMSNorm minus LayerNorm": shown(comparison.effect), "reruns differ by": f"{scatter:.4f}"})
    return rows


def speed_rows(record: str, unit: str, *words: str) -> list[dict]:
    """A row for each table of a record whose title has the words: the speed or time of each program, the best bold."""
    rows, text = [], " ".join(words)
    for measured in read_speed(record):
        if text not in measured.title:
            continue
        row = {"": measured.title.replace(text, "").strip(", ")}
        medians = {name: [*measured.medians(name).values()][-1] for name in measured.seconds}
        for name, seconds in medians.items():
            cell = three_digits(measured.tokens / seconds if unit == "tokens/s" else seconds * UNITS[unit])
            row[name] = f"**{cell}**" if seconds == min(medians.values()) else cell
        if measured.limits and "ours" in measured.seconds:
            row["ours, of the limit"] = measured.shares_of_limit("ours")
        rows.append(row)
    return rows


def norm_time_rows(*records: str) -> list[dict]:
    """RMSNorm's time of a step over LayerNorm's, for each variant of the code and each record."""
    rows: dict[str, dict] = {}
    for record in records:
        for variant, effect in norm_times(record, "step").items():
            machine = record.removeprefix("training-norms-")
            rows.setdefault(variant, {"code": variant})[machine] = with_interval(effect, ".3f")
    return [*rows.values()]


ROWS = {
    "contrasts": contrast_rows,
    "sets": set_rows,
    "lengths": length_rows,
    "claims": claim_rows,
    "speeds": speed_rows,
    "norm_times": norm_time_rows,
}


def filled(text: str, depth: int) -> str:
    """A document in `depth` folders with its tables, from `<!-- table: KIND NAME ... -->` to `<!-- end -->`."""
    for match in MARKED.finditer(text):
        rows = table(ROWS[match[2]](*match[3].split()))
        rows = re.sub(r"\]\((?=studies/|speed/)", f"]({'../' * depth}", rows)
        text = text.replace(match[0], f"{match[1]}{rows}\n{match[4]}")
    return text


def main() -> None:
    """Write the tables of docs/ from the records in studies/ and speed/."""
    for path in sorted(DOCS.rglob("*.md")):
        replace_text(path, filled(path.read_text(encoding="utf-8"), len(path.relative_to(DOCS).parts)))


if __name__ == "__main__":
    run_main("studies.tables")
