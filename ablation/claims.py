"""The claims of texts on RMSNorm, each with what was measured and a verdict: holds, does not hold, not resolved, or not
tested. `python -m ablation.claims DIR/results.json ...` prints one table from several comparisons.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from ablation import statistics
from errors import UserError, exit_on_user_error

CLAIMS = {
    "C1": "RMSNorm trains 7 to 15% faster than LayerNorm end to end",
    "C2": "RMSNorm and LayerNorm reach the same loss",
    "C3": "Re-scaling is what matters: re-centering alone is far worse",
    "C4": "In deep networks the mean of the activations is near 0, so RMS is nearly the standard deviation",
    "C5": "RMSNorm needs half the parameters and measurably less memory",
    "C6": "RMSNorm is numerically more robust in float16 and bfloat16",
    "C7": "Without the float32 upcast the squares overflow in float16",
    "C8": "Output is invariant to the scale of the input, and the gradient to the scale of the weights",
    "C9": "RMSNorm keeps the direction of x (before the gain); LayerNorm does not",
    "C10": "Pre-norm trains more stably than post-norm",
    "C11": "The choice of eps between 1e-5 and 1e-8 does not matter in float32",
    "C12": "Among gated MLPs SwiGLU is best, and any gate beats the plain MLP",
    "C13": "BatchNorm does not suit a decoder",
    "C14": "A model trained with LayerNorm cannot simply be switched to RMSNorm afterwards",
}
HOLDS, NOT, OPEN = "holds", "does not hold", "not resolved"
Answer = tuple[str, str] | None


def difference(found: dict) -> str:
    """A paired difference in words."""
    low, high = found["interval"]
    names = f"{found['arm']} minus {found['baseline']}"
    return f"{names} {found['mean']:+.4f} nats [{low:+.4f}, {high:+.4f}], {found['verdict']}"


def comparison(results: dict, arm: str, baseline: str | None = None) -> dict | None:
    """A comparison by its labels."""
    return next(
        (c for c in results.get("comparisons", []) if c["arm"] == arm and baseline in (None, c["baseline"])), None
    )


def speed_claim(results: dict) -> Answer:
    """C1: RMSNorm's time of a step over LayerNorm's, in each build; the verdict is that of the last, our own."""
    steps = [row for row in results.get("speed", []) if row["part"] == "step"]
    if not steps:
        return None
    parts = [
        f"{r['build']}: rms takes {r['ratio']:.3f} [{r['interval'][0]:.3f}, {r['interval'][1]:.3f}] of layer's step"
        for r in steps
    ]
    ours = steps[-1]
    low, high = ours["interval"]
    verdict = HOLDS if high <= 1 / 1.07 else NOT if low > 1 / 1.07 else OPEN
    return "; ".join(parts), verdict


def loss_claim(results: dict) -> Answer:
    """C2."""
    found = comparison(results, "rms", "layer")
    if found is None:
        return None
    same = found["verdict"] in ("equivalent", "different, yet equivalent")
    return difference(found), HOLDS if same else OPEN if found["verdict"].startswith("not resolved") else NOT


def centering_claim(results: dict) -> Answer:
    """C3: far worse is more than ten bounds."""
    found = comparison(results, "center", "layer")
    if found is None:
        diverged = next((a for a in results.get("arms", []) if a["arm"] == "center" and a["n"] < a["of"]), None)
        return diverged and (f"center diverged in {diverged['of'] - diverged['n']} of {diverged['of']} runs", HOLDS)
    far = 10 * results["bound"]
    low, high = found["interval"]
    verdict = HOLDS if low > far and found["verdict"] == "higher" else NOT if high < far else OPEN
    return f"{difference(found)}; far: more than {far:g}{edge(found)}", OPEN if edge(found) else verdict


def edge(found: dict) -> str:
    """A warning where a rate was not chosen inside its valley."""
    return "; its best rate is the largest or smallest that was tried" if found.get("at_edge") else ""


def mean_claim(results: dict) -> Answer:
    """C4: near 0 is below a tenth of the deviation, at the norms behind the first half of the network."""
    rows = [
        r
        for r in results.get("runs", [])
        if r["purpose"] == "final" and r["arm"] in ("rms", "layer") and r.get("probes", {}).get("mean_over_deviation")
    ]
    if not rows:
        return None
    deep = {}
    for row in rows:
        values = row["probes"]["mean_over_deviation"]
        deep.setdefault(row["arm"], []).append(sum(values[len(values) // 2 :]) / len(values[len(values) // 2 :]))
    means = {arm: sum(values) / len(values) for arm, values in deep.items()}
    words = ", ".join(f"{arm} {value:.3f}" for arm, value in means.items())
    verdict = HOLDS if max(means.values()) < 0.1 else NOT
    return f"mean over deviation behind the first half: {words}; near: below 0.1", verdict


def size_claim(results: dict) -> Answer:
    """C5: parameters are arithmetic; memory was measured only where a device counts it."""
    arms = {a["arm"]: a for a in results.get("arms", [])}
    if not {"rms", "layer"} <= arms.keys():
        return None
    rms, layer = arms["rms"], arms["layer"]
    norms = f"{rms['norm_parameters']:,} against {layer['norm_parameters']:,} parameters of norms"
    words = f"{norms}, of {layer['parameters']:,} in all"
    memory = results.get("memory") or {}
    if None in memory.values() or not memory:
        return f"{words}; memory not measured on this device", OPEN
    saved = 1 - memory["rms"] / memory["layer"]
    return f"{words}; peak memory of a step lower by {saved:.2%}", HOLDS if saved > 0.01 else NOT


def losses(results: dict, purpose: str = "final") -> dict[tuple, float | None]:
    """Validation loss by (norm, position, gate and start, dtype, eps, learning rate, seed); None: diverged."""
    fields = {
        a["arm"]: (a["norm"], a["position"], (a["gate"], a.get("initialization")), a["dtype"], a["eps"])
        for a in results.get("arms", [])
    }
    return {
        (*fields[row["arm"]], row["learning_rate"], row["seed"]): row["validation_loss"]
        for row in results.get("runs", [])
        if row["purpose"] == purpose and row["arm"] in fields
    }


def shown(found: statistics.Paired) -> str:
    """A mean with its interval."""
    return f"{found.mean:+.4f} nats [{found.interval[0]:+.4f}, {found.interval[1]:+.4f}], {found.n} pairs"


def precision_claim(results: dict) -> Answer:
    """C6: what half precision costs LayerNorm, less what it costs RMSNorm, paired over eps and seeds."""
    by_run = losses(results)
    words, verdicts = [], []
    for half in ("float16", "bfloat16"):
        costs = {"rms": {}, "layer": {}}
        for (norm, position, gate, dtype, eps, rate, seed), loss in by_run.items():
            full = by_run.get((norm, position, gate, "float32", eps, rate, seed))
            if dtype == half and norm in costs and None not in (loss, full):
                costs[norm][position, gate, eps, seed] = loss - full
        both = sorted(costs["rms"].keys() & costs["layer"].keys())
        if len(both) < 2:
            continue
        found = statistics.paired(*([costs[n][key] for key in both] for n in ("layer", "rms")), results["bound"])
        words.append(f"{half} costs layer more than rms by {shown(found)}")
        same = found.p_equivalence < statistics.SIGNIFICANCE
        verdicts.append(NOT if same or found.interval[1] < 0 else HOLDS if found.interval[0] > 0 else OPEN)
    if not words:
        return None
    return "; ".join(words), verdicts[0] if len(set(verdicts)) == 1 else OPEN


def eps_claim(results: dict) -> Answer:
    """C11: each eps less 1e-5 in float32, paired over norms and seeds."""
    by_run = {key: loss for key, loss in losses(results).items() if key[3] == "float32"}
    words, verdicts = [], []
    for eps in sorted({key[4] for key in by_run} - {1e-5}):
        pairs = [
            (loss, by_run[(*key[:4], 1e-5, *key[5:])])
            for key, loss in by_run.items()
            if key[4] == eps and (*key[:4], 1e-5, *key[5:]) in by_run
        ]
        if len(pairs) < 2 or any(None in pair for pair in pairs):
            continue
        found = statistics.paired(*zip(*pairs, strict=True), results["bound"])
        words.append(f"eps {eps:g} less 1e-05: {shown(found)}")
        same = found.p_equivalence < statistics.SIGNIFICANCE
        verdicts.append(HOLDS if same else NOT if found.p_value < statistics.SIGNIFICANCE else OPEN)
    if not words:
        return None
    return "; ".join(words), NOT if NOT in verdicts else OPEN if OPEN in verdicts else HOLDS


def position_claim(results: dict) -> Answer:
    """C10: over the rates, how far the loss varies, and how far it rises from its lowest to that of the highest rate.

    Paired over norms and seeds; it holds where both say so.
    """
    valleys, diverged = {}, {"pre": 0, "post": 0}
    for (norm, position, *_, rate, seed), loss in losses(results, "rate").items():
        if position in diverged:
            diverged[position] += loss is None
            valleys.setdefault((position, norm, seed), []).append((rate, loss))
    width, rise = {"pre": {}, "post": {}}, {"pre": {}, "post": {}}
    for (position, *key), points in valleys.items():
        found = [loss for _, loss in sorted(points) if loss is not None]
        if len(found) > 1:
            width[position][*key] = max(found) - min(found)
            rise[position][*key] = found[-1] - min(found)
    both = sorted(width["pre"].keys() & width["post"].keys())
    if len(both) < 2:
        return None
    compared = [
        statistics.paired(*([measure[p][key] for key in both] for p in ("post", "pre")), results["bound"])
        for measure in (width, rise)
    ]
    words = f"post less pre: variation over the rates {shown(compared[0])}, rise to the highest {shown(compared[1])}; "
    words += f"{diverged['post']} and {diverged['pre']} runs diverged"
    if all(c.interval[0] > 0 for c in compared) and diverged["post"] >= diverged["pre"]:
        return words, HOLDS
    return words, NOT if all(c.interval[1] < 0 for c in compared) and diverged["post"] <= diverged["pre"] else OPEN


def gate_claim(results: dict) -> Answer:
    """C12: SwiGLU below every other gate, and every gate below every plain MLP, by intervals that do not overlap."""
    found = {c["arm"]: c for c in results.get("comparisons", []) if c["baseline"].startswith("swiglu")}
    if not found:
        return None
    words = ", ".join(f"{arm} {c['mean']:+.4f} ({c['verdict']})" for arm, c in found.items())
    gates = [c for arm, c in found.items() if arm not in ("relu", "gelu")]
    plain = [c for arm, c in found.items() if arm in ("relu", "gelu")]
    best = all(c["verdict"] == "higher" for c in gates)
    highest = max([0.0, *(c["interval"][1] for c in gates)])
    beaten = bool(plain) and highest < min(c["interval"][0] for c in plain)
    reversed_ = any(g["interval"][0] > p["interval"][1] for g in gates for p in plain)
    wrong = reversed_ or any(c["verdict"] == "lower" for c in found.values())
    return f"minus swiglu, nats: {words}", NOT if wrong else HOLDS if best and beaten else OPEN


def batch_claim(results: dict) -> Answer:
    """C13: the loss in evaluation, where a token sees no statistics of tokens after it."""
    found = comparison(results, "batch", "layer")
    if found is None:
        arm = next((a for a in results.get("arms", []) if a["arm"] == "batch" and a["n"] < a["of"]), None)
        return arm and (f"diverged in {arm['of'] - arm['n']} of {arm['of']} runs", HOLDS)
    words = f"{difference(found)}; in training its outputs depend on later tokens, which a test shows{edge(found)}"
    return words, HOLDS if found["verdict"] == "higher" and not edge(found) else OPEN


def switch_claim(results: dict) -> Answer:
    """C14: what the switch costs at once, by the interval over seeds, and what is left of it after training."""
    costs: dict[str, list[float]] = {}
    for row in results.get("switched", []):
        if row["validation_loss"] is not None:
            costs.setdefault(row["variant"], []).append(row["validation_loss"] - row["before"])
    if not costs:
        return None
    means = {variant: statistics.mean_interval(values) for variant, values in costs.items()}
    words = []
    for variant, (mean, low, high) in means.items():
        interval = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
        words.append(f"{variant} {mean:+.4f} nats{interval}, {len(costs[variant])} seeds")
    _, low, high = means.get("rms at once", (None, None, None))
    bound = results["bound"]
    verdict = OPEN if low is None else HOLDS if low > bound else NOT if high < bound else OPEN
    return "; ".join(words), verdict


def demonstrated(results: dict, number: str) -> Answer:
    """C7, C8 and C9, from `ablation.demonstrations`."""
    d = results.get("demonstrations")
    if not d:
        return None
    if number == "C7":
        lost = d["float16_rows_lost_without_upcast"]
        error = d["float16_error_with_upcast"]
        words = f"rows of deviation 400: {lost:.0%} lost without the upcast; with it an error of {error:.1e}"
        return words, HOLDS if lost > 0.99 else NOT
    if number == "C8":
        words = ", ".join(
            f"{kind}: input x 10 changes the output by {d[f'{kind}_change_by_scale']:.1e}, weights x 10 scale their "
            f"gradient by {d[f'{kind}_gradient_by_scale']:.3f}"
            for kind in ("rms", "layer")
        )
        return (
            f"{words}: output invariant, gradient inversely proportional rather than invariant",
            "holds for the output alone",
        )
    cosines = d["rms_cosine_with_input"], d["layer_cosine_with_input"]
    words = "cosine of input and output: rms {:.6f}, layer {:.4f} (rows of mean 0.3, deviation 1)".format(*cosines)
    return words, HOLDS if cosines[0] > 0.999999 > cosines[1] else NOT


TESTS: dict[str, Callable[[dict], Answer]] = {
    "C1": speed_claim,
    "C2": loss_claim,
    "C3": centering_claim,
    "C4": mean_claim,
    "C5": size_claim,
    "C6": precision_claim,
    "C7": lambda results: demonstrated(results, "C7"),
    "C8": lambda results: demonstrated(results, "C8"),
    "C9": lambda results: demonstrated(results, "C9"),
    "C10": position_claim,
    "C11": eps_claim,
    "C12": gate_claim,
    "C13": batch_claim,
    "C14": switch_claim,
}


def claims(results: dict) -> list[dict]:
    """Every claim with its answer from these results."""
    rows = []
    for number, claim in CLAIMS.items():
        measured, verdict = TESTS[number](results) or ("", "not tested")
        rows.append({"id": number, "claim": claim, "measured": measured, "verdict": verdict})
    return rows


def main(arguments: list[str]) -> None:
    """Print one table from several results: for each claim the first that tested it."""
    if not arguments:
        raise UserError("python -m ablation.claims needs the results.json of one comparison or more.")
    tables = []
    for argument in arguments:
        try:
            results = json.loads(Path(argument).read_text(encoding="utf-8"))
            tables.append({row["id"]: row for row in claims(results)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{argument} is no results.json of this version ({error!r}).") from None
    print("| | claim | measured | verdict |\n|---|---|---|---|")
    for number in CLAIMS:
        row = next((t[number] for t in tables if t[number]["verdict"] != "not tested"), tables[0][number])
        print(f"| {number} | {row['claim']} | {row['measured']} | {row['verdict']} |")


if __name__ == "__main__":
    with exit_on_user_error():
        main(sys.argv[1:])
