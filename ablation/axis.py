"""The axis of a chart: where a value lies between its ends, and its ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A scale with its label; `ticks` are placed where their labels do not touch."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        """Where the value lies: 0 at the low end, 1 at the high end, never beyond."""
        low, high, value = (
            math.log(v) if self.log else v for v in (self.low, self.high, min(max(value, self.low), self.high))
        )
        return (value - low) / (high - low)


def axis(label: str, values: Sequence[float], *, log: bool = False, ticks: Sequence[float] = ()) -> Axis:
    """An axis that holds all values, with some air at both ends, and round ticks unless they are given."""
    values = [v for v in values if v > 1e-99 or not log]
    low, high = (min(values), max(values)) if values else (1.0, 2.0)
    if log:
        air = max((high / low) ** 0.05, 1.02)
        low, high = low / air, high * air
    else:
        air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = low - air, high + air
    return Axis(label, low, high, log, tuple(ticks) or tuple(round_ticks(low, high, log)))


def tick(value: float) -> str:
    """A number on an axis."""
    return f"{value + 0.0:g}".replace("-", "−")


def round_ticks(low: float, high: float, log: bool = False) -> list[float]:
    """Numbers with few digits between two ends: about five, or about three in every power of ten."""
    if log and high / low > 20:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        each = (1, 2, 5) if high / low < 1e3 else (1,)
        return [m * 10.0**p for p in powers for m in each if low <= m * 10.0**p <= high]
    rough = (high - low) / (8 if log else 5)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
