"""Numbers of a report in words: each with its unit, its sign and its digits, and a dash where it is missing."""

import math
import re
from collections.abc import Iterable

NOTHING = "–"  # in a table, where a number is missing


def finite(value: object) -> float | None:
    """The value if it is a number that a measurement can give: finite, and so is its ratio to another."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e99  # false for NaN too
    return value if known else None


def number(value: object, form: str = ".4f") -> str:
    """A number by its format, or a dash; a zero has no sign, and a loss in the millions no row of digits."""
    if finite(value) is None:
        return NOTHING
    text = format(value, form.replace("f", "e") if abs(value) >= 1e6 and form in (".4f", "+.4f", ".3f") else form)
    if not re.search("[1-9]", text.partition("e")[0]):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def is_interval(value: object) -> bool:
    """Whether this is two numbers."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(finite(v) is not None for v in value)


def interval(value: object, form: str = ".4f") -> str:
    """An interval in brackets."""
    return f"[{number(value[0], form)}, {number(value[1], form)}]" if is_interval(value) else "no interval"


def both(found: dict, key: str, form: str) -> str:
    """An estimate and its interval."""
    return f"{number(found.get(key), form)} {interval(found.get('interval'), form)}"


def spread(values: Iterable[object], form: str = ".3g") -> str:
    """The least and the greatest of some seeds."""
    known = [v for v in values if finite(v) is not None]
    if not known:
        return NOTHING
    low, high = number(min(known), form), number(max(known), form)
    return low if low == high else f"{low} to {high}"


def whole(value: object) -> str:
    """A count, with commas."""
    return number(value, ",.0f")


def seconds(value: object) -> str:
    """A time in the unit that leaves one to three digits before the point."""
    if finite(value) is None:
        return NOTHING
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if abs(value) >= s or u == "µs")
    digits = 3 - min(3, math.floor(math.log10(max(abs(value) / scale, 1))))
    return f"{number(value / scale, f'.{digits}f')} {unit}"


def mebibytes(value: object) -> str:
    """A memory size in MiB."""
    return NOTHING if finite(value) is None else f"{value / 2**20:,.1f} MiB"


def p_value(value: object) -> str:
    """A probability; below a thousandth its digits say nothing."""
    return "< 0.001" if finite(value) is not None and value < 0.001 else number(value, ".3f")


def ended(arm: dict) -> str:
    """How many of an arm's runs came to their end."""
    return f"{whole(arm.get('n'))} of {whole(arm.get('of'))}"


def bound_of(results: dict) -> float | None:
    """The bound of equivalence, if there is one."""
    bound = finite(results.get("bound"))
    return bound if bound and bound > 0 else None


def verdict(comparison: dict, bound: float | None) -> str:
    """What a comparison came to, with what it was compared to."""
    words = str(comparison.get("verdict") or "no verdict")
    if words in ("lower", "higher"):
        return f"{words} than {comparison.get('baseline')}"
    return f"{words} within ±{bound:g} nats per token" if words.endswith("equivalent") and bound else words
