"""How figures are written: durations, sizes, shares, intervals. What is unknown never gets here: it is shown as –."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.experiments.estimates import Interval

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
"""The latencies of a summary, and their names."""


def milliseconds(value: float) -> str:
    """Seconds as a number of milliseconds."""
    return f"{1000 * value:,.0f}" if value >= 0.1 else f"{1000 * value:.3g}"


def seconds(value: float | None) -> str:
    """Seconds with three digits and the unit that suits them."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def whole(value: float) -> str:
    """A number without decimals."""
    return f"{value:,.0f}"


def number(value: float) -> str:
    """A number with three significant digits, and no decimals where it is whole or large."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value:.1%}"


def error(value: float) -> str:
    """A relative error, with its sign."""
    return f"{value:+.1%}"


def size(value: float) -> str:
    """Bytes in decimal units (1 kB is 1000 bytes)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value} B"


def setting(value: Any) -> str:
    """The value of a setting, a number without zeros at its end."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def half_width(scale: float = 1.0, unit: str = "") -> Callable[[Interval], str]:
    """Writes an estimate with half of its interval; ``scale`` multiplies both."""
    from kvsim.experiments.interval_text import plus_minus

    return lambda interval: plus_minus(interval, scale, unit)


def interval_of(ends: Mapping[str, Any] | None, measure: str = "") -> Interval | None:
    """The interval of an object, or of a measure in a row: its ``value``, ``low`` and ``high``; None without a value.

    Where an end is None both are infinite.
    """
    from kvsim.experiments.estimates import Interval

    names = [f"{measure}{end}" for end in ("", "_low", "_high")] if measure else ["value", "low", "high"]
    value, low, high = ((ends or {}).get(name) for name in names)
    if value is None or value != value:
        return None
    return Interval(value, -inf, inf) if low is None or high is None else Interval(value, low, high)
