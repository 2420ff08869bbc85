"""The report of an ablation from the content of results.json: report.md, and report.html, a page that fetches nothing.

Both are written from one document, so they cannot disagree. Numbers are put into words, not worked out. A part that has
not been measured says so in one line.
"""

from collections.abc import Callable
from pathlib import Path

from ablation import document, report_comparisons, report_curves
from ablation.document import Block, Bullets, Code, Document, Section, Text, table
from ablation.report_comparisons import TIMED, compared, timed
from ablation.wording import NOTHING, both, bound_of, finite, interval, number, seconds, verdict, whole
from training.settings import replace_text

VERDICTS = {"holds": "✓ holds", "does not hold": "✗ does not hold", "not resolved": "? not resolved"}
PURPOSES = {"rate": "choice of rate", "final": "final table"}
FACTS = {"metric": "metric", "shape": "model", "text": "text", "machine": "machine"}


def write(results: dict, folder: Path) -> None:
    """Write report.md and report.html into the folder; whenever this is cut, each file is the old or the new one."""
    pages = {"report.md": markdown(results), "report.html": html(results)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pages.items():
        replace_text(folder / name, content)


def markdown(results: dict) -> str:
    """The report as Markdown."""
    return document.markdown(contents(results))


def html(results: dict) -> str:
    """The report as a page."""
    return document.html(contents(results))


def contents(results: dict) -> Document:
    """What the report says, in its order."""
    lead = [Text(sentence, "lead") for sentence in (loss_sentence(results), time_sentence(results))]
    missing = [Text("This part is not measured.", "muted")]
    made = {title: make(results) for title, make in SECTIONS.items()}
    sections = [Section(title, made[title] or missing) for title in made if made[title] or title not in RARE]
    return Document(f"Ablation: {results.get('name') or 'unnamed'}", lead, sections)


def loss_sentence(results: dict) -> str:
    """The loss of rms, or of the first arm where there is no rms, against its baseline's."""
    found = min(compared(results), key=lambda c: c.get("arm") != "rms", default=None)
    if found is None:
        return "The difference in validation loss is not measured."
    bits = found.get("bits_per_byte") or {}
    return (
        f"The difference in validation loss, {found.get('arm')} minus {found.get('baseline')}, is "
        f"{number(found['mean'], '+.4f')} nats per token (95% interval {interval(found.get('interval'), '+.4f')}) "
        f"and {number(bits.get('mean'), '+.4f')} bits per byte ({interval(bits.get('interval'), '+.4f')}), "
        f"over {whole(found.get('n'))} paired seeds: {verdict(found, bound_of(results))}."
    )


def time_sentence(results: dict) -> str:
    """The time of a step with rms against that with the baseline."""
    ratios = [
        f"{both(row, 'ratio', '.3f')} in {row.get('build')}" for row in timed(results) if row.get("part") == "step"
    ]
    if not ratios:
        return "The time of a training step is not measured."
    return f"Time of a training step with {TIMED[0]} over that with {TIMED[1]} (95% interval): {'; '.join(ratios)}."


def claims(results: dict) -> list[Block]:
    """Claims of texts on norms, beside what was measured."""
    columns = {
        "id": lambda c: c.get("id", NOTHING),
        "claim": lambda c: c.get("claim", NOTHING),
        "measured": lambda c: c.get("measured") or NOTHING,
        "verdict": lambda c: VERDICTS.get(c.get("verdict"), f"{NOTHING} {c.get('verdict') or 'not tested'}"),
    }
    rows = results.get("claims") or []
    return [table("What texts on norms claim, and what was measured here", rows, columns)] if rows else []


def origin(results: dict) -> list[Block]:
    """The command, the model, the text and the machine."""
    hours, bound = finite(results.get("hours")), bound_of(results)
    facts = {name: _fact(results[key]) for key, name in FACTS.items() if results.get(key)}
    facts |= {} if bound is None else {"bound": f"±{bound:g} nats per token, fixed before the runs"}
    facts |= {} if hours is None else {"time": f"{number(hours, '.2f')} hours"}
    blocks = [Code(str(results["command"]))] if results.get("command") else []
    columns = {"what": lambda name: name, "which": lambda name: facts[name]}
    return blocks + ([table("Where the numbers come from", list(facts), columns)] if facts else [])


def notes(results: dict) -> list[Block]:
    """What does not follow from the numbers."""
    return [Bullets([str(note) for note in results["notes"]])] if results.get("notes") else [Text("No notes.", "muted")]


def runs(results: dict) -> list[Block]:
    """Every run, also those that diverged."""
    columns = {
        "arm": lambda r: r.get("arm"),
        "for": lambda r: PURPOSES.get(r.get("purpose"), NOTHING),
        "seed": lambda r: number(r.get("seed"), ".0f"),
        "learning rate": lambda r: number(r.get("learning_rate"), "g"),
        "status": lambda r: r.get("status"),
        "nats per token": lambda r: number(r.get("validation_loss")),
        "bits per byte": lambda r: number(r.get("bits_per_byte")),
        "loss spikes": lambda r: whole(r.get("spikes")),
        "time": lambda r: seconds(r.get("seconds")),
    }
    rows = results.get("runs") or []
    return [table(f"All {len(rows)} runs, none left out", rows, columns, folded=True)] if rows else []


def _fact(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')}: {_fact(of)}" for key, of in value.items() if of not in (None, ""))
    if isinstance(value, float):
        return number(value, "g")
    return number(value, ",d") if finite(value) is not None else str(value)


SECTIONS: dict[str, Callable[[dict], list[Block]]] = {
    "Paired differences": report_comparisons.differences,
    "Arms": report_comparisons.arms,
    "Loss curves": report_curves.losses,
    "Learning rates": report_curves.valleys,
    "A LayerNorm model switched to RMSNorm": report_comparisons.switched,
    "Speed": report_comparisons.speed,
    "Inside the network": report_curves.inside,
    "A norm alone": report_comparisons.norm_alone,
    "Claims": claims,
    "How it was made": origin,
    "What not to conclude": notes,
    "Every run": runs,
}
RARE = ("A LayerNorm model switched to RMSNorm",)  # left out where it is empty, since most plans do not ask for it
