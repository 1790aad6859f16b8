"""Quantiles of Student's t distribution."""

from functools import cache


@cache
def t_quantile(level: float, freedom: float) -> float:
    """Return the t that a variable with Student's distribution exceeds in size with probability 1 - ``level``.

    ``level``: above 0 and below 1. ``freedom``: degrees of freedom, at least 1, and not necessarily a whole number.
    """
    from scipy.special import stdtrit  # Without scipy.stats, which takes several times as long to import.

    return float(stdtrit(freedom, (1 + level) / 2))
