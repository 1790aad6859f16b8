"""Estimates and their intervals as text, with no more digits than the interval supports."""

from __future__ import annotations

import math

from kvsim.experiments.estimates import Interval

_LOPSIDED = 1.2
"""Ratio of the two sides of an interval above which both ends are written."""


def plus_minus(interval: Interval, scale: float = 1.0, unit: str = "", least: float | None = 0.0) -> str:
    """Write an estimate with its interval: ``1,230 ±160``, or ``5 (0 to 17)`` where one side is cut off.

    The last digit is that of the half width's second significant digit. ``scale`` multiplies all values; ``unit``
    follows the estimate. No end is written below ``least``; None for quantities that can be negative. An estimate
    without an interval has four digits.
    """
    value, low, high = _ends(interval, scale, least)
    down, up = value - low, high - value
    cut_off = low == least and up > 0
    if not 0 < down + up < math.inf or cut_off or max(down, up) > _LOPSIDED * min(down, up):
        return with_ends(interval, scale, unit, least)
    half = max(down, up)
    decimals = _decimals(half, value)
    return f"{_fixed(value, decimals)}{unit} ±{_fixed(half, decimals)}"


def with_ends(interval: Interval, scale: float = 1.0, unit: str = "", least: float | None = 0.0) -> str:
    """Write an estimate with both ends of its interval: ``412 ms (400 to 425)``; otherwise as ``plus_minus``."""
    value, low, high = _ends(interval, scale, least)
    if not 0 < high - low < math.inf:
        return f"{plain(value)}{unit}"
    decimals = _decimals(max(value - low, high - value), value)
    return f"{_fixed(value, decimals)}{unit} ({_fixed(low, decimals)} to {_fixed(high, decimals)})"


def from_to(interval: Interval, scale: float = 1.0) -> str:
    """Write the two ends of an interval, as ``-3.2 to 14.0``; the estimate alone if it is exact or has no interval."""
    half = scale * interval.half_width
    if not math.isfinite(half) or half == 0:
        return plain(scale * interval.value)
    decimals = _decimals(half, 0.0)
    return f"{_fixed(scale * interval.low, decimals)} to {_fixed(scale * interval.high, decimals)}"


def plain(value: float, digits: int = 4) -> str:
    """Write a number with at least this many significant digits, without an exponent or zeros at the end."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    text = _fixed(value, max(digits - 1 - _magnitude(value, digits), 0))
    return text.rstrip("0").rstrip(".") if "." in text else text


def _ends(interval: Interval, scale: float, least: float | None) -> tuple[float, float, float]:
    value, low, high = (scale * each for each in (interval.value, interval.low, interval.high))
    return value, low if least is None else min(max(low, least), value), high


def _decimals(half: float, value: float) -> int:
    """Decimal places that a half width supports; negative for tens and more. A value other than 0 keeps a digit."""
    decimals = 1 - _magnitude(half, 2)
    return decimals if not value else max(decimals, -_magnitude(value, 1))


def _magnitude(value: float, digits: int) -> int:
    """Power of ten of the first of ``digits`` significant digits, after rounding to them."""
    return int(f"{value:.{digits - 1}e}".split("e")[1])


def _fixed(value: float, decimals: int) -> str:
    text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.removeprefix("-") if not text.strip("-0.,") else text
