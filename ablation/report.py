"""From a study to report.md and its pictures. All numbers and verdicts come from `study` and `stats`."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import pandas as pd

from ablation import plots
from ablation.plan import CURVE_TOKENS, STUDIES
from ablation.records import KEY, MACHINE, read_judgement, read_lines
from ablation.stats import MAX_PAIRS, MIN_PAIRS_FOR_EQUIVALENCE, SIGNIFICANCE, Comparison, Effect, holm
from ablation.study import Study
from errors import counted
from files import replace_text, replacing
from model.count import num_norm_parameters, num_parameters
from training.plot import use_chinese_fonts

MISSING = "-"
MEAN = "mean and 95% interval"
NUMBERS = ["unit", "mean", "low", "high"]  # the same in columns of their own, for CSV files
COLUMNS = """p (Holm): of a paired t-test over the seeds, adjusted for the number of comparisons (Holm 1979), as
intervals are not. p of equivalence: of two one-sided t-tests against the margin, adjusted likewise. std of a pair: of
the differences over the seeds. Worth: training the baseline that much longer changes its loss as much, by the slope of
its loss over log(steps), of runs of another length or its training curve. It would take: pairs that, with a power of
80%, show a difference as large as this or, if it is within the margin, equivalence, by the deviation of these pairs (in
brackets by the ends of its interval)."""
CHANGED_LATE = {
    "seeds": "pairs that are added after a look find differences too often; judge looks by a rule",
    "margin": "a margin that is changed after a look finds equivalence too often; choose it before the first run",
}
STREAM = """Mean / std in the stream: |mean| over the standard deviation of the residual stream, at the norms of the
deeper half. Cosine with ones: 1 where all channels of the stream are equal; a mean over all norms."""


def plan_in_words(study: Study, workers: int) -> str:
    rates = [*study.sweep.columns] or sorted({*study.chosen_learning_rates.values()})
    sweep = " (a sweep; --lr X leaves it out)" if study.sweep_runs else ""
    limit = f"at most {study.plan.hours:g} hours in all, and Ctrl-C stops it until the same command resumes it"
    phases = Counter(run.phase.replace("rerun", "rerun (--rerun-seeds)") for run in study.remaining)
    counts = "; ".join(f"{count} {phase}" for phase, count in phases.items()) or "none"
    arms = (name if arm.baseline else f"{name} (baseline)" for name, arm in study.plan.all_arms.items())
    differing = f"; they differ in {' and '.join(study.plan.varied)}" if len(study.plan.varied) > 1 else ""
    if sum(arm.baseline is None for arm in study.plan.all_arms.values()) > 1:
        differing += ". An arm is compared with the baseline before it"
    return (
        f"arms: {'; '.join(arms)}{differing}\n"
        f"learning rates: {', '.join(map(str, rates))}{sweep}\n"
        f"final pairs: {study.pairs or 'as many as the pilot asks for'}; {limit}\n"
        f"runs: {len(study.rows)} done; can start, {workers} at once: {counts}"
    )


def headline(study: Study) -> list[str]:
    """A line for each arm, in order of its loss: what came out, how sure that is, and what to be careful with."""
    losses = {arm: study.mean_loss(arm, {arm: 1.0}) for arm in study.plan.all_arms}
    edges = {*study.sweep.columns[:1], *study.sweep.columns[-1:]}
    lines = []
    for arm in sorted(losses, key=lambda arm: math.inf if losses[arm] is None else losses[arm].estimate):
        line = f"{arm}: {outcome(study, arm, losses[arm])}"
        if arm in study.sweep.index and study.chosen_learning_rates.get(arm) in edges:
            line += "; its learning rate is at the edge of the sweep"
        lines.append(line)
    for effect, p in grid_effects(study):
        if p < SIGNIFICANCE:
            lines.append(f"effect of {effect.name}: {with_interval(effect)} {effect.unit}, p = {p:.2g} (Holm)")
    if study.loss_column == "bits_per_byte":
        lines.append("note: losses and margin are in bits per byte, as the arms were not trained on equal batches")
    pairs = len(study.counted_seeds)
    done = study.rows.seed[study.rows.phase == "final"].nunique()
    if 0 < pairs < (study.plan.seeds or 0):
        lines.append(f"note: {pairs} of {study.plan.seeds} pairs, as the limit of {study.plan.hours:g} hours is met")
    elif 0 < pairs < done:
        lines.append(f"note: runs of {done} seeds are there, and {pairs} of them count")
    elif 0 < pairs < MIN_PAIRS_FOR_EQUIVALENCE:
        limit = f"tests err more often where differences are not normal; equivalence takes {MIN_PAIRS_FOR_EQUIVALENCE}"
        lines.append(f"note: {pairs} pairs are few: {limit}")
    elif not pairs and len(study.runs_in_time) < len(study.planned_runs):
        lines.append(f"note: the limit of {study.plan.hours:g} hours is met before a pair counts; raise --hours")
    return lines


def outcome(study: Study, arm: str, loss: Effect | None) -> str:
    """What came out for an arm: its difference, or the loss of a baseline, or what its runs lack."""
    if arm not in study.chosen_learning_rates:
        return "no learning rate; the sweep is not finished, or a run diverged at every one"
    rows = study.rows_of("final", arm)
    if not len(rows):
        of_arm = study.rows[study.rows.arm == arm]
        reasons = of_arm.reason[of_arm.status == "failed"]
        failed = f"; {counted(len(reasons), 'run')} failed ({reasons.iloc[-1]})" if len(reasons) else ""
        done = ((of_arm.phase == "final") & (of_arm.status != "failed")).sum()
        return f"not finished, {counted(done, 'final run')} of {study.pairs or 'those that the pilot asks for'}{failed}"
    others = rows[rows.status != "completed"]
    if len(others):
        reasons = "; ".join(f"seed {r.seed} at {r.learning_rate:g}: {r.reason}" for r in others.head(3).itertuples())
        return f"{len(rows) - len(others)} of {len(rows)} runs completed ({reasons})"
    for c in study.comparisons:
        if c.arm == arm:
            text = f"{c.verdict}, {with_interval(c.effect)} {study.unit} against {c.baseline} over {c.effect.n} pairs"
            needed = pairs_to_decide(c)
            return text if needed is None else f"{text}; it would take {needed}"
    return f"{loss.estimate:.4f} {loss.unit} over {loss.n} seeds"


def grid_effects(study: Study) -> list[tuple[Effect, float]]:
    """The effects of a grid, each with its p-value, adjusted for their number."""
    return [*zip(study.effects, holm([effect.p for effect in study.effects]), strict=True)]


def pairs_to_decide(c: Comparison) -> str | None:
    """The pairs that an inconclusive comparison would probably need, as text."""
    if not c.verdict.startswith("inconclusive"):
        return None
    best, fewest, most = (f"{n:,}" if n < MAX_PAIRS else f"over {n:,}" for n in c.pairs_for_power)
    return f"{best} pairs for 80% power ({fewest} to {most})"


def write(study: Study, folder: Path) -> Path:
    """Write report.md, whose path is returned, its first table as CSV and LaTeX, and its pictures as PNG and PDF."""
    use_chinese_fonts(*study.plan.all_arms)
    differences, effects = difference_table(study), effect_table(study)
    compared = {}  # effects by their text in the picture
    for c, worth in zip(study.comparisons, differences.get("worth", ()), strict=True):
        compared[f"{c.arm}: {c.verdict}\n{worth or ''}"] = c.effect
    bases = {c.baseline for c in study.comparisons}
    base = bases.pop() if len(bases) == 1 else "the baseline"
    effect_label = f"effect on the loss, {study.unit}"
    xlabel = f"loss minus that of {base}, {study.unit}\nlower loss: better"
    figures = {
        "differences": plots.forest(compared, xlabel, study.plan.margin),
        "effects": plots.forest({effect.name: effect for effect in study.effects}, effect_label, study.plan.margin),
        "steps": plots.differences_over_steps(study),
        "sweep": plots.sweep(study),
    }
    drawn = [name for name in figures if figures[name] is not None]
    for name, kind in itertools.product(drawn, ("png", "pdf")):
        with replacing(folder / f"{name}.{kind}") as file:
            figures[name].savefig(file, format=kind)
    is_study = folder.resolve().parent == STUDIES  # which is kept without pictures
    replace_text(folder / "report.md", markdown_text(study, folder, differences, () if is_study else drawn))
    judgement = read_judgement(folder)
    if judgement is not None and judgement.interval is not None and study.comparisons:
        # The numbers of judge: those of a single test do not count its looks.
        low, high = judgement.interval
        mean = f"{judgement.difference:+.4f} [{low:+.4f}, {high:+.4f}]"
        numbers = {MEAN: mean, "low": low, "high": high, "p (Holm)": judgement.p, "verdict": judgement.verdict}
        differences = differences.assign(**numbers)
    save_table(folder / "differences", differences, ["arm", MEAN, "unit", "pairs", "p (Holm)", "verdict"])
    save_table(folder / "effects", effects, ["effect", MEAN, "unit", "p (Holm)"])
    return folder / "report.md"


def save_table(path: Path, rows: pd.DataFrame, narrow: list[str]) -> None:
    """Write rows, if there are any, as CSV, and their narrow columns as LaTeX; path: without the suffix."""
    if len(rows):
        replace_text(path.with_suffix(".csv"), rows.drop(columns=MEAN, errors="ignore").to_csv(index=False))
        latex = rows[narrow].to_latex(index=False, escape=True, na_rep=MISSING, float_format="%.3g")
        latex = re.sub(r"(?<=[ \[])-(?=\d)", "$-$", latex)
        replace_text(path.with_suffix(".tex"), f"% needs \\usepackage{{booktabs}}\n{latex}")


def markdown_text(study: Study, folder: Path, differences: pd.DataFrame, drawn: Collection[str]) -> str:
    """report.md, with links to the pictures that are drawn. Empty sections are left out."""
    differences = differences.drop(columns=NUMBERS, errors="ignore").rename(columns={MEAN: f"{study.unit}, {MEAN}"})
    effects = effect_table(study).drop(columns=NUMBERS, errors="ignore")
    changes = read_lines(folder / "changes.jsonl")
    judgement = read_judgement(folder)
    fields = {change["field"] for change in changes}
    late = [f"Note: {CHANGED_LATE[name]}." for name in CHANGED_LATE if name in fields and judgement is None]
    incomplete = study.rows[study.rows.status != "completed"]
    hours = (study.rows.seconds / 3600).groupby([study.rows[name] for name in MACHINE], dropna=False, sort=False)
    machines = hours.agg([("runs", "size"), ("hours of training", "sum")])
    sections = [  # title, picture, text
        ("Differences", "differences", [about(study), table(differences), COLUMNS]),
        ("Effects of the grid", "effects", [table(effects)]),
        (f"Paired difference over steps, on at most {CURVE_TOKENS:,} tokens of the validation text", "steps", []),
        ("Arms", None, [table(arm_row(study, arm) for arm in study.plan.all_arms), STREAM]),
        ("Learning rates", "sweep", [table(study.sweep.reset_index())]),
        ("Rerun spread and placebo", None, [table(study.spread.reset_index())]),
        ("Runs that did not complete", None, [table(incomplete[[*KEY, "status", "reason"]])]),
        ("Changes of the plan", None, [table(changes), *late]),
        ("Machines and versions", None, [table(machines.reset_index())]),
    ]
    lines = headline(study)
    if judgement is not None:
        difference = "" if judgement.interval is None else f", {judgement.difference} {[*judgement.interval]}"
        lines.insert(0, f"judge: {judgement.verdict}{difference}; {judgement.reason}")
        lines.append("note: where judge stopped early, its interval is right, and those below are too narrow")
    text = f"# {study.plan.name}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    for title, picture, blocks in sections:
        link = f"![{title}]({picture}.png)" if picture in drawn else ""
        shown = [block for block in (link, *blocks) if block]
        if shown:
            text += "\n" + "\n\n".join([f"## {title}", *shown]) + "\n"
    return text


def about(study: Study) -> str:
    """How the arms were compared, in words."""
    plan = study.plan
    steps = ", ".join(f"{steps:,}" for steps in sorted({arm.value("steps") for arm in plan.all_arms.values()}))
    sentences = [
        f"Final validation loss minus that of the baseline over paired seeds, {steps} steps: means and 95% intervals.",
        f"Differences within {plan.margin:g} {study.unit}, shaded in pictures, count as equivalent.",
    ]
    rates = {*study.chosen_learning_rates.values()}
    if not study.sweep_runs and len(rates) == 1:
        sentences.append(f"All arms share the learning rate {rates.pop()}: none was chosen for each of them.")
    if study.sweep_runs:
        sentences.append("Each arm has the learning rate of its lowest mean loss over other seeds, those of the sweep.")
    if plan.seeds is None and study.pairs is not None:
        finished = f"{len(study.counted_seeds)} are finished, within {plan.hours:g} hours"
        sentences.append(f"The pilot asked for {study.pairs} pairs; {finished}.")
    texts = "; ".join(dict.fromkeys(" ".join(arm.value("data")) for arm in plan.all_arms.values()))
    baseline = next(iter(plan.all_arms.values()))
    shared = [f"; {name}: {value}" for name, value in baseline.changes.items() if name not in (*plan.varied, "data")]
    sentences.append(f"Config: {plan.config}; text: {texts}{''.join(shared)}.")
    if plan.prediction:
        sentences.append(f'Prediction: "{plan.prediction}".')
    columns = {"batches": "batches_hash", "initial weights (but for the norms)": "weights_hash"}
    seeds = study.rows.replace("", None).groupby("seed")
    equal = [what for what, column in columns.items() if seeds[column].nunique().max() == 1]
    if equal:
        sentences.append(f"Runs of a seed had equal {' and '.join(equal)}.")
    return " ".join(sentences)


def difference_table(study: Study) -> pd.DataFrame:
    rows = []
    for c in study.comparisons:
        row = {"arm": c.effect.name, **interval_columns(c.effect)}
        row |= {"worth": study.in_steps(c.baseline, c.effect.estimate, c.effect.interval), "verdict": c.verdict}
        row |= {"p (Holm)": c.p_holm, "p of equivalence (Holm)": c.p_equivalence, "pairs": c.effect.n}
        rows.append(row | {"std of a pair": c.deviation, "it would take": pairs_to_decide(c)})
    return pd.DataFrame(rows)


def effect_table(study: Study) -> pd.DataFrame:
    return pd.DataFrame({"effect": e.name, **interval_columns(e), "p (Holm)": p} for e, p in grid_effects(study))


def interval_columns(effect: Effect) -> dict:
    """A mean and its 95% interval as one text, and as CSV files have them."""
    low, high = effect.interval
    return {MEAN: with_interval(effect), "unit": effect.unit, "mean": effect.estimate, "low": low, "high": high}


def arm_row(study: Study, name: str) -> dict:
    rows = study.rows_of("final", name)
    config = study.plan.all_arms[name].settings.model
    vocab_sizes = rows.vocab_size.dropna()
    if len(vocab_sizes):
        config = dataclasses.replace(config, vocab_size=int(vocab_sizes.iloc[0]))
    if config.norm_placement not in ("pre", "post"):  # others have norms that read a block's output
        rows = rows.assign(mean_over_std=math.nan, cosine_with_ones=math.nan)
    return {
        "arm": name,
        "learning rate": f"{study.chosen_learning_rates.get(name, math.nan):g}",
        "completed": f"{(rows.status == 'completed').sum()} of {len(rows)}" if len(rows) else "not finished",
        study.unit: with_interval(study.mean_loss(name, {name: 1.0}), ".4f"),
        "bits per byte": rows.bits_per_byte.mean(skipna=False),
        "parameters": num_parameters(config),
        "in norms": num_norm_parameters(config),
        "mean / std in the stream": rows.mean_over_std.mean(),
        "cosine with ones": rows.cosine_with_ones.mean(),
    }


def with_interval(effect: Effect | None, form: str = "+.4f") -> str:
    """An estimate with its 95% interval, if it has one."""
    if effect is None:
        return MISSING
    ends = f" [{effect.interval[0]:{form}}, {effect.interval[1]:{form}}]" if effect.n > 1 else ""
    return f"{effect.estimate:{form}}{ends}"


def table(rows: Iterable[dict] | pd.DataFrame) -> str:
    """A Markdown table of rows, of which all have the columns of the first, without empty columns."""

    def cell(value: object) -> str:
        if value is None or value != value:  # NaN
            return MISSING
        if isinstance(value, float):
            return f"{value:.4f}" if 0.1 <= abs(value) < 10 else f"{value:.3g}"
        return str(value).replace("|", "\\|")

    cells = pd.DataFrame(rows, dtype=object).map(cell)
    cells = cells.loc[:, ~cells.isin([MISSING, ""]).all()]
    lines = [map(str, cells), ["---"] * cells.shape[1], *cells.to_numpy()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if len(cells) else ""
