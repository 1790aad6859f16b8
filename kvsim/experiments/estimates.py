"""What can be said of a measure from few or correlated values, and how surely: plain statistics over arrays.

Knows nothing of what was measured. Values are 1-dimensional arrays of finite float64, in the order in which they came.
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
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

FloatArray = NDArray[np.float64]

LEVEL = 0.95
"""Confidence, where none is given."""

_MSER_BATCH = 5
_MSER_LEAST = 5
"""Batches that a truncation must leave: of fewer, the statistic is small by chance (Law 2015, section 9.5.1)."""
_MOST_BATCHES = 32
_LEAST_BATCHES = 8
_CORRELATED = 0.05
"""Significance at which batch means are taken to be correlated."""


@dataclass(frozen=True)
class Interval:
    """An estimate and where the true value lies with that confidence; infinite ends: it could be anything."""

    value: float
    low: float
    high: float
    level: float
    """Confidence, between 0 and 1."""
    n: int
    """Values, replications or batches that it rests on."""
    how: str
    """The method, in a few words."""

    @property
    def half_width(self) -> float:
        """Half of the distance between the ends."""
        return (self.high - self.low) / 2

    @property
    def relative(self) -> float:
        """Half width over the estimate's size; infinite for an estimate of 0 that is not exact."""
        if self.half_width == 0:
            return 0.0
        return self.half_width / abs(self.value) if self.value else math.inf

    def excludes(self, value: float) -> bool:
        """Whether that value lies outside."""
        return not self.low <= value <= self.high


class Warmup(NamedTuple):
    """How much of the beginning is not like the rest."""

    drop: int
    """Values to leave out."""
    enough: bool
    """False: the stream is too short to tell; it does not settle in its first half."""
    n: int
    """Values in all."""

    def verdict(self) -> str:
        """A line where the stream is too short, else empty."""
        if self.enough:
            return ""
        return f"too short: {self.n:,} values do not settle within their first half"


class BatchMeans(NamedTuple):
    """The mean of a correlated stream."""

    interval: Interval
    size: int
    """Values in a batch."""
    correlation: float
    """Of each batch mean with the next."""
    enough: bool
    """False: the means of the largest batches tried are still correlated, so the interval is too narrow."""

    def verdict(self) -> str:
        """A line where the stream is too short, else empty."""
        if self.enough:
            return ""
        return (
            f"too short: the means of {self.interval.n} batches of {self.size:,} values are still correlated "
            f"({self.correlation:.2f})"
        )


class Stop(NamedTuple):
    """Whether replications are to end."""

    done: bool
    precise: bool
    why: str
    """One line."""


class Best(NamedTuple):
    """Which of several has the lowest mean, and by how much."""

    lowest: int
    """Its number."""
    differences: tuple[Interval, ...]
    """Of each, less the best: shape (k,); together they hold with the level given. The best's own is 0."""
    ratios: tuple[Interval, ...]
    """Of each mean over the best's, at the same corrected level."""

    @property
    def ties(self) -> tuple[int, ...]:
        """Those that cannot be told from the best."""
        return tuple(i for i, each in enumerate(self.differences) if i != self.lowest and each.low <= 0)


def mser5(values: ArrayLike) -> Warmup:
    """Where to cut a warm-up: where the rest's mean has the smallest standard error (MSER-5, White et al. 2000).

    ``values`` have shape (n,). Means of 5 neighbours are looked at, so that the cut is a multiple of 5. If the best
    cut lies past the half, the stream is too short, and the cut given is the best in the first half. Of fewer than 50
    values nothing can be said: none are cut, and they are not enough.
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
    """A t interval for the mean of a stationary, correlated stream, from the means of equal batches.

    ``values`` have shape (n,). From 32 batches on, neighbours are joined two by two until a one-sided test at 5 % (von
    Neumann's, as Fishman and Yarberry 1997 have it) sees no correlation between successive means, down to 8. The
    remainder that fills no batch is left out at the beginning. Raises ``ValueError`` for fewer than 16 values.
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
    """An interval for a quantile of a stationary, correlated stream, from the quantiles of equal batches.

    ``values`` have shape (n,). The estimate is the quantile of all; its error is that of the batches' quantiles about
    it (Alexopoulos et al. 2019), a t interval with one degree of freedom less than batches. Raises ``ValueError``
    for fewer than two batches, or batches too small to have that quantile (fewer than 1/min(q, 1-q) values).
    """
    _share("q", q)
    if batches < 2:
        raise ValueError("at least 2 batches are needed")
    least = math.ceil(1 / min(q, 1 - q))
    x = _values(values, least * batches)
    value = float(np.quantile(x, q))
    each = np.quantile(_batches(x, batches), q, axis=1)
    error = math.sqrt(float(((each - value) ** 2).sum()) / (batches - 1) / batches)
    half = _t_quantile(level, batches - 1) * error
    return Interval(value, value - half, value + half, level, batches, f"t over the quantiles of {batches} batches")


def quantile_by_order(values: ArrayLike, q: float, level: float = LEVEL) -> Interval:
    """An interval for a quantile of independent values of any continuous law, between two of them.

    ``values`` have shape (n,). The ends are the order statistics that the binomial law gives (David and Nagaraja
    2003); where there are too few values for one end, it is infinite. For reference: values of one run are not
    independent.
    """
    _share("q", q)
    from scipy import stats  # Slow to import, and needed here alone.

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


def over_replications(values: ArrayLike, level: float = LEVEL) -> Interval:
    """A t interval over independent replications: one value of each, be it a mean or a quantile (Law 2015, 9.4.1).

    ``values`` have shape (n,). Of one value: it, and infinite ends.
    """
    return _t(_values(values), level, "t over replications")


def paired(values: ArrayLike, others: ArrayLike, level: float = LEVEL) -> Interval:
    """A t interval for the mean of ``values - others``, whose pairs share their random numbers (Law 2015, 10.2.1).

    Both have shape (n,). Raises ``ValueError`` where they differ in length.
    """
    x, y = _pairs(values, others)
    return _t(x - y, level, "t over paired differences")


def ratio(values: ArrayLike, others: ArrayLike, level: float = LEVEL) -> Interval:
    """An interval for the ratio of the mean of ``values`` to that of ``others``, in pairs (Fieller 1954).

    Both have shape (n,). Where the mean below cannot be told from 0, or there is one pair only, both ends are
    infinite. Raises ``ValueError`` where they differ in length or the mean below is 0.
    """
    x, y = _pairs(values, others)
    above, below, n = float(x.mean()), float(y.mean()), len(x)
    if below == 0:
        raise ValueError("the mean below is 0")
    value, how = above / below, "Fieller, paired"
    if n < 2:
        return Interval(value, -math.inf, math.inf, level, n, how)
    if np.allclose(x, value * y, rtol=1e-12, atol=0):
        return Interval(value, value, value, level, n, how)  # Exact, even where the mean below is not known well.
    (vx, vxy), (_, vy) = np.cov(x, y).tolist()
    t2 = _t_quantile(level, n - 1) ** 2 / n
    # All ratios r for which the mean of x - r y is within its own t interval of 0: a quadratic's roots.
    a, b, c = below**2 - t2 * vy, above * below - t2 * vxy, above**2 - t2 * vx
    inside = b * b - a * c
    if a <= 0 or inside < 0:
        return Interval(value, -math.inf, math.inf, level, n, how)
    root = math.sqrt(inside)
    # What is exact stays so: rounding must not push the estimate out of its own interval.
    return Interval(value, min((b - root) / a, value), max((b + root) / a, value), level, n, how)


def best_of(samples: ArrayLike, level: float = LEVEL) -> Best:
    """The lowest mean of k systems that share their random numbers, against each of the others.

    ``samples`` have shape (k, n): a row for each system, a column for each replication. Each of the k - 1 paired
    intervals has the level ``1 - (1 - level) / (k - 1)`` (Bonferroni), so that they hold together; if all lie above
    0, the lowest is the best with that confidence, although it was chosen by its looks: to be wrong, the true best
    would have to lose to one of k - 1 others by chance. (Holm's procedure would not do: it bounds the errors of
    comparisons that are fixed beforehand.) Raises ``ValueError`` for no systems.
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.ndim != 2 or not x.size:
        raise ValueError("samples of shape (systems, replications) are needed")
    lowest = int(x.mean(axis=1).argmin())
    each = corrected(level, len(x) - 1)
    differences = tuple(replace(paired(row, x[lowest], each), level=level) for row in x)
    ratios = tuple(replace(ratio(row, x[lowest], each), level=level) for row in x)
    return Best(lowest, differences, ratios)


def corrected(level: float, comparisons: int) -> float:
    """The level that each of so many comparisons needs for all to hold together with ``level`` (Bonferroni)."""
    return 1 - (1 - level) / max(comparisons, 1)


def stop(values: ArrayLike, within: float, level: float = LEVEL, least: int = 5, most: int = 50) -> Stop:
    """Whether enough replications have been made: until the interval is within a share of its estimate.

    ``values`` have shape (n,). The half width over the estimate must not exceed ``within / (1 + within)``, so that the
    error relative to the true value is at most ``within`` (Law 2015, 9.4.1). Before ``least`` replications nothing is
    decided, after ``most`` it ends anyhow.
    """
    x = _values(values)
    if len(x) < least:
        return Stop(False, False, f"{len(x)} of at least {least} replications")
    interval = over_replications(x, level)
    said = f"{level:.0%} interval within {interval.relative:.2%} after {len(x)} replications"
    if interval.relative <= within / (1 + within):
        return Stop(True, True, said)
    if len(x) >= most:
        return Stop(True, False, f"not precise: {said}, the most allowed")
    return Stop(False, False, said)


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
    """Shape (batches, values in each), the remainder left out at the beginning."""
    size = len(x) // batches
    return x[len(x) - size * batches :].reshape(batches, size)


def _successive(means: FloatArray) -> tuple[float, bool]:
    """Correlation of each with the next, and whether von Neumann's ratio takes them for uncorrelated.

    Under independence the statistic is about normal with variance (n - 2) / (n**2 - 1).
    """
    centred = means - means.mean()
    total = float(centred @ centred)
    if total <= 1e-24 * float(means @ means):
        return 0.0, True
    correlation = float(centred[:-1] @ centred[1:]) / total
    statistic = correlation + (float(centred[0]) ** 2 + float(centred[-1]) ** 2) / (2 * total)
    n = len(means)
    return correlation, statistic <= float(special.ndtri(1 - _CORRELATED)) * math.sqrt((n - 2) / (n * n - 1))


def _t(x: FloatArray, level: float, how: str) -> Interval:
    _share("level", level)
    value, n = float(x.mean()), len(x)
    if n < 2:
        return Interval(value, -math.inf, math.inf, level, n, how)
    half = _t_quantile(level, n - 1) * float(x.std(ddof=1)) / math.sqrt(n) if (x != x[0]).any() else 0.0
    return Interval(value, value - half, value + half, level, n, how)


@cache
def _t_quantile(level: float, degrees: int) -> float:
    return float(special.stdtrit(degrees, (1 + level) / 2))
