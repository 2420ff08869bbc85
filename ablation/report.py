"""From a study to report.md and its pictures. All numbers and verdicts come from `study` and `stats`, and what was not
measured is left out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from ablation import plots
from ablation.plan import STUDIES, arm_settings
from ablation.records import read_lines
from ablation.stats import MAX_PAIRS, MIN_PAIRS_FOR_EQUIVALENCE, SIGNIFICANCE, Comparison, Effect, holm
from ablation.study import KEY, Study
from files import replace_text, replacing
from model.count import num_norm_parameters, num_parameters

MISSING = "-"
PROBES = ["mean_over_std", "cosine_with_ones", "kurtosis", "largest_channel", "first_token_attention", "spikes"]
ORIGIN = ["commit", "device", "workers", "threads", "kernels", "dtype", "torch", "python", "parameters", "tokens"]
ORIGIN += ["text_hash"]
PHASES = {
    "sweep": "to find learning rates",
    "pilot": "to fix the number of pairs",
    "rerun": "again from changed weights",
    "final": "in pairs",
}
COLUMNS = """p (Holm): of a paired t-test over the seeds, adjusted for the number of comparisons (Holm 1979). p of
equivalence: of two one-sided t-tests against the margin, adjusted likewise. std of a pair: of the differences over the
seeds. It would take: pairs that decide with a power of 80%, from the deviation of these pairs (in brackets from the
ends of its interval). `python ablate.py report FOLDER` writes this page again, with its pictures, from
plan.toml and runs.jsonl; `python ablate.py NAME` runs a plan of studies/ again."""


INSIDE = """Means over the runs, of the residual stream: |mean| over standard deviation of a row, in the deeper half of
the layers; |cosine| with (1, ..., 1); kurtosis over the channels (3: normal), where it is largest; the largest channel
over the median one. Attention of later queries to the first token. Spikes: losses far above those before."""


def describe(study: Study, workers: int) -> str:
    """The plan in words before it runs."""
    rates, hours = study.rates or sorted({*study.learning_rates.values()}), study.plan.hours
    pairs = study.pairs or "as many as the pilot asks for"
    phases = Counter(run.phase for run in study.wanted)
    kinds = ", ".join(f"{count} {PHASES[phase]}" for phase, count in phases.items())
    sweep = " (a sweep)" if study.rates else ""
    return (
        f"arms: {'; '.join(study.arms)}\n"
        f"learning rates: {listed(rates)}{sweep}\n"
        f"final pairs: {pairs}; at most {hours:g} hours in all, and Ctrl-C stops it until the same command resumes it\n"
        f"runs: {len(study.rows)} done, {len(study.remaining)} can start, {workers} at once ({kinds})"
    )


def headline(study: Study) -> list[str]:
    """A line for each arm, in order of its loss: what came out, how sure that is, and what to be careful with."""
    losses = {arm: study.mean_loss(arm, {arm: 1.0}) for arm in study.arms}
    lines = []
    for arm in sorted(losses, key=lambda arm: math.inf if losses[arm] is None else losses[arm].estimate):
        line = f"{arm}: {outcome(study, arm)}"
        if study.best_rates.get(arm) in (*study.rates[:1], *study.rates[-1:]):
            line += "; its learning rate is at the edge of the sweep"
        lines.append(line)
    for effect, p in grid_effects(study):
        if p < SIGNIFICANCE:
            lines.append(f"effect of {effect.name}: {with_interval(effect)} {effect.unit}, p = {p:.2g} (Holm)")
    return lines


def grid_effects(study: Study) -> list[tuple[Effect, float]]:
    """The effects of a grid, each with its p-value, adjusted for their number."""
    return [*zip(study.effects, holm([effect.p for effect in study.effects]), strict=True)]


def outcome(study: Study, arm: str) -> str:
    rows, loss = study.final(arm), study.mean_loss(arm, {arm: 1.0})
    if arm not in study.learning_rates:
        return "no learning rate; the sweep is not finished, or a run diverged at every one"
    if not len(rows):
        return f"not finished, {len(study.of('final', arm))} of {study.pairs or 'a number of'} final runs"
    if loss is None:
        others = rows[rows.status != "completed"]
        reasons = "; ".join(f"seed {r.seed} at {r.learning_rate:g}: {r.reason}" for r in others.head(3).itertuples())
        return f"{len(rows) - len(others)} of {len(rows)} runs completed ({reasons})"
    c = next((c for c in study.comparisons if c.arm == arm), None)
    if c is None:
        return f"{loss.estimate:.4f} {loss.unit} over {loss.n} seeds"
    text = f"{c.verdict}, {with_interval(c.effect)} {study.unit} against {c.baseline} over {c.effect.n} pairs"
    needed = pairs_needed(c)
    return text if needed is None else f"{text}; it would take {needed}"


def pairs_needed(c: Comparison) -> str | None:
    """What would decide an inconclusive comparison."""
    if c.verdict != "inconclusive":
        return None
    best, fewest, most = (f"{n:,}" if n < MAX_PAIRS else f"over {n:,}" for n in c.more_pairs)
    return f"{best} pairs for 80% power ({fewest} to {most})"


def write(study: Study, folder: Path) -> list[Path]:
    """Write report.md, its pictures (PNG and PDF) and its first table (CSV and LaTeX); the paths, report.md first.

    In the reports of studies/, which are kept without pictures, there are no links to them.
    """
    drawn = pictures(study)
    shown = {} if folder.resolve().parent == STUDIES else drawn
    texts = {"report.md": markdown_text(study, folder, shown)}
    if study.comparisons:
        rows = pd.DataFrame(map(comparison_row, study.comparisons))
        texts |= {"differences.csv": rows.to_csv(index=False), "differences.tex": rows.to_latex(index=False)}
    for name, text in texts.items():
        replace_text(folder / name, text)
    paths = [folder / f"{name}.{kind}" for name in drawn for kind in ("png", "pdf")]
    for path in paths:
        with replacing(path) as file:
            drawn[path.stem].savefig(file, format=path.suffix[1:])
    return [folder / name for name in texts] + paths


def pictures(study: Study) -> dict[str, Figure]:
    """Every picture that there is something to draw in, by the name of its file."""
    compared = [(f"{c.arm}: {c.verdict}", c.effect) for c in study.comparisons]
    effects = [(effect.name.replace(" x ", "\nx "), effect) for effect in study.effects]
    bases = ", ".join(dict.fromkeys(c.baseline for c in study.comparisons))
    label, margin = f"loss minus that of {bases}, {study.unit}\nlower loss: better", study.plan.margin
    drawn = {
        "differences": plots.forest(compared, label, margin) if compared else None,
        "effects": plots.forest(effects, label, margin) if effects else None,
        "steps": plots.differences_over_steps(study),
        "sweep": plots.sweep(study) if study.rates else None,
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def markdown_text(study: Study, folder: Path, drawn: dict[str, Figure]) -> str:
    """report.md: parts of a title, a picture and blocks of text, without those that have neither."""
    text = f"# {study.plan.name}\n\n" + "\n".join(f"- {line}" for line in headline(study)) + "\n"
    for title, picture, *blocks in parts(study, folder):
        shown = [block for block in blocks if block]
        if picture in drawn:
            shown.insert(0, f"![{title}]({picture}.png)")
        if shown:
            text += "\n" + "\n\n".join([f"## {title}", *shown]) + "\n"
    return text


def parts(study: Study, folder: Path) -> Iterator[tuple[str, ...]]:
    """Title, picture and blocks of every part of the report; a block is empty where nothing was measured."""
    interval, of_grid = "mean and 95% interval", grid_effects(study)
    effects = [{"effect": effect.name, interval: with_interval(effect), "p (Holm)": p} for effect, p in of_grid]
    sweep = study.sweep.reset_index().to_dict("records") if study.rates else []
    incomplete = study.rows[study.rows.status != "completed"]
    yield "Differences", "differences", about(study), table(map(comparison_row, study.comparisons)), COLUMNS
    yield "Effects of the grid", "effects", table(effects)
    yield "Paired difference over steps", "steps"
    yield "Arms", "", table(arm_row(study, arm) for arm in study.arms)
    yield "Learning rates", "sweep", table(sweep)
    yield "Rerun spread and placebo", "", table(study.spread.reset_index().to_dict("records"))
    yield "Runs that did not complete", "", table(incomplete[[*KEY, "status", "reason"]].to_dict("records"))
    inside = table(probe_rows(study))
    yield "Inside the model", "", inside, INSIDE if inside else ""
    yield "Changes of the plan", "", table(read_lines(folder / "changes.jsonl"))
    yield "Machine, versions and hashes", "", table(origin_rows(study))


def about(study: Study) -> str:
    """How the arms were compared, in words."""
    plan, pairs, done = study.plan, [c.effect.n for c in study.comparisons], len(study.final_seeds)
    steps = {arm_settings(plan, arm).optimizer.steps for arm in study.arms.values()}
    text = f"Final validation loss minus that of the baseline over paired seeds, {listed(steps)} steps: means and "
    text += f"95% intervals. Differences within {plan.margin:g} {study.unit}, shaded in pictures, count as equivalent."
    if study.shares_rate:
        rates = listed({*study.learning_rates.values()})
        text += f" All arms share the learning rate {rates}: none was chosen for each of them."
    if plan.seeds is None and study.pairs is not None:
        text += f" The pilot asked for {study.pairs} pairs; {done} are finished, within {plan.hours:g} hours."
    if min(pairs, default=MIN_PAIRS_FOR_EQUIVALENCE) < MIN_PAIRS_FOR_EQUIVALENCE:
        text += f" {min(pairs)} pairs cannot show equivalence, which takes {MIN_PAIRS_FOR_EQUIVALENCE}."
    if study.measure != "loss":
        text += " Within a seed arms have different batches, so the measure is bits per byte."
    return text


def comparison_row(c: Comparison) -> dict:
    row = {"arm": c.effect.name, f"{c.effect.unit}, mean and 95% interval": with_interval(c.effect)}
    row |= {"verdict": c.verdict, "p (Holm)": c.p_holm, "p of equivalence (Holm)": c.p_equivalence}
    return row | {"pairs": c.effect.n, "std of a pair": c.deviation, "it would take": pairs_needed(c)}


def arm_row(study: Study, name: str) -> dict:
    rows, config = study.final(name), arm_settings(study.plan, study.arms[name]).model
    row = {"arm": name, "learning rate": f"{study.learning_rates.get(name, math.nan):g}"}
    if study.shares_rate:
        row["learning rate"] += " (shared)"
    row["completed"] = f"{(rows.status == 'completed').sum()} of {len(rows)}"
    row[study.unit] = with_interval(study.mean_loss(name, {name: 1.0}), ".4f")
    row["bits per byte"] = rows.bits_per_byte.mean(skipna=False)
    return row | {"parameters": num_parameters(config), "in norms": num_norm_parameters(config)}


def probe_rows(study: Study) -> Iterator[dict]:
    """Means over the final runs; in rows of independent numbers |mean| / std is sqrt(2 / (pi D)) on average."""
    for arm in study.arms:
        means = study.final(arm)[PROBES].astype(float).mean().dropna()
        chance = math.sqrt(2 / (math.pi * arm_settings(study.plan, study.arms[arm]).model.hidden_size))
        if "mean_over_std" in means:
            yield {"arm": arm, "chance level of mean_over_std": chance} | means.to_dict()


def origin_rows(study: Study) -> list[dict]:
    """What the runs were made on and from, and what the arms of a seed share."""
    rows = study.rows
    origin = {name: listed(value for value in rows[name].dropna().unique() if value != "") for name in ORIGIN}
    for name in ("batches", "weights"):  # weights without those of the norms
        hashes = rows[rows[f"{name}_hash"] != ""].groupby("seed")[f"{name}_hash"].nunique()
        if len(hashes):
            origin[f"{name} of a seed"] = "differ between its runs" if hashes.max() > 1 else "equal in all its runs"
        else:
            origin[f"{name} of a seed"] = ""
    origin["training time"] = f"{rows.seconds.sum() / 3600:.2f} hours, summed over {len(rows)} runs"
    return [{"what": name, "which": value or "not recorded"} for name, value in origin.items()]


def listed(values: Iterable) -> str:
    return ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def with_interval(effect: Effect | None, form: str = "+.4f") -> str:
    """An estimate with its 95% interval, if it has one."""
    if effect is None:
        return MISSING
    ends = f" [{effect.interval[0]:{form}}, {effect.interval[1]:{form}}]" if effect.n > 1 else ""
    return f"{effect.estimate:{form}}{ends}"


def table(rows: Iterable[dict]) -> str:
    """A Markdown table of rows, of which all have the columns of the first; empty without any."""

    def cell(value: object) -> str:
        if value is None or value != value:  # NaN
            return MISSING
        return f"{value:.5g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    rows = list(rows)
    head = [*map(str, rows[0])] if rows else []
    lines = [head, ["---"] * len(head), *([cell(row.get(name)) for name in rows[0]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
