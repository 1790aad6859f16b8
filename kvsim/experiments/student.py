"""Quantiles of Student's t distribution, which scipy has too, but takes a fifth of a second to import."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

_TINY = 1e-300


@cache
def t_quantile(level: float, freedom: float) -> float:
    """Return the t that a variable with Student's distribution exceeds in size with probability 1 - ``level``.

    ``level``: above 0 and below 1. ``freedom``: degrees of freedom, at least 1, and not necessarily a whole number.
    """
    # Beyond its inflection the probability falls ever less steeply, and the normal quantile is the smaller one: from
    # there Newton's steps come closer and never go too far.
    t = NormalDist().inv_cdf((1 + level) / 2)
    scale = 2 * math.exp(_log_half_beta(freedom / 2)) / math.sqrt(freedom)
    for _ in range(200):
        density = scale * math.exp(-(freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (_exceeds(t, freedom) - (1 - level)) / density
        t += step
        if abs(step) <= 1e-15 * t:
            break
    return t


def _exceeds(t: float, freedom: float) -> float:
    """Probability that the size exceeds ``t``: the incomplete beta function of freedom / (freedom + t^2)."""
    a, b = freedom / 2, 0.5
    square = t * t
    x, rest = freedom / (freedom + square), square / (freedom + square)
    power = math.exp(_log_half_beta(a) - a * math.log1p(square / freedom) + b * math.log(rest)) if rest else 0.0
    if x < (a + 1) / (a + b + 2):
        return power * _fraction(x, a, b) / a
    return 1 - power * _fraction(rest, b, a) / b


def _log_half_beta(a: float) -> float:
    """Logarithm of Gamma(a + 1/2) / (Gamma(a) Gamma(1/2)); by its asymptotic series where gammas are huge."""
    if a < 50:
        return math.lgamma(a + 0.5) - math.lgamma(a) - math.lgamma(0.5)
    series = -1 / (8 * a) + 1 / (192 * a**3) - 1 / (640 * a**5)
    return 0.5 * math.log(a) + series - math.lgamma(0.5)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's algorithm (Numerical Recipes, 6.4)."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or _TINY)
    value = d
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or _TINY)
            c = 1 + term / c or _TINY
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
