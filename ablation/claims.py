"""The claims of texts on RMSNorm, each with what was measured and a verdict: holds, does not hold, not resolved, or not
tested. `python -m ablation.claims DIR/results.json ...` prints one table from several comparisons.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from errors import UserError, sentences

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
    """C1: of the step of each build, LayerNorm's time over RMSNorm's."""
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
        return (
            None
            if diverged is None
            else (f"center diverged in {diverged['of'] - diverged['n']} of {diverged['of']}", HOLDS)
        )
    far = 10 * results["bound"]
    verdict = HOLDS if found["interval"][0] > far else NOT if found["interval"][1] < far else OPEN
    return f"{difference(found)}; far: more than {far:g}", verdict


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
    return f"mean over deviation behind the first half: {words}; near: below 0.1", HOLDS if max(
        means.values()
    ) < 0.1 else NOT


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


def precision_claim(results: dict) -> Answer:
    """C6: what half precision costs each norm, beside float32."""
    arms = {a["arm"]: a for a in results.get("arms", []) if a["mean"] is not None}
    costs = {}
    for label, arm in arms.items():
        parts = label.split(", ")
        if len(parts) > 1 and parts[1] in ("bfloat16", "float16"):
            full = arms.get(", ".join([parts[0], "float32", *parts[2:]]))
            if full is not None:
                costs.setdefault(parts[1], {}).setdefault(parts[0], []).append(arm["mean"] - full["mean"])
    if not costs:
        return None
    words, gaps = [], []
    for dtype, by_norm in costs.items():
        means = {norm: sum(values) / len(values) for norm, values in by_norm.items()}
        words += [f"{dtype} costs {norm} {mean:+.4f} nats" for norm, mean in means.items()]
        if {"rms", "layer"} <= means.keys():
            gaps.append(means["layer"] - means["rms"])
    verdict = OPEN if not gaps else HOLDS if min(gaps) > results["bound"] else NOT
    return "; ".join(words), verdict


def eps_claim(results: dict) -> Answer:
    """C11: the spread over eps at float32."""
    groups = {}
    for arm in results.get("arms", []):
        label, _, eps = arm["arm"].rpartition(", eps ")
        if label and arm["mean"] is not None and "16" not in label:
            groups.setdefault(label, []).append((eps, arm["mean"]))
    spreads = {label: max(m for _, m in v) - min(m for _, m in v) for label, v in groups.items() if len(v) > 1}
    if not spreads:
        return None
    words = "; ".join(f"{label}: losses within {spread:.4f} nats" for label, spread in spreads.items())
    return words, HOLDS if max(spreads.values()) < results["bound"] else OPEN


def position_claim(results: dict) -> Answer:
    """C10: the spread of the valley over its rates, and runs that diverged or spiked."""
    by_position = {}
    for valley in results.get("valleys", []):
        position = next((p for p in ("pre", "post") if p in valley["arm"].split(", ")), None)
        if position:
            by_position.setdefault(position, []).append(valley)
    if by_position.keys() != {"pre", "post"}:
        return None
    words, width, troubles = [], {}, {}
    for position, found in by_position.items():
        losses = [[loss for loss in v["losses"] if loss is not None] for v in found]
        width[position] = max(max(values) - min(values) for values in losses if values)
        troubles[position] = sum(v["diverged"] + v["spikes"] for v in found)
        runs = sum(v["runs"] for v in found)
        words.append(
            f"{position}: losses over the rates within {width[position]:.3f} nats, "
            f"{troubles[position]} spikes or divergences in {runs} runs"
        )
    steadier = width["pre"] < width["post"] and troubles["pre"] <= troubles["post"]
    unsteadier = width["pre"] > width["post"] and troubles["pre"] >= troubles["post"]
    return "; ".join(words), HOLDS if steadier else NOT if unsteadier else OPEN


def gate_claim(results: dict) -> Answer:
    """C12: every other gate above SwiGLU, every plain MLP above every gate."""
    found = {c["arm"]: c for c in results.get("comparisons", []) if c["baseline"].startswith("swiglu")}
    if not found:
        return None
    means = {"swiglu": 0.0} | {arm: c["mean"] for arm, c in found.items()}
    words = ", ".join(f"{arm} {c['mean']:+.4f} ({c['verdict']})" for arm, c in found.items())
    gated = [means[arm] for arm in means if arm not in ("relu", "gelu")]
    plain = [means[arm] for arm in means if arm in ("relu", "gelu")]
    best = all(c["interval"][0] > 0 for arm, c in found.items() if arm not in ("relu", "gelu"))
    beaten = bool(plain) and max(gated) < min(plain)
    verdict = (
        HOLDS
        if best and beaten
        else NOT
        if any(c["interval"][1] < 0 for c in found.values()) or (plain and not beaten)
        else OPEN
    )
    return f"minus swiglu, nats: {words}", verdict


def batch_claim(results: dict) -> Answer:
    """C13: the loss in evaluation, where a token sees no statistics of tokens after it."""
    found = comparison(results, "batch", "layer")
    if found is None:
        arm = next((a for a in results.get("arms", []) if a["arm"] == "batch" and a["n"] < a["of"]), None)
        return None if arm is None else (f"diverged in {arm['of'] - arm['n']} of {arm['of']} runs", HOLDS)
    words = f"{difference(found)}; in training its outputs depend on later tokens, which a test shows"
    return words, HOLDS if found["interval"][0] > 0 else OPEN


def switch_claim(results: dict) -> Answer:
    """C14: what the switch costs, and what is left of it after training."""
    rows = [row for row in results.get("switched", []) if row["validation_loss"] is not None]
    if not rows:
        return None
    costs = {}
    for row in rows:
        costs.setdefault(row["variant"], []).append(row["validation_loss"] - row["before"])
    words = "; ".join(f"{variant} {sum(c) / len(c):+.4f} nats ({len(c)} seeds)" for variant, c in costs.items())
    at_once = sum(costs["rms at once"]) / len(costs["rms at once"]) if "rms at once" in costs else None
    verdict = OPEN if at_once is None else HOLDS if at_once > results["bound"] else NOT
    return words, verdict


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
    tables = [{row["id"]: row for row in claims(json.loads(Path(a).read_text(encoding="utf-8")))} for a in arguments]
    print("| | claim | measured | verdict |\n|---|---|---|---|")
    for number in CLAIMS:
        row = next((t[number] for t in tables if t[number]["verdict"] != "not tested"), tables[0][number])
        print(f"| {number} | {row['claim']} | {row['measured']} | {row['verdict']} |")


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
