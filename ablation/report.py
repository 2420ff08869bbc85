"""From a folder's records to results.json, report.md and report.html: all derived, so any of them may be deleted.

The Markdown and the page are made from one list of sections, so they cannot disagree. Nothing is computed here: numbers
come from `analysis`, verdicts from `claims` and `analysis`. A part that was not measured is left out.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ablation import plots
from ablation.analysis import ArmSummary, Study
from ablation.cells import Cell, millions
from ablation.claims import CLAIMS, Judged, judge_all
from ablation.comparison import Noise
from ablation.effects import MAX_PAIRS, Effect, mean_effect, minimum_detectable_effect
from ablation.plan import MAX_SEEDS, arm_settings, baseline, load_plan, model_config, steps_of
from ablation.plots import Picture
from ablation.results import Change, read_changes, read_results, read_timings
from errors import UserError, replace_text

TEMPLATE = Path(__file__).with_name("report.html.jinja")
FILES = ("results.json", "report.md", "report.html")
MISSING = "-"


Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows, each a mapping from column to value (see `cell`); `folded` tables open at a click."""

    caption: str
    rows: list[dict[str, Value]]
    folded: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    pictures: list[Picture]
    tables: list[Table]


def load_study(folder: Path) -> Study:
    """Everything that a folder has recorded."""
    if not (folder / "plan.toml").is_file() or not (folder / "runs.jsonl").is_file():
        raise UserError(f"{folder} has no plan.toml and runs.jsonl; give the folder of a comparison.")
    results, timings = read_results(folder / "runs.jsonl"), read_timings(folder / "timings.jsonl")
    return Study(load_plan(str(folder / "plan.toml")), results, timings)


def describe_size(study: Study) -> str:
    """How many final pairs there are, why, and what they take."""
    size = study.size
    if size is None or size.seconds_per_pair is None:
        return "no pilot" if size else "the pilot has not finished"
    spread = "" if size.deviation is None else f"pairs differ with a standard deviation of {size.deviation:.2g} nats; "
    text = f"{spread}{size.pairs} final pairs, {size.pairs * size.seconds_per_pair / 3600:.2g} hours"
    if size.pairs < size.needed:
        more = size.needed * size.seconds_per_pair / 3600
        needed = f"{size.needed:,}" if size.needed < MAX_PAIRS else f"over {MAX_PAIRS:,}"
        limit = "the most of any plan" if size.pairs == MAX_SEEDS else f"all that fit into {study.plan.hours:g} hours"
        text += f", {limit}; {needed} would be needed ({more:.2g} hours)"
    return text


def write(study: Study, folder: Path) -> None:
    """Write results.json, report.md and report.html; a kill leaves each file old or new."""
    judged = judge_all(CLAIMS, study)
    parts, lines = sections(study, judged, read_changes(folder / "changes.jsonl")), headline(study)
    title = f"Ablation: {study.plan.name}"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = cell
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    replace_text(folder / "results.json", json.dumps(as_json(study, judged), indent=1) + "\n")
    replace_text(folder / "report.md", markdown(title, lines, parts))
    html = page.render(title=title, headline=lines, intro=intro(study), sections=parts)
    replace_text(folder / "report.html", html)


def as_json(study: Study, judged: Sequence[Judged]) -> dict:
    """All conclusions, with None for what is not a finite number."""
    claims = [
        {
            **{"id": j.claim.id, "claim": j.claim.text, "source": j.claim.source, "verdict": j.verdict},
            "effects": [dataclasses.asdict(e) | {"verdict": v} for e, v in zip(j.effects, j.verdicts, strict=True)],
        }
        for j in judged
    ]
    arms = []
    for arm in study.arms:
        fields = dataclasses.asdict(arm)
        if arm.comparison is not None:
            fields["comparison"] |= {"verdict": arm.comparison.verdict, "explanation": arm.comparison.explanation}
        arms.append(fields)
    sweeps = [
        {"arm": study.label(s.arm), "losses": {f"{rate:g}": loss for rate, loss in s.losses.items()}}
        | {"best": s.best, "at_edge": s.at_edge, "diverged": s.diverged, "runs": s.runs, "spikes": s.spikes}
        for s in study.sweeps
    ]
    return _finite({"plan": dataclasses.asdict(study.plan), "arms": arms, "sweeps": sweeps, "claims": claims})


def headline(study: Study) -> list[dict[str, str]]:
    """Every arm in order of its loss: name, what came out, and how sure that is."""
    return [{"arm": arm.label} | _outcome(study, arm) for arm in study.arms]


def _outcome(study: Study, arm: ArmSummary) -> dict[str, str]:
    if arm.learning_rate is None:
        return {"verdict": "no learning rate", "detail": "the sweep is not finished, or every learning rate diverged"}
    caution = f"; learning rate {arm.learning_rate:g} is at the edge of the sweep" if arm.at_edge else ""
    if arm.better_rate is not None:
        caution += f"; learning rate {arm.better_rate:g} ended lower in the sweep: try more seeds there (--sweep-seeds)"
    if arm.loss is None:
        if study.size is None:
            return {"verdict": "not finished", "detail": "the pilot is not finished"}
        if study.size.pairs < 2:
            return {"verdict": "not measured", "detail": describe_size(study) + caution}
        if not study.is_finished:
            done = len(study.finished_runs("final", arm.arm))
            detail = f"{done} of {study.size.pairs} final runs; their losses count when all arms have all of theirs"
            return {"verdict": "not finished", "detail": detail}
        return {"verdict": "diverged", "detail": f"{arm.completed} of {arm.runs} runs completed{caution}"}
    found = arm.comparison
    if found is None:
        detail = f"{arm.loss.estimate:.4f} nats per token over {arm.loss.n} seeds{caution}"
        base = baseline(study.plan, arm.arm)
        return {"verdict": "baseline" if base is None else f"not compared with {study.label(base)}", "detail": detail}
    detail = f"{effect(found.loss, '+.4f')} nats per token over {found.loss.n} pairs: {found.explanation}"
    if found.verdict == "not resolved":
        detail += f", {found.pairs_needed() * seconds_per_pair(study) / 3600:.2g} hours here"
    if found.chaotic:
        detail += f"; chaotic at this learning rate: {noise_words(found.noise)}"
    detail += caution
    preposition = {"lower": "than", "higher": "than", "not resolved": "against"}.get(found.verdict, "to")
    return {"verdict": f"{found.verdict} {preposition} {found.baseline}", "detail": detail}


def seconds_per_pair(study: Study) -> float:
    """One run of every arm, as many at once as there were; from the median, since a process may have been paused."""
    runs = study.table[study.table.phase == "final"]
    return float(runs.seconds.median()) * len(study.plan.arms) / runs.result.iloc[0].machine.processes


def noise_words(noise: Noise | None) -> str:
    """How far equal runs drift apart, and over how many pairs of them it was measured."""
    if noise is None or math.isinf(noise.deviation):
        return "not measured" if noise is None else "a run diverged"
    return f"{noise.deviation:.4f} between equal runs (n = {len(noise.differences)})"


def intro(study: Study) -> str:
    plan = study.plan
    tuned = "each arm at its best learning rate of the sweep" if plan.has_sweep else "all arms at one learning rate"
    pairs = f"{study.size.pairs} paired seeds" if study.size else "the pilot has not finished"
    return (
        f"Validation loss of each arm minus that of its baseline, with 95% intervals: {tuned}, {pairs}, "
        f"{steps_of(plan):,} steps. Differences smaller than {plan.margin:g} nats per token are treated as "
        f"equivalent."
    )


def sections(study: Study, judged: Sequence[Judged], changes: Sequence[Change] = ()) -> list[Section]:
    """The report in its order, without the parts that have nothing to show."""
    runs = [
        {
            "arm": run.variant or study.label(run.arm),
            "phase": run.phase + ("" if run.used else " (superseded)"),
            **{"seed": run.seed, "learning rate": run.learning_rate, "status": run.status},
            **{"nats per token": run.validation_loss, "bits per byte": run.bits_per_byte},
            **{"spikes": run.spikes, "seconds": run.seconds},
        }
        for run in study.table.itertuples()
    ]
    made = [
        differences(study),
        losses(study),
        learning_rates(study),
        conversions(study),
        timing(study),
        inside(study),
        Section("Claims", "", [], [Table("Published claims about norms, and what was measured", claim_rows(judged))]),
        Section(
            "How it was made",
            "",
            [],
            [Table("Plan, text and machine", origin(study)), Table("Changes of the plan", list(map(vars, changes)))],
        ),
        Section("What not to conclude", " ".join(notes(study)), [], []),
        Section("Every run", "", [], [Table(f"All {len(runs)} runs", runs, folded=True)]),
    ]
    kept = [dataclasses.replace(s, tables=[table for table in s.tables if table.rows]) for s in made]
    return [s for s in kept if s.tables or s.pictures or s.title == "What not to conclude"]


def differences(study: Study) -> Section:
    compared = [
        {
            "arm": f"{c.arm} minus {c.baseline}" + (" (not well tuned)" if c.loss.untuned else ""),
            "mean and 95% interval": effect(c.loss, "+.4f"),
            "verdict": c.verdict,
            "why": c.explanation,
            "90% interval": interval(c.loss.interval_90, "+.4f"),
            "bits per byte": effect(c.bits, "+.4f"),
            **{"pairs": c.loss.n, "std of a pair": c.std, "correlation": c.correlation, "p": c.loss.p},
            **{"p (Holm)": c.p_holm, "p of equivalence (Holm)": c.p_equivalence},
            "noise": noise_words(c.noise) + (" (chaotic at this learning rate)" if c.chaotic else ""),
            "minimum detectable effect": minimum_detectable_effect(c.std, c.loss.n),
        }
        for c in study.comparisons
    ]
    arms = [
        {
            "arm": arm.label,
            "learning rate": cell(arm.learning_rate)
            + (" (at the edge)" if arm.at_edge else "")
            + ("" if arm.better_rate is None else f" ({arm.better_rate:g} ended lower in the sweep)"),
            "completed": f"{arm.completed} of {arm.runs}",
            "loss and 95% interval": effect(arm.loss, ".4f"),
            **{"bits per byte": arm.bits_per_byte, "parameters": arm.parameters, "in norms": arm.norm_parameters},
        }
        for arm in study.arms
    ]
    tables = [
        Table("Loss minus the baseline's, nats per token", compared),
        Table(
            "The pilot, which only fixes the number of pairs: loss minus the baseline's, nats per token", pilot(study)
        ),
        Table("Mean validation loss, nats per token", arms),
    ]
    return Section("Paired differences", "", [plots.differences(study)] if compared else [], tables)


def pilot(study: Study) -> list[dict[str, Value]]:
    """A row for each arm that the pilot compares with its baseline."""
    rows = []
    for arm in study.plan.arms if study.plan.seeds is None and study.size is not None else ():
        base = baseline(study.plan, arm)
        if base is not None and len(found := study.pilot_differences(arm)) > 1:
            pairs = {"pairs": " ".join(f"{value:+.4f}" for value in found), "std of a pair": f"{found.std(ddof=1):.4f}"}
            noise = noise_words(study.noise(base, study.learning_rates[base]))
            rows.append({"arm": f"{study.label(arm)} minus {study.label(base)}"} | pairs | {"noise": noise})
    return rows


def losses(study: Study) -> Section:
    stored = any(result.validation_curve for result in study.results)
    note = " The dots are of the first part of the validation set, the final losses of all of it." if stored else ""
    return Section("Loss curves", f"All panels have the same axes.{note}", plots.loss_curves(study), [])


def learning_rates(study: Study) -> Section:
    rows = [
        {"arm": study.label(sweep.arm)}
        | {f"{rate:g}": loss for rate, loss in sweep.losses.items()}
        | {"best": cell(sweep.best) + (" (at the edge)" if sweep.at_edge else "")}
        | {"diverged": f"{sweep.diverged} of {sweep.runs}"}
        for sweep in study.sweeps
    ]
    curve = [
        {"arm": point.loss.name, "mean and 95% interval": effect(point.loss, "+.4f"), "noise": noise_words(point.noise)}
        for point in study.curve
    ]
    seeds = study.plan.sweep_seeds
    caption = f"Mean validation loss over {seeds} seeds, nats per token; {MISSING}: a run diverged or is missing"
    of_pairs = "Loss minus the baseline's at the same learning rate, nats per token"
    pictures = [plots.sweep_curves(study), *plots.difference_curves(study)] if rows else []
    return Section("Learning rates", "", pictures, [Table(caption, rows), Table(of_pairs, curve)])


def conversions(study: Study) -> Section:
    rows = []
    used = study.table[(study.table.phase == "conversion") & study.table.used]
    for variant, runs in used.groupby("variant", sort=False):
        changes = (runs.validation_loss - runs.loss_before).dropna()
        cost = mean_effect(variant, changes, "nats per token") if len(changes) else None
        row = {"conversion": variant, "steps trained": runs.steps.max(), "seeds": f"{len(changes)} of {len(runs)}"}
        rows.append(row | {"change and 95% interval": effect(cost, "+.4f")})
    text = (
        "rms has neither LayerNorm's mean nor its bias; rms with bias lacks only the mean, layer without bias only "
        "the bias, and with centered weights the mean is 0, unless the embedding is tied to the head. At once: nothing "
        "is trained afterwards. Norms trained: only the norms are. All trained: all parameters are; layer, all trained "
        "is the control, which loses nothing."
    )
    table = Table("Validation loss after the conversion minus that before, nats per token", rows)
    pictures = plots.conversion_curves(study)
    return Section("A LayerNorm model converted to RMSNorm", text, pictures, [table])


def timing(study: Study) -> Section:
    base = next((study.label(arm) for arm in study.plan.arms if baseline(study.plan, arm) is None), "")
    rows = [
        {"part": part, "arm": name, "variant": e.name, "time over the baseline's": effect(e, ".3f"), "processes": e.n}
        for part in dict.fromkeys(timing.part for timing in study.timings)
        for name in map(study.label, study.plan.arms)
        for e in (study.time_ratios(part, name, base) if name != base else [])
    ]
    caption = (
        "Ratio of times: mean over processes, each the median of interleaved blocks, with its 95% interval; "
        f"baseline: {base}"
    )
    picture = plots.time_ratios(study, base) if rows else None
    return Section("Time", "", [picture] if picture else [], [Table(caption, rows, folded=len(rows) > 20)])


def inside(study: Study) -> Section:
    rows = []
    for arm in study.plan.arms:
        runs = [run for run in study.final(arm).result if run.status == "completed"]
        measured = {
            "gradient norm, last part of the run": [run.gradient_norm[-1][1] for run in runs if run.gradient_norm],
            "largest activation": [run.probes.largest_activation for run in runs if run.probes],
            "loss spikes of a run": [run.spikes for run in runs],
        }
        spread = {name: f"{min(of):.3g} to {max(of):.3g}" if of else MISSING for name, of in measured.items()}
        rows += [{"arm": study.label(arm)} | spread] if runs else []
    table = Table("Stability of the final runs, minimum to maximum over seeds", rows)
    return Section("Inside the model", "", plots.probe_curves(study), [table])


def claims_table(folders: Sequence[Path]) -> str:
    """One Markdown table of claims; each is judged from the first of the folders that measured it."""
    studies = [judge_all(CLAIMS, load_study(folder)) for folder in folders]
    chosen = [next((j for j in found if j.effects), found[0]) for found in zip(*studies, strict=True)]
    return markdown_table(claim_rows(chosen))


def cells_table(found: Sequence[Cell]) -> str:
    """A Markdown table of cells."""
    rows = [
        {
            **{"arm": c.compared, "parameters": millions(c.parameters), "tokens": millions(c.tokens)},
            **{"text": ", ".join(arm_settings(c.study.plan, c.arm).data.data), "learning rate": c.rates},
            **{"pairs": c.loss.n, "nats per token": effect(c.loss, "+.4f")},
            "bits per byte": MISSING if c.bits is None else effect(c.bits, "+.4f"),
            **{"std of a pair": f"{c.deviation:.4f}", "noise": noise_words(c.noise)},
            "verdict": c.verdict + (" (not well tuned)" if c.loss.untuned else ""),
        }
        for c in found
    ]
    return markdown_table(rows)


def claim_rows(judged: Sequence[Judged]) -> list[dict[str, Value]]:
    """The table of claims: every effect with its own verdict where there are several."""
    rows = []
    for j in judged:
        measured = [
            f"{e.name} {effect(e, '.4g')} {e.unit}"
            + (" of arms that are not well tuned" if e.untuned else "")
            + (f" ({verdict})" if len(j.effects) > 1 else "")
            for e, verdict in zip(j.effects, j.verdicts, strict=True)
        ]
        row = {"id": j.claim.id, "claim": j.claim.text, "source": j.claim.source}
        rows.append(row | {"measured": "; ".join(measured) or MISSING, "verdict": j.verdict})
    return rows


def origin(study: Study) -> list[dict[str, Value]]:
    config = model_config(study.plan, study.plan.arms[0])
    hours = sum(run.seconds for run in study.results) / 3600
    rows = {
        "model": f"{config.num_hidden_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}",
        "training time": f"{hours:.2f} hours, summed over runs",
        "number of pairs": describe_size(study),
    }
    records = {"plan": study.plan}
    records |= {"text": study.results[0].text, "machine": study.results[0].machine} if study.results else {}
    for name, record in records.items():
        values = {key: value for key, value in dataclasses.asdict(record).items() if value not in (None, ())}
        words = {key: ", ".join(map(str, v)) if isinstance(v, tuple) else v for key, v in values.items()}
        rows[name] = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in words.items())
    return [{"what": name, "which": value} for name, value in rows.items()]


def notes(study: Study) -> list[str]:
    """What does not follow from the numbers."""
    config = model_config(study.plan, study.plan.arms[0])
    found = [
        f"One model of {config.num_hidden_layers} layers of {config.hidden_size} and one text: nothing here says what "
        "happens at other sizes or after much longer training.",
        "Losses are of a held-out part of the same kind of text and say nothing about other tasks.",
    ]
    if study.timings:
        found.append("Times hold for this machine, these sizes and these variants of the code.")
    if not study.plan.has_sweep:
        found.append("All arms ran at the same learning rate, which was not tuned for any of them.")
    at_edge = ", ".join(study.label(arm) for arm in study.plan.arms if arm in study.arms_at_edge)
    if at_edge:
        found.append(f"The best learning rate of {at_edge} is the lowest or highest tried: another may be better.")
    for arm in study.arms:
        if arm.better_rate is not None:
            found.append(
                f"The final runs of {arm.label} ended higher, by all of their interval, than its sweep at "
                f"{arm.better_rate:g}: few seeds chose {arm.learning_rate:g}, and what differs may be the "
                "learning rate."
            )
    return found


def markdown(title: str, lines: list[dict[str, str]], parts: list[Section]) -> str:
    """The report without its pictures."""
    blocks = [f"# {title}", "\n".join(f"- **{line['arm']}**: {line['verdict']}. {line['detail']}" for line in lines)]
    for part in parts:
        blocks += [f"## {part.title}", part.text]
        blocks += [block for table in part.tables for block in (f"{table.caption}:", markdown_table(table.rows))]
        blocks += ["The pictures of this part are in report.html."] if part.pictures else []
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown_table(rows: list[dict[str, Value]]) -> str:
    """A table of rows with the same columns."""
    head = list(rows[0])
    cells = [[cell(value).replace("|", "\\|") for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def cell(value: Value) -> str:
    """A value as text: numbers with five digits, a dash for None and NaN."""
    if value is None or value != value:
        return MISSING
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def interval(ends: tuple[float, float] | None, form: str) -> str:
    return "[no interval]" if ends is None else f"[{ends[0]:{form}}, {ends[1]:{form}}]"


def effect(found: Effect | None, form: str) -> str:
    """An estimate with its 95% interval, unless it is exact."""
    if found is None:
        return MISSING
    return f"{found.estimate:{form}}" + (f" {interval(found.interval, form)}" if found.n else "")


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
