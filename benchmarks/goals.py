"""What a kernel must reach on a GPU, as data, and one rule that judges it.

Shares of the limit apply to every GPU: they are fractions of the copy rate, or of the matrix product rate, of the same
run. Microseconds of the device were set for an H200 and apply only there.
"""

from dataclasses import dataclass

OURS = "ours"


@dataclass(frozen=True)
class Goal:
    """A bound on one measurement: the minimum share of the limit, or the maximum of seconds, bytes, or a time ratio."""

    measure: str
    """A part (forward, backward or both), or host, peak_bytes or kept_bytes."""
    unit: str
    """share, seconds, bytes or ratio."""
    bound: float
    of: str = OURS
    """The baseline whose measurement it is."""
    over: str = ""
    """With the unit ratio: the baseline whose time is the denominator."""
    device: str = ""
    """Applies only to devices whose name contains this."""


def share_goals(forward: float | None, backward: float | None) -> list[Goal]:
    """Minimum shares of the copy rate, where they are set."""
    parts = ("forward", forward), ("backward", backward)
    return [Goal(part, "share", bound) for part, bound in parts if bound is not None]


def h200_goals(forward_us: float | None, backward_us: float | None = None) -> list[Goal]:
    """Maximum microseconds on an H200, where they are set."""
    parts = ("forward", forward_us), ("backward", backward_us)
    return [Goal(part, "seconds", us * 1e-6, device="H200") for part, us in parts if us is not None]


def judge(goal: Goal, found: dict[str, dict], device: str) -> tuple[str, str] | None:
    """PASS or FAIL and a sentence, or None where the goal was set for another device."""
    if goal.device not in device:
        return None
    one = found[goal.of]
    compared = [name for name in (goal.of, goal.over) if name]
    if missing := [name for name in compared if "not_run" in found[name]]:
        return "FAIL", f"{goal.measure}: {missing[0]} did not run"
    if goal.unit == "share":
        value = one["share_of_limit"][goal.measure]
        passed, text = value >= goal.bound, f"{value:.1%} of the limit, at least {goal.bound:.1%}"
    elif goal.unit == "ratio":
        value = one[goal.measure] / found[goal.over][goal.measure]
        passed, text = value <= goal.bound, f"{value:.3f} of the time of {goal.over}, at most {goal.bound:.3f}"
    elif one[goal.measure] is None:
        return None  # a CPU does not count it
    elif goal.unit == "seconds":
        value = one[goal.measure]
        passed, text = value <= goal.bound, f"{value * 1e6:,.1f} µs, at most {goal.bound * 1e6:,.1f}"
    else:
        value = one[goal.measure]
        passed, text = value <= goal.bound, f"{value / 1e6:,.1f} MB, at most {goal.bound / 1e6:,.1f}"
    subject = "" if goal.of == OURS else f"{goal.of}, "
    return "PASS" if passed else "FAIL", f"{subject}{goal.measure}: {text}"


def judge_all(goals: list[Goal], found: dict[str, dict], device: str) -> list[tuple[str, str]]:
    """Each goal that applies to the device, judged; a FAIL also if ours did not run or a baseline differs from it."""
    if "not_run" in found[OURS]:
        return [("FAIL", f"ours did not run: {found[OURS]['not_run']}")]
    differing = [name for name, one in found.items() if " differ by " in one.get("not_run", "")]
    wrong = [("FAIL", f"{name}: {found[name]['not_run']}") for name in differing]
    return wrong + [judged for goal in goals if (judged := judge(goal, found, device)) is not None]


def summary(judged: list[tuple[str, str]]) -> str:
    """PASS if every goal is reached, FAIL if one is not."""
    if not judged:
        return "no goal"
    return "FAIL" if any(verdict == "FAIL" for verdict, _ in judged) else "PASS"
