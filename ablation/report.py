"""From a study to report.md and its pictures, and to report.html where the package `markdown` is installed.

Nothing is concluded here: numbers and verdicts come from `study` and `stats`. What was not measured is left out.
"""

import importlib.util
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ablation import plots
from ablation.plan import arm_settings
from ablation.stats import MAX_PAIRS, MIN_PAIRS_FOR_EQUIVALENCE, Comparison, Effect, mean_effect
from ablation.study import KEY, RERUNS, Study
from errors import replace_text
from model.count import num_norm_parameters, num_parameters

MISSING, TIMINGS = "-", "timings.jsonl"
HEAD = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>body {font-family: sans-serif} img {max-width: 100%} table {display: block; overflow-x: auto}</style>
"""
PROBES = ["mean_over_std", "cosine_with_ones", "kurtosis", "largest_channel", "largest_activation"]
PROBES += ["first_token_attention", "spikes"]  # columns of the rows
ORIGIN = ["device", "workers", "threads", "kernels", "dtype", "torch", "python", "parameters", "tokens", "text_hash"]


def headline(study: Study) -> list[str]:
    """A line for each arm, in order of its loss."""
    losses = {arm: study.final_loss(arm) for arm in study.arms}
    order = sorted(losses, key=lambda arm: math.inf if losses[arm] is None else losses[arm].estimate)
    return [f"{arm}: {outcome(study, arm)}" for arm in order]


def outcome(study: Study, arm: str) -> str:
    """What came out for an arm, how sure that is, and what to be careful with."""
    if arm not in study.learning_rates:
        return "no learning rate; the sweep is not finished, or a run diverged at every one"
    rows, loss, rate = study.final(arm), study.final_loss(arm), study.learning_rates[arm]
    found = next((c for c in study.comparisons if c.arm == arm), None)
    if not len(rows):
        text = f"not finished, {len(study.of('final', arm))} of {study.pairs or 'a number of'} final runs"
    elif loss is None:
        text = f"{(rows.status == 'completed').sum()} of {len(rows)} runs completed"
    elif found is None:
        text = f"{loss.estimate:.4f} nats per token over {loss.n} seeds"
    else:
        text = f"{found.verdict}, {with_interval(found.effect)} {found.effect.unit} against {found.baseline} over "
        text += f"{found.effect.n} pairs"
        if found.verdict == "inconclusive":
            text += f"; it would take {pairs_needed(found)}"
        if found.chaotic:
            text += f"; chaotic at this learning rate: equal runs drift apart by {found.rerun_spread:.4f}"
    if arm in study.at_edge:
        text += f"; its learning rate, {rate:g}, is at the edge of the sweep"
    if (better := study.better_rate(arm)) is not None:
        text += f"; not well tuned: at {better:g} the sweep ended lower than these runs at {rate:g}"
    return text


def pairs_needed(found: Comparison) -> str:
    best, fewest, most = (f"{n:,}" if n < MAX_PAIRS else f"over {n:,}" for n in found.more_pairs)
    return f"{best} pairs for 80% power ({fewest} to {most})"


def write(study: Study, folder: Path) -> list[Path]:
    """Write report.md and its pictures into the folder of the records; returns the paths, report.md first."""
    drawn = pictures(study)
    text = markdown_text(study, folder, drawn)
    replace_text(folder / "report.md", text)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png")
    written = [folder / "report.md", *(folder / f"{name}.png" for name in drawn)]
    if importlib.util.find_spec("markdown") is not None:
        import markdown

        replace_text(folder / "report.html", HEAD + markdown.markdown(text, extensions=["tables"]))
        written.append(folder / "report.html")
    return written


def pictures(study: Study) -> dict[str, Figure]:
    """Every picture that there is something to draw in, by the name of its file."""
    compared = [(f"{c.arm}: {c.verdict}", c.effect) for c in study.comparisons]
    effects = [(effect.name.replace(" x ", "\nx "), effect) for effect in study.effects]
    label, margin = f"difference in loss, {study.unit}", study.plan.margin
    drawn = {
        "differences": plots.forest(compared, label, margin) if compared else None,
        "effects": plots.forest(effects, label, margin) if effects else None,
        "steps": plots.differences_over_steps(study),
        "sweep": plots.sweep(study) if len(study.sweep.columns) else None,
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def markdown_text(study: Study, folder: Path, drawn: dict[str, Figure]) -> str:
    """report.md: parts of a title, a picture and blocks of text, without those that have no block."""
    blocks = [f"# {study.plan.name}", "\n".join(f"- {line}" for line in headline(study))]
    for title, picture, *found in parts(study, folder):
        shown = [f"![{title}]({picture}.png)"] if picture in drawn else []
        if shown or any(found):
            blocks += [f"## {title}", *shown, *(block for block in found if block)]
    return "\n\n".join(blocks) + "\n"


def parts(study: Study, folder: Path) -> Iterator[tuple[str, ...]]:
    """Title, picture and blocks of every part of the report; a block is empty where nothing was measured."""
    effects = [{"effect": e.name, "mean and 95% interval": with_interval(e), "p": e.p} for e in study.effects]
    incomplete = study.rows[study.rows.status != "completed"]
    yield "Differences", "differences", about(study), table(comparison_row(c) for c in study.comparisons)
    yield "Effects of the grid", "effects", table(effects)
    yield "Paired difference over steps", "steps"
    yield "Arms", "", table(arm_row(study, arm) for arm in study.arms)
    yield "Learning rates", "sweep", table(study.sweep.reset_index().to_dict("records") if study.rates else ())
    yield "Rerun spread and placebo", "", table(spread_rows(study))
    yield "Runs that did not complete", "", table(incomplete[[*KEY, "status", "reason"]].to_dict("records"))
    yield "Inside the model", "", table(probe_rows(study))
    yield "Time of a run's parts over that of the baseline", "", table(time_rows(study, read_lines(folder / TIMINGS)))
    yield "Changes of the plan", "", table(read_lines(folder / "changes.jsonl"))
    yield "Machine, versions and hashes", "", table(origin_rows(study))


def about(study: Study) -> str:
    """How the arms were compared, in words."""
    plan, rates = study.plan, sorted({*study.learning_rates.values()})
    steps = {arm_settings(plan, arm).optimizer.steps for arm in study.arms.values()}
    found = [
        f"Final validation loss minus that of the baseline over paired seeds, {numbers(steps)} steps; the dots are "
        "means, the bars 95% intervals. "
        f"Differences within {plan.margin:g} {study.unit} (shaded) are treated as equivalent."
    ]
    if study.shares_rate:
        found.append(f"All arms share the learning rate {numbers(rates)}: none was chosen for each of them.")
    if plan.seeds is None and study.pairs is not None:
        pairs = f"{study.pairs} pairs; {len(study.common_seeds)} are finished"
        found.append(f"The pilot asked for {pairs}, within {plan.hours:g} hours.")
    fewest = min((c.effect.n for c in study.comparisons), default=MIN_PAIRS_FOR_EQUIVALENCE)
    if fewest < MIN_PAIRS_FOR_EQUIVALENCE:
        found.append(f"{fewest} pairs cannot show equivalence, which takes {MIN_PAIRS_FOR_EQUIVALENCE}.")
    if study.unit == "bits per byte":
        found.append("Within a seed arms have different batches, so the measure is bits per byte.")
    return " ".join(found)


def comparison_row(c: Comparison) -> dict:
    return {
        "arm": f"{c.arm} minus {c.baseline}" + (" (not well tuned)" if c.effect.untuned else ""),
        f"{c.effect.unit}, mean and 95% interval": with_interval(c.effect),
        "verdict": c.verdict + (" (chaotic)" if c.chaotic else ""),
        "p (Holm)": c.p_holm,
        "p of equivalence (Holm)": c.p_equivalence,
        "pairs": c.effect.n,
        "std of a pair": c.deviation,
        "it would take": pairs_needed(c) if c.verdict == "inconclusive" else None,
        "bits per byte": with_interval(c.bits),
    }


def arm_row(study: Study, name: str) -> dict:
    rows, config = study.final(name), arm_settings(study.plan, study.arms[name]).model
    marks = [" (at the edge)"] * (name in study.at_edge) + [" (shared)"] * study.shares_rate
    return {
        "arm": name,
        "learning rate": f"{study.learning_rates.get(name, math.nan):g}" + "".join(marks),
        "completed": f"{(rows.status == 'completed').sum()} of {len(rows)}",
        "nats per token": with_interval(study.final_loss(name), ".4f"),
        "bits per byte": rows.bits_per_byte.mean(skipna=False),
        "parameters": num_parameters(config),
        "in norms": num_norm_parameters(config),
    }


def spread_rows(study: Study) -> Iterator[dict]:
    """How far equal runs of each baseline drift apart at each learning rate: weights changed by 1e-6, and by 5%."""
    rerun = study.rows[study.rows.phase == "rerun"]
    for (arm, rate), _ in rerun.groupby(["arm", "learning_rate"]):
        row = {"arm": arm, "learning rate": rate}
        for size in RERUNS:
            found = study.spread(arm, rate, size)
            spread = f"{np.sqrt(np.mean(np.square(found))):.4f} ({len(found)} runs)" if found else None
            row[f"root mean square difference, weights changed by {size:g}"] = spread
        yield row


def probe_rows(study: Study) -> Iterator[dict]:
    """Means over the final runs; in rows of independent numbers |mean| / std is sqrt(2 / (pi D)) on average."""
    for arm in study.arms:
        means = study.final(arm)[PROBES].astype(float).mean().dropna()
        chance = math.sqrt(2 / (math.pi * arm_settings(study.plan, study.arms[arm]).model.hidden_size))
        if "mean_over_std" in means:
            yield {"arm": arm, "chance level of mean_over_std": chance} | means.to_dict()


def time_ratios(timings: list[dict], part: str, arm: str, base: str) -> list[Effect]:
    """Time of an arm over that of another, an effect for each variant of the code.

    The unit is the process: its blocks share the layout of its memory and what else ran at that time. Within one it is
    the median over pairs of neighboring blocks, which the few that another program disturbed do not move.
    """
    seconds = {(t["variant"], t["process"], t["arm"]): t["seconds"] for t in timings if t["part"] == part}
    medians: dict[str, list[float]] = {}
    for (variant, process, timed), values in seconds.items():
        if timed == arm and (variant, process, base) in seconds:
            ratios = np.divide(values, seconds[variant, process, base])
            medians.setdefault(variant, []).append(float(np.median(ratios)))
    return [mean_effect(variant, values, "ratio") for variant, values in medians.items()]


def time_rows(study: Study, timings: list[dict]) -> Iterator[dict]:
    for part in dict.fromkeys(timing["part"] for timing in timings):
        for name, arm in study.arms.items():
            ratios = time_ratios(timings, part, name, arm.baseline)
            if ratios:
                yield {"part": part, "arm": name} | {e.name: with_interval(e, ".3f") for e in ratios}


def origin_rows(study: Study) -> list[dict]:
    """What the runs were made on and from; several values where they differ."""
    rows = study.rows
    found = {name: numbers(rows[name].dropna().unique()) for name in ORIGIN}
    trained = rows[(rows.batches_hash != "") & (rows.status == "completed")].groupby("seed")
    for name in ("batches", "weights"):
        equal = (trained[f"{name}_hash"].nunique() == 1).all()
        found[f"{name} of a seed"] = "equal in all its runs" if equal else "differ between its runs"
    found["training time"] = f"{rows.seconds.sum() / 3600:.2f} hours, summed over {len(rows)} runs"
    return [{"what": name, "which": value} for name, value in found.items() if value]


def numbers(values: Iterable) -> str:
    return ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def with_interval(effect: Effect | None, form: str = "+.4f") -> str:
    """An estimate with its 95% interval, if it has one."""
    if effect is None:
        return MISSING
    ends = f" [{effect.interval[0]:{form}}, {effect.interval[1]:{form}}]" if effect.interval and effect.n else ""
    return f"{effect.estimate:{form}}{ends}"


def table(rows: Iterable[dict]) -> str:
    """A Markdown table of rows, of which all have the columns of the first; empty without any."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [[cell(row.get(name)).replace("|", "\\|") for name in rows[0]] for row in rows]
    head = [str(name) for name in rows[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def cell(value: object) -> str:
    """A value as text: numbers with five digits, a dash for None and NaN."""
    if value is None or value != value:
        return MISSING
    return f"{value:.5g}" if isinstance(value, float) else str(value)
