"""Confidence intervals from few or correlated values: statistics over plain arrays.

Nothing here depends on what was measured. Values are 1-dimensional arrays of finite float64 in their original order.
Every interval is two-sided. Sources:

- MSER-5: White, Cobb, Spratt, "A comparison of five steady-state truncation heuristics for simulation", WSC 2000.
- Batch means, paired t, sequential stopping: Law, "Simulation Modeling and Analysis", 5th ed., 2015, ch. 9 and 10.
- Batches that grow until their means are uncorrelated: Fishman, Yarberry, "An implementation of the batch means
  method", INFORMS Journal on Computing 9(3), 1997.
- Batched quantiles: Alexopoulos, Goldsman, Mokashi, Tien, Wilson, "Sequest", ACM TOMACS 29(4), 2019, section 2.
- Quantiles by order statistics: David, Nagaraja, "Order Statistics", 3rd ed., 2003, section 7.1.
- Ratio of means: Fieller, "Some problems in interval estimation", JRSS B 16(2), 1954.
- Best of several: Hsu, "Multiple Comparisons", 1996, ch. 4, with Bonferroni's bound in place of Dunnett's quantile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.experiments.student import t_quantile

FloatArray = NDArray[np.float64]

LEVEL = 0.95
"""Default confidence level."""

_MSER_BATCH = 5
_MSER_LEAST = 5
"""Batches that must remain after a cut: with fewer, the statistic is small by chance (Law 2015, section 9.5.1)."""
_MOST_BATCHES = 32
_LEAST_BATCHES = 8
_CORRELATED = 0.05
"""Significance level of the test for correlated batch means."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; infinite ends mean that nothing bounds the true value."""

    value: float
    low: float
    high: float
    level: float
    """Confidence level, between 0 and 1."""
    n: int
    """Number of values, replications or batches behind the estimate."""
    method: str
    """How the interval was computed, in a few words."""

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


class Warmup(NamedTuple):
    """Length of the initial transient of a stream."""

    drop: int
    """Number of values to discard."""
    enough: bool
    """False if the stream is too short: it does not settle within its first half."""
    n: int
    """Length of the stream."""

    def verdict(self) -> str:
        """Return a warning if the stream is too short, else an empty string."""
        if self.enough:
            return ""
        return f"too short: {self.n:,} values do not settle within their first half"


class BatchMeans(NamedTuple):
    """The mean of a correlated stream, estimated from the means of batches."""

    interval: Interval
    size: int
    """Values in each batch."""
    correlation: float
    """Correlation between successive batch means."""
    enough: bool
    """False if the means of the largest batches tried are still correlated, so that the interval is too narrow."""

    def verdict(self) -> str:
        """Return a warning if the stream is too short, else an empty string."""
        if self.enough:
            return ""
        return (
            f"too short: the means of {self.interval.n} batches of {self.size:,} values are still correlated "
            f"({self.correlation:.2f})"
        )


class PrecisionCheck(NamedTuple):
    """Result of a stopping rule for replications."""

    done: bool
    """Whether to stop."""
    precise: bool
    """Whether the interval is narrow enough."""
    why: str
    """The reason, in one line."""


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


def mser5(values: ArrayLike) -> Warmup:
    """Find the warm-up to discard: the cut that minimises the standard error of the remaining mean (MSER-5).

    ``values`` have shape (n,). The statistic uses means of 5 neighbours, so the cut is a multiple of 5. If the best
    cut lies in the second half, the stream is too short, and the best cut of the first half is returned. Fewer than 50
    values are never enough, and nothing is cut. Source: White et al. 2000.
    """
    x = _values(values)
    batches = len(x) // _MSER_BATCH
    if batches < 2 * _MSER_LEAST:
        return Warmup(0, False, len(x))
    means = x[: batches * _MSER_BATCH].reshape(batches, _MSER_BATCH).mean(axis=1)
    means -= means.mean()  # Sums of squares lose digits far from 0.
    left = np.arange(batches, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = (np.maximum(squares - sums**2 / left, 0.0) / left**2)[: batches - _MSER_LEAST + 1]
    best = int(errors.argmin())
    half = batches // 2
    if best <= half:
        return Warmup(best * _MSER_BATCH, True, len(x))
    return Warmup(int(errors[: half + 1].argmin()) * _MSER_BATCH, False, len(x))


def mean_by_batches(values: ArrayLike, level: float = LEVEL) -> BatchMeans:
    """Return a t interval for the mean of a stationary, correlated stream, from the means of equal batches.

    ``values`` have shape (n,). Starting with 32 batches, neighbours are merged in pairs, down to 8, until a one-sided
    test at 5 % (von Neumann's, as in Fishman and Yarberry 1997) finds no correlation between successive means. Values
    that do not fill a batch are dropped from the beginning. Raises ``ValueError`` for fewer than 16 values.
    """
    x = _values(values, 2 * _LEAST_BATCHES)
    batches = min(_MOST_BATCHES, 1 << (len(x) // 2).bit_length() - 1)
    while True:
        means = _batches(x, batches).mean(axis=1)
        correlation, independent = _successive(means)
        if independent or batches // 2 < _LEAST_BATCHES:
            interval = _t(means, level, f"t over the means of {batches} batches")
            return BatchMeans(interval, len(x) // batches, correlation, independent)
        batches //= 2


def quantile_by_batches(values: ArrayLike, q: float, batches: int = 16, level: float = LEVEL) -> Interval:
    """Return an interval for a quantile of a stationary, correlated stream, from the quantiles of equal batches.

    ``values`` have shape (n,). The estimate is the quantile of all values; its error is the scatter of the batch
    quantiles around it (Alexopoulos et al. 2019), as a t interval with ``batches - 1`` degrees of freedom. Raises
    ``ValueError`` for fewer than two batches, or batches of fewer than 1/min(q, 1-q) values.
    """
    _share("q", q)
    if batches < 2:
        raise ValueError("at least 2 batches are needed")
    least = math.ceil(1 / min(q, 1 - q))
    x = _values(values, least * batches)
    value = float(np.quantile(x, q))
    quantiles = np.quantile(_batches(x, batches), q, axis=1)
    error = math.sqrt(float(((quantiles - value) ** 2).sum()) / (batches - 1) / batches)
    half = t_quantile(level, batches - 1) * error
    return Interval(value, value - half, value + half, level, batches, f"t over the quantiles of {batches} batches")


def quantile_by_order(values: ArrayLike, q: float, level: float = LEVEL) -> Interval:
    """Return an interval between two order statistics for a quantile of independent values of any continuous law.

    ``values`` have shape (n,). The binomial law gives the ranks of the ends (David and Nagaraja 2003); an end for which
    there are too few values is infinite. For reference only: values of one run are not independent.
    """
    _share("q", q)
    from scipy import stats

    x = np.sort(_values(values))
    n = len(x)
    tail = (1 - level) / 2
    low = int(stats.binom.ppf(tail, n, q))
    high = int(stats.binom.ppf(1 - tail, n, q)) + 1
    return Interval(
        float(np.quantile(x, q)),
        float(x[low - 1]) if low >= 1 else -math.inf,
        float(x[high - 1]) if high <= n else math.inf,
        level,
        n,
        "order statistics of independent values",
    )


def replication_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Return a t interval over independent replications, each of which gives one value (Law 2015, 9.4.1).

    ``values`` have shape (n,); each is a mean or a quantile of its replication. With one value both ends are infinite.
    """
    return _t(_values(values), level, "t over replications")


def paired_difference(values: ArrayLike, others: ArrayLike, level: float = LEVEL) -> Interval:
    """Return a t interval for the mean of ``values - others``, whose pairs share random numbers (Law 2015, 10.2.1).

    Both have shape (n,). Raises ``ValueError`` if their lengths differ.
    """
    x, y = _pairs(values, others)
    return _t(x - y, level, "t over paired differences")


def paired_ratio(values: ArrayLike, others: ArrayLike, level: float = LEVEL) -> Interval:
    """Return an interval for the mean of ``values`` divided by the mean of ``others``, in pairs (Fieller 1954).

    Both have shape (n,). Both ends are infinite if there is only one pair, or if the denominator's interval contains
    0. Raises ``ValueError`` if the lengths differ or the denominator is 0.
    """
    x, y = _pairs(values, others)
    above, below, n = float(x.mean()), float(y.mean()), len(x)
    if below == 0:
        raise ValueError("the mean of the denominator is 0")
    value, method = above / below, "Fieller, paired"
    if n < 2:
        return Interval(value, -math.inf, math.inf, level, n, method)
    if np.allclose(x, value * y, rtol=1e-12, atol=0):
        return Interval(value, value, value, level, n, method)  # Exact, however uncertain the denominator is.
    (vx, vxy), (_, vy) = np.cov(x, y).tolist()
    t2 = t_quantile(level, n - 1) ** 2 / n
    # All ratios r for which the mean of x - r y is within its own t interval of 0: the roots of a quadratic.
    a, b, c = below**2 - t2 * vy, above * below - t2 * vxy, above**2 - t2 * vx
    inside = b * b - a * c
    if a <= 0 or inside < 0:
        return Interval(value, -math.inf, math.inf, level, n, method)
    root = math.sqrt(inside)
    # Rounding must not push the estimate out of its own interval.
    return Interval(value, min((b - root) / a, value), max((b + root) / a, value), level, n, method)


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
    differences = tuple(replace(paired_difference(row, x[lowest], each_level), level=level) for row in x)
    ratios = tuple(replace(paired_ratio(row, x[lowest], each_level), level=level) for row in x)
    return LowestMean(lowest, differences, ratios)


def bonferroni_level(level: float, comparisons: int) -> float:
    """Return the level at which each comparison must be made for all of them to hold simultaneously at ``level``."""
    return 1 - (1 - level) / max(comparisons, 1)


def check_precision(
    values: ArrayLike, within: float, level: float = LEVEL, least: int = 5, most: int = 50
) -> PrecisionCheck:
    """Decide whether there are enough replications: stop once the relative error is at most ``within``.

    ``values`` have shape (n,). The half width divided by the estimate must not exceed ``within / (1 + within)``, so
    that the error relative to the true value is at most ``within`` (Law 2015, 9.4.1). At least ``least`` and at most
    ``most`` replications are made in any case.
    """
    x = _values(values)
    if len(x) < least:
        return PrecisionCheck(False, False, f"{len(x)} of at least {least} replications")
    interval = replication_interval(x, level)
    reason = f"{level:.0%} interval within {interval.relative:.2%} after {len(x)} replications"
    if interval.relative <= within / (1 + within):
        return PrecisionCheck(True, True, reason)
    if len(x) >= most:
        return PrecisionCheck(True, False, f"not precise: {reason}, the most allowed")
    return PrecisionCheck(False, False, reason)


def _values(values: ArrayLike, least: int = 1) -> FloatArray:
    x = np.array(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < least:
        raise ValueError(f"{least} values or more in one row are needed, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("values must be finite")
    return x


def _pairs(values: ArrayLike, others: ArrayLike) -> tuple[FloatArray, FloatArray]:
    x, y = _values(values), _values(others)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values cannot be paired with {len(y)}")
    return x, y


def _share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, not {value}")


def _batches(x: FloatArray, batches: int) -> FloatArray:
    """Cut into an array of shape (batches, values in each); the remainder is dropped from the beginning."""
    size = len(x) // batches
    return x[len(x) - size * batches :].reshape(batches, size)


def _successive(means: FloatArray) -> tuple[float, bool]:
    """Correlation between successive means, and whether von Neumann's test accepts them as uncorrelated.

    Under independence the statistic is approximately normal with variance (n - 2) / (n**2 - 1).
    """
    from scipy import special

    centred = means - means.mean()
    total = float(centred @ centred)
    if total <= 1e-24 * float(means @ means):
        return 0.0, True
    correlation = float(centred[:-1] @ centred[1:]) / total
    statistic = correlation + (float(centred[0]) ** 2 + float(centred[-1]) ** 2) / (2 * total)
    n = len(means)
    return correlation, statistic <= float(special.ndtri(1 - _CORRELATED)) * math.sqrt((n - 2) / (n * n - 1))


def _t(x: FloatArray, level: float, method: str) -> Interval:
    _share("level", level)
    value, n = float(x.mean()), len(x)
    if n < 2:
        return Interval(value, -math.inf, math.inf, level, n, method)
    half = t_quantile(level, n - 1) * float(x.std(ddof=1)) / math.sqrt(n) if (x != x[0]).any() else 0.0
    return Interval(value, value - half, value + half, level, n, method)
