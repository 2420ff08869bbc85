"""From the rows of single runs to arms, valleys and paired comparisons: all arithmetic is in `ablation.statistics`."""

from collections.abc import Sequence
from dataclasses import asdict

from ablation import statistics
from ablation.plan import Arm, Plan, arms_of, baseline_of
from model.config import num_norm_parameters, num_parameters


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
        rates = sorted(plan.learning_rates)
        if len(rates) < 2 or not rows:
            continue
        losses = []
        for rate in rates:
            values = [row["validation_loss"] for row in rows if row["learning_rate"] == rate]
            whole = len(values) == plan.rate_seeds and None not in values
            losses.append(sum(values) / len(values) if whole else None)
        best, at_edge = statistics.vertex(rates, [float("nan") if loss is None else loss for loss in losses])
        diverged = sum(row["status"] == "diverged" for row in rows)
        spikes = sum(row["spikes"] for row in rows)
        common = {"arm": arm.label, "rates": rates, "losses": losses, "best": best, "at_edge": at_edge}
        found.append(common | {"diverged": diverged, "spikes": spikes, "runs": len(rows)})
    return found


def finals(plan: Plan, runs: Sequence[dict], rates: dict[str, float]) -> dict[str, list[dict]]:
    """The final rows of each arm: of the plan's seeds, at the arm's chosen rate. Others are of an earlier plan."""
    return {
        arm.label: [
            row
            for row in rows_of(runs, arm, "final")
            if row["learning_rate"] == rates.get(arm.label) and row["seed"] <= plan.seeds
        ]
        for arm in arms_of(plan)
    }


def arms(plan: Plan, runs: Sequence[dict], rates: dict[str, float], configs: dict) -> list[dict]:
    """Mean and interval of each arm's final runs; no interval where one diverged."""
    found, of_arm = [], finals(plan, runs, rates)
    for arm in arms_of(plan):
        rows = of_arm[arm.label]
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
                **{key: value for key, value in asdict(arm).items() if key != "label"},
                "learning_rate": rows[0]["learning_rate"],
                "n": len(losses),
                "of": len(rows),
                "mean": mean if whole else None,
                "interval": [low, high] if whole and low is not None else None,
                "bits_per_byte": sum(bits) / len(bits) if whole and bits else None,
                "parameters": num_parameters(config),
                "norm_parameters": num_norm_parameters(config),
                "spikes": sum(row["spikes"] for row in rows),
            }
        )
    return found


def comparisons(plan: Plan, runs: Sequence[dict], rates: dict[str, float]) -> list[dict]:
    """Each arm's final runs less its baseline's, paired by seed, with Holm's correction over all of them."""
    found, every, of_arm = [], arms_of(plan), finals(plan, runs, rates)
    edges = {valley["arm"] for valley in valleys(plan, runs) if valley["at_edge"]}
    for arm in every:
        base = baseline_of(arm, every)
        if base is None:
            continue
        ours, theirs = ({row["seed"]: row for row in of_arm[a.label]} for a in (arm, base))
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
            "at_edge": arm.label in edges or base.label in edges,
            "verdict": statistics.verdict(result, p),
            "bits_per_byte": {"mean": bits.mean, "interval": list(bits.interval)},
        }
        for (arm, base, result, bits), p in zip(found, corrected, strict=True)
    ]
