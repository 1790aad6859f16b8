"""Confidence intervals from few values: statistics over plain arrays, whatever was measured.

Values are 1-dimensional arrays of finite float64 in their original order; every interval is two-sided. Sources:

- MSER-5: White, Cobb, Spratt, "A comparison of five steady-state truncation heuristics for simulation", WSC 2000.
- Paired t, sequential stopping: Law, "Simulation Modeling and Analysis", 5th ed., 2015, ch. 9 and 10.
- Ratio of means: Fieller, "Some problems in interval estimation", JRSS B 16(2), 1954.
- One more replication: Hahn, Meeker, "Statistical Intervals", 1991, section 4.8.
- Best of several: Hsu, "Multiple Comparisons", 1996, ch. 4, with Bonferroni's bound in place of Dunnett's quantile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

LEVEL = 0.95
"""Default confidence level."""

_MSER_BATCH = 5
_MSER_LEAST = 5
"""Batches that must remain after a cut: with fewer, the statistic is small by chance (Law 2015, section 9.5.1)."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; infinite ends mean that nothing bounds the true value."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between the ends."""
        return (self.high - self.low) / 2

    @property
    def relative(self) -> float:
        """Half width divided by the absolute estimate; infinite for an estimate of 0 that is not exact."""
        if self.half_width == 0:
            return 0.0
        return self.half_width / abs(self.value) if self.value else math.inf

    def excludes(self, value: float) -> bool:
        """Whether a value lies outside the interval."""
        return not self.low <= value <= self.high

    def exp(self) -> Interval:
        """The interval of the quantity whose logarithm this is."""
        high = math.exp(self.high) if self.high < 700 else math.inf
        return Interval(math.exp(self.value), math.exp(self.low), high)

    def to_dict(self) -> dict[str, float | None]:
        """The interval as JSON has it: None where it is infinite."""
        return {key: value if math.isfinite(value) else None for key, value in vars(self).items()}

    def columns(self, name: str) -> dict[str, float]:
        """The estimate under a name, and the ends of its interval under ``name_low`` and ``name_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


UNKNOWN = Interval(math.nan, math.nan, math.nan)
"""What tables have in place of an interval that is not known."""


class Warmup(NamedTuple):
    """Length of the initial transient of a stream."""

    drop: int
    """Number of values to discard."""
    enough: bool
    """False if the stream is too short: it does not settle within its first half."""


class PrecisionCheck(NamedTuple):
    """Result of a stopping rule for replications."""

    done: bool
    """Whether to stop."""
    precise: bool
    """Whether the interval is narrow enough."""


class LowestMean(NamedTuple):
    """The system with the lowest mean among several, and how far the others are above it."""

    lowest: int
    """Index of the lowest."""
    differences: tuple[Interval, ...]
    """Each mean minus the lowest, one interval per system, simultaneously valid at the given level; 0 for the lowest
    itself."""
    ratios: tuple[Interval, ...]
    """Each mean divided by the lowest, at the same corrected level."""

    @property
    def ties(self) -> tuple[int, ...]:
        """Indices of the systems that cannot be distinguished from the lowest."""
        return tuple(i for i, difference in enumerate(self.differences) if i != self.lowest and difference.low <= 0)


@cache
def t_quantile(level: float, freedom: float) -> float:
    """Return the t that a variable with Student's distribution exceeds in size with probability 1 - ``level``.

    ``level``: above 0 and below 1. ``freedom``: degrees of freedom, at least 1, and not necessarily a whole number.
    """
    from scipy.special import stdtrit  # Without scipy.stats, which takes several times as long to import.

    return float(stdtrit(freedom, (1 + level) / 2))


def mser5(values: ArrayLike) -> Warmup:
    """Find the warm-up to discard: the cut that minimises the standard error of the remaining mean (MSER-5).

    ``values`` have shape (n,). The statistic uses means of 5 neighbours, so the cut is a multiple of 5. If the best
    cut lies in the second half, the stream is too short, and the best cut of the first half is returned. Fewer than 50
    values are never enough, and nothing is cut. Source: White et al. 2000.
    """
    x = _values(values)
    batches = len(x) // _MSER_BATCH
    if batches < 2 * _MSER_LEAST:
        return Warmup(0, False)
    means = x[: batches * _MSER_BATCH].reshape(batches, _MSER_BATCH).mean(axis=1)
    means -= means.mean()  # Sums of squares lose digits far from 0.
    left = np.arange(batches, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = (np.maximum(squares - sums**2 / left, 0.0) / left**2)[: batches - _MSER_LEAST + 1]
    best = int(errors.argmin())
    half = batches // 2
    if best <= half:
        return Warmup(best * _MSER_BATCH, True)
    return Warmup(int(errors[: half + 1].argmin()) * _MSER_BATCH, False)


def replication_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Return a t interval over independent replications, each of which gives one value (Law 2015, 9.4.1).

    ``values`` have shape (n,); each is a mean or a quantile of its replication. With one value both ends are infinite.
    """
    return _t(_values(values), level)


def prediction_limit(values: ArrayLike, level: float = LEVEL) -> float:
    """Return what one more independent replication exceeds with probability ``level`` (Hahn, Meeker 1991, 4.8).

    ``values`` have shape (n,) and are normally distributed. Minus infinity for a single one.
    """
    x = _values(values)
    if len(x) < 2:
        return -math.inf
    quantile = t_quantile(2 * level - 1, len(x) - 1)
    return float(x.mean()) - quantile * float(x.std(ddof=1)) * math.sqrt(1 + 1 / len(x))


def paired_difference(values: ArrayLike, others: ArrayLike, level: float = LEVEL) -> Interval:
    """Return a t interval for the mean of ``values - others``, whose pairs share random numbers (Law 2015, 10.2.1).

    Both have shape (n,). Raises ``ValueError`` if their lengths differ.
    """
    x, y = _pairs(values, others)
    return _t(x - y, level)


def paired_ratio(values: ArrayLike, others: ArrayLike, level: float = LEVEL) -> Interval:
    """Return an interval for the mean of ``values`` divided by the mean of ``others``, in pairs (Fieller 1954).

    Both have shape (n,). Both ends are infinite if there is only one pair, or if the denominator's interval contains
    0. Raises ``ValueError`` if the lengths differ or the denominator is 0.
    """
    x, y = _pairs(values, others)
    above, below, n = float(x.mean()), float(y.mean()), len(x)
    if below == 0:
        raise ValueError("the mean of the denominator is 0")
    value = above / below
    if n < 2:
        return Interval(value, -math.inf, math.inf)
    if np.allclose(x, value * y, rtol=1e-12, atol=0):
        return Interval(value, value, value)  # Exact, however uncertain the denominator is.
    (vx, vxy), (_, vy) = np.cov(x, y).tolist()
    t2 = t_quantile(level, n - 1) ** 2 / n
    # All ratios r for which the mean of x - r y is within its own t interval of 0: the roots of a quadratic.
    a, b, c = below**2 - t2 * vy, above * below - t2 * vxy, above**2 - t2 * vx
    inside = b * b - a * c
    if a <= 0 or inside < 0:
        return Interval(value, -math.inf, math.inf)
    root = math.sqrt(inside)
    # Rounding must not push the estimate out of its own interval.
    return Interval(value, min((b - root) / a, value), max((b + root) / a, value))


def lowest_mean(samples: ArrayLike, level: float = LEVEL) -> LowestMean:
    """Find the system with the lowest mean among k that share random numbers, and compare the others with it.

    ``samples`` have shape (k, n): a row for each system, a column for each replication. Each of the k - 1 paired
    intervals has the level ``1 - (1 - level) / (k - 1)`` (Bonferroni), so that all of them hold simultaneously. If all
    lie above 0, the lowest is the best with that confidence, even though the data chose it: to be wrong, the true best
    would have to lose to one of k - 1 others by chance. (Holm's procedure would not do: it bounds the errors of
    comparisons that are fixed beforehand.) Raises ``ValueError`` for no systems.
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.ndim != 2 or not x.size:
        raise ValueError("samples of shape (systems, replications) are needed")
    lowest = int(x.mean(axis=1).argmin())
    each_level = bonferroni_level(level, len(x) - 1)
    differences = tuple(paired_difference(row, x[lowest], each_level) for row in x)
    ratios = tuple(paired_ratio(row, x[lowest], each_level) for row in x)
    return LowestMean(lowest, differences, ratios)


def bonferroni_level(level: float, comparisons: int) -> float:
    """Return the level at which each comparison must be made for all of them to hold simultaneously at ``level``."""
    return 1 - (1 - level) / max(comparisons, 1)


def check_precision(interval: Interval, have: int, within: float, least: int = 5, most: int = 50) -> PrecisionCheck:
    """Decide whether there are enough replications: stop once the relative error is at most ``within``.

    ``interval``: of the ``have`` replications so far. Its half width divided by the estimate must not exceed ``within /
    (1 + within)``, so that the error relative to the true value is at most ``within`` (Law 2015, 9.4.1). At least
    ``least`` and at most ``most`` replications are made in any case.
    """
    if have < least:
        return PrecisionCheck(False, False)
    precise = interval.relative <= within / (1 + within)
    return PrecisionCheck(precise or have >= most, precise)


def _values(values: ArrayLike) -> FloatArray:
    x = np.array(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"values in one row are needed, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("values must be finite")
    return x


def _pairs(values: ArrayLike, others: ArrayLike) -> tuple[FloatArray, FloatArray]:
    x, y = _values(values), _values(others)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values cannot be paired with {len(y)}")
    return x, y


def _t(x: FloatArray, level: float) -> Interval:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    value, n = float(x.mean()), len(x)
    if n < 2:
        return Interval(value, -math.inf, math.inf)
    half = t_quantile(level, n - 1) * float(x.std(ddof=1)) / math.sqrt(n) if (x != x[0]).any() else 0.0
    return Interval(value, value - half, value + half)
