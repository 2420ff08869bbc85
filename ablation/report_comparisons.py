"""Sections of the report that compare: arm with baseline, norm with norm, a run before and after its norm is switched.

Rows of results become tables, and intervals become forest plots; numbers are not worked out here, save for the means
of the switched runs. A section is an empty list where nothing was measured.
"""

from ablation import charts
from ablation.document import Block, Figures, Text, table
from ablation.wording import (
    both,
    bound_of,
    ended,
    finite,
    interval,
    is_interval,
    mebibytes,
    number,
    p_value,
    seconds,
    spread,
    verdict,
    whole,
)

TIMED = ("rms", "layer")  # the two norms whose speed is measured
ALONE = {  # the end of a name of `ablation.demonstrations`: words, format
    "change_by_scale": ("input 10 times as large: relative change of the output", ".1e"),
    "gradient_by_scale": ("weights before it 10 times as large: factor on their gradient", ".3f"),
    "cosine_with_input": ("cosine of output and input", ".6f"),
    "error_with_upcast": ("float16 rows of deviation 400: relative error with the float32 upcast", ".1e"),
    "rows_lost_without_upcast": ("float16 rows of deviation 400: share lost without the upcast", ".1%"),
}


def styles(results: dict) -> dict[str, int]:
    """Arms in the order of the table, numbered: an arm keeps its marker and its colour throughout."""
    parts = (results.get(key) or [] for key in ("arms", "comparisons", "valleys", "runs"))
    return {arm: i for i, arm in enumerate(dict.fromkeys(row.get("arm") for part in parts for row in part))}


def compared(results: dict) -> list[dict]:
    """The comparisons that have a difference."""
    return [c for c in results.get("comparisons") or [] if finite(c.get("mean")) is not None]


def timed(results: dict) -> list[dict]:
    """The timings that have a ratio."""
    return [row for row in results.get("speed") or [] if finite(row.get("ratio")) is not None]


def differences(results: dict) -> list[Block]:
    """Each arm's loss minus that of its baseline, over paired seeds."""
    found, bound = compared(results), bound_of(results)
    if not found:
        return []
    baselines = {str(c.get("baseline")) for c in found}
    baseline = next(iter(baselines)) if len(baselines) == 1 else "its baseline"
    columns = {
        "arm": lambda c: c.get("arm"),
        **({"baseline": lambda c: c.get("baseline")} if len(baselines) > 1 else {}),
        "pairs": lambda c: whole(c.get("n")),
        "mean and 95% interval": lambda c: both(c, "mean", "+.4f"),
        "verdict": lambda c: verdict(c, bound),
        "bits per byte": lambda c: both(c.get("bits_per_byte") or {}, "mean", "+.4f"),
        "90% interval": lambda c: interval(c.get("interval_90"), "+.4f"),
        "deviation": lambda c: number(c.get("standard_deviation")),
        "correlation": lambda c: number(c.get("correlation"), ".3f"),
        "p": lambda c: p_value(c.get("p_value")),
        "p (Holm)": lambda c: p_value(c.get("p_holm")),
        "resolvable": lambda c: number(c.get("resolvable")),
        "pairs needed": lambda c: whole(c.get("seeds_needed")),
    }
    reading = "Bar: 95% interval of the mean over paired seeds. An arrow points at an arm beyond the edge."
    if bound:
        reading += (
            f" Shaded: the bound of equivalence, ±{bound:g}."
            " Equivalent: the 90% interval lies within the bound (two one-sided tests at 5%)."
        )
    words = (
        "Deviation: standard deviation of a pair's difference, nats per token. Correlation: of the two arms over the "
        "seeds. Resolvable: the difference, nats per token, that as many pairs find four times in five; pairs needed: "
        "to resolve the bound so."
    )
    rest = [a for a in results.get("arms") or [] if a.get("arm") not in {c.get("arm") for c in found}]
    left = [f"{a.get('arm')} ({ended(a)} runs ended)" for a in rest if finite(a.get("n")) != finite(a.get("of"))]
    if left:
        words = f"Not compared, because runs diverged: {', '.join(left)}. {words}"
    style = styles(results)
    rows = [_row(c, c.get("arm"), style[c.get("arm")], "mean", "+.4f", verdict(c, bound)) for c in found]
    spoken = "; ".join(f"{row.name}: {row.numbers}, {row.verdict}" for row in rows)
    label = f"loss minus that of {baseline}, nats per token"
    chart = charts.forest("forest", "Paired differences in loss", spoken, rows, label, bound=bound)
    caption = f"Validation loss minus that of {baseline}, nats per token; below 0 the arm is better"
    return [Figures([(reading, chart)]), table(caption, found, columns), Text(words, "muted")]


def arms(results: dict) -> list[Block]:
    """Each arm by itself."""
    columns = {
        "arm": lambda a: a.get("arm"),
        "learning rate": lambda a: number(a.get("learning_rate"), "g"),
        "runs that ended": ended,
        "loss and 95% interval": lambda a: both(a, "mean", ".4f"),
        "bits per byte": lambda a: number(a.get("bits_per_byte")),
        "parameters": lambda a: whole(a.get("parameters")),
        "of these in norms": lambda a: whole(a.get("norm_parameters")),
    }
    rows = results.get("arms") or []
    words = "Where a run diverged there is no interval, and a mean, if there is one, is that of the others."
    return [table("Mean validation loss, nats per token", rows, columns), Text(words, "muted")] if rows else []


def switched(results: dict) -> list[Block]:
    """What a finished LayerNorm run loses by a switch of its norms, and what training wins back."""
    runs, changes = {}, {}
    for row in results.get("switched") or []:
        name, after, before = row.get("variant"), finite(row.get("validation_loss")), finite(row.get("before"))
        runs.setdefault(name, []).append(row)
        changes.setdefault(name, []).extend([] if after is None or before is None else [after - before])
    columns = {
        "variant": lambda name: name,
        "seeds": lambda name: ended({"n": len(changes[name]), "of": len(runs[name])}),
        "steps trained": lambda name: spread((row.get("steps") for row in runs[name]), ",.0f"),
        "mean": lambda name: number(sum(changes[name]) / len(changes[name]) if changes[name] else None, "+.4f"),
        "least to greatest seed": lambda name: spread(changes[name], "+.4f"),
    }
    words = (
        "At once: the norms are replaced and nothing is trained. Norms trained: then the gains of the norms are. All "
        "trained: then every weight is. Layer: the control, which keeps LayerNorm and trains for as long. The mean is "
        "over the seeds that did not diverge."
    )
    caption = "Validation loss after the switch minus that before, nats per token; below 0 it is better than before"
    return [table(caption, list(runs), columns), Text(words, "muted")] if runs else []


def speed(results: dict) -> list[Block]:
    """Time of one norm over that of the other, and what norms take of a step."""
    rows, blocks = timed(results), []
    if rows:
        caption = f"Time with {TIMED[0]} over time with {TIMED[1]}; below 1 {TIMED[0]} is faster"
        columns = {
            "part": lambda t: t.get("part"),
            "build": lambda t: t.get("build"),
            **{name: lambda t, name=name: seconds(t.get(name)) for name in TIMED},
            "ratio and 95% interval": lambda t: both(t, "ratio", ".3f"),
            "blocks": lambda t: whole(t.get("n")),
        }
        builds = list(dict.fromkeys(t.get("build") for t in rows))
        bars = [_row(t, t.get("part"), builds.index(t.get("build")), "ratio", ".3f", t.get("build")) for t in rows]
        spoken = "; ".join(f"{bar.name}, {bar.verdict}: {bar.numbers}" for bar in bars)
        chart = charts.forest("speed", "Ratios of times", spoken, bars, "ratio of times", centre=1.0)
        words = f"{caption}. Bar: 95% interval over interleaved blocks. Markers: one for each build."
        blocks += [Figures([(words, chart)]), table(caption, rows, columns)]
    share, memory = results.get("norm_share") or {}, results.get("memory") or {}
    norms = list(dict.fromkeys([*share, *memory]))
    if norms:
        columns = {
            "arm": lambda norm: norm,
            "share of a step": lambda norm: number(share.get(norm), ".1%"),
            "peak memory": lambda norm: mebibytes(memory.get(norm)),
        }
        caption = "What the norms take: share of a step's time, and peak memory of a step"
        blocks.append(table(caption, norms, columns))
    return blocks


def norm_alone(results: dict) -> list[Block]:
    """What a norm does to random rows, outside any network."""
    found = results.get("demonstrations") or {}
    found = {name.replace("float16_", "rms_"): value for name, value in found.items()}  # of rms, though not in its name
    norms = list(dict.fromkeys(name.partition("_")[0] for name in found))
    rows = [what for what in ALONE if any(f"{norm}_{what}" in found for norm in norms)]
    columns = {
        "what": lambda what: ALONE[what][0],
        **{n: lambda what, n=n: number(found.get(f"{n}_{what}"), ALONE[what][1]) for n in norms},
    }
    words = "Invariant to scale: a change of 0. Same direction: a cosine of 1. Lost: wrong by more than a tenth."
    return [table("On random rows, without a run", rows, columns), Text(words, "muted")] if rows else []


def _row(found: dict, name: object, style: int, key: str, form: str, beside: object) -> charts.Row:
    ends = tuple(found["interval"]) if is_interval(found.get("interval")) else None
    return charts.Row(str(name), style, found[key], ends, both(found, key, form), str(beside))
