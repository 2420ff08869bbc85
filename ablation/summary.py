"""From the rows of single runs to arms, valleys and paired comparisons: all arithmetic is in `ablation.statistics`."""

from collections.abc import Sequence
from dataclasses import asdict

from ablation import statistics
from ablation.plan import Arm, Plan, arms_of, baseline_of
from model.config import num_parameters


def rows_of(runs: Sequence[dict], arm: Arm, purpose: str) -> list[dict]:
    """The rows of an arm, in order of their seeds."""
    found = [row for row in runs if row["arm"] == arm.label and row["purpose"] == purpose]
    return sorted(found, key=lambda row: (row["learning_rate"], row["seed"]))


def chosen_rates(plan: Plan, runs: Sequence[dict], default: float) -> dict[str, float]:
    """Each arm's rate: the lowest mean loss of its valley; arms that diverged everywhere are left out."""
    if len(plan.learning_rates) < 2:
        return {arm.label: (plan.learning_rates or (default,))[0] for arm in arms_of(plan)}
    return {valley["arm"]: valley["best"] for valley in valleys(plan, runs) if valley["best"] is not None}


def valleys(plan: Plan, runs: Sequence[dict]) -> list[dict]:
    """Mean loss of each arm at each rate, None where one of its runs diverged or is still to come."""
    found = []
    for arm in arms_of(plan):
        rows = rows_of(runs, arm, "rate")
        rates = sorted({row["learning_rate"] for row in rows})
        if len(rates) < 2:
            continue
        losses = []
        for rate in rates:
            values = [row["validation_loss"] for row in rows if row["learning_rate"] == rate]
            losses.append(None if None in values else sum(values) / len(values))
        best, at_edge = statistics.vertex(rates, [float("nan") if loss is None else loss for loss in losses])
        diverged = sum(row["status"] == "diverged" for row in rows)
        spikes = sum(row["spikes"] for row in rows)
        common = {"arm": arm.label, "rates": rates, "losses": losses, "best": best, "at_edge": at_edge}
        found.append(common | {"diverged": diverged, "spikes": spikes, "runs": len(rows)})
    return found


def arms(plan: Plan, runs: Sequence[dict], configs: dict) -> list[dict]:
    """Mean and interval of each arm's final runs; no interval where one diverged."""
    found = []
    for arm in arms_of(plan):
        rows = rows_of(runs, arm, "final")
        if not rows:
            continue
        losses = [row["validation_loss"] for row in rows if row["status"] == "done"]
        whole = len(losses) == len(rows)
        mean, low, high = statistics.mean_interval(losses) if losses else (None, None, None)
        bits = [row["bits_per_byte"] for row in rows if row["status"] == "done"]
        config = configs[arm.label]
        found.append(
            {
                "arm": arm.label,
                "learning_rate": rows[0]["learning_rate"],
                "n": len(losses),
                "of": len(rows),
                "mean": mean if whole else None,
                "interval": [low, high] if whole and low is not None else None,
                "bits_per_byte": sum(bits) / len(bits) if whole and bits else None,
                "parameters": num_parameters(config),
                "norm_parameters": config.num_norms * config.hidden_size * len(config.norm_parameters),
                "spikes": sum(row["spikes"] for row in rows),
            }
        )
    return found


def comparisons(plan: Plan, runs: Sequence[dict]) -> list[dict]:
    """Each arm's final runs less its baseline's, paired by seed, with Holm's correction over all of them."""
    found, every = [], arms_of(plan)
    for arm in every:
        base = baseline_of(arm, every)
        if base is None:
            continue
        ours, theirs = ({row["seed"]: row for row in rows_of(runs, a, "final")} for a in (arm, base))
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if len(pairs) < 2 or any(row["status"] == "diverged" for pair in pairs for row in pair):
            continue
        result = statistics.paired(
            *([row["validation_loss"] for row in side] for side in zip(*pairs, strict=True)), plan.bound
        )
        bits = statistics.paired(
            *([row["bits_per_byte"] for row in side] for side in zip(*pairs, strict=True)), plan.bound
        )
        found.append((arm, base, result, bits))
    corrected = statistics.holm([result.p_value for _, _, result, _ in found])
    return [
        {
            "arm": arm.label,
            "baseline": base.label,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(result).items()},
            "p_holm": p,
            "verdict": statistics.verdict(result, p),
            "bits_per_byte": {"mean": bits.mean, "interval": list(bits.interval)},
        }
        for (arm, base, result, bits), p in zip(found, corrected, strict=True)
    ]
