"""Percentiles of the latencies of all requests, with intervals from a few runs.

A generalized pivot (Weerahandi, "Generalized confidence intervals", JASA 88, 1993; Krishnamoorthy, Mathew, "Inferences
on the means of lognormal distributions using generalized p-values and generalized confidence intervals", Journal of
Statistical Planning and Inference 115, 2003, for means). The logarithms of the runs' own percentiles are normal with
mean m and standard deviation s, as bursts make some runs slower than others; latencies within a run, divided by the
run's percentile, have the same distribution F in all runs, which is taken as it was seen. The percentile of all
requests is then that of the products. With the mean and the deviation d of n runs, s is distributed as
d sqrt((n - 1) / X), X of chi squared with n - 1 degrees of freedom, and m as the mean plus Z s / sqrt(n), Z standard
normal: for each of a fixed set of pairs (X, Z) the percentile is computed, and the interval lies between their
quantiles. Nothing is drawn, so that the same runs give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.experiments.estimates import LEVEL, Interval, replication_interval

FloatArray = NDArray[np.float64]

SHARES = np.array(
    [
        *(0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2),
        *(0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
        *(0.75, 0.79, 0.82, 0.85, 0.87, 0.89, 0.91, 0.925, 0.94, 0.95, 0.96, 0.97, 0.977, 0.984, 0.99, 0.9925, 0.995),
        *(0.9975, 0.999, 1.0),
    ]
)
"""The shares of the requests at which a run's latencies are kept, denser where the percentiles are."""

_PIVOTS = 499
_SCALES = 8
"""Deviations for which the percentile is computed; between them it is interpolated."""
_BETWEEN = 100
"""Points for the normal distribution between runs."""
_HALVINGS = 14
"""With this many the ends are within 0.1 % of what more would give."""
_MOST_KNOTS = 600
"""Values of all runs at which their distribution is kept; with more, some are left out."""
_FEWEST_RUNS = 3
_LEAST_S = 1e-9


class LatencySketch(NamedTuple):
    """A latency of a run's requests, in little room."""

    requests: int
    """Number of requests that have it."""
    quantiles: Sequence[float]
    """Its values, seconds, at ``SHARES``."""


LatencySketches = dict[str, LatencySketch]
"""The sketch of each latency of a run; those that no request has are missing."""


def sketch(latencies: FloatArray) -> LatencySketch:
    """Return a sketch of latencies, shape (n,), seconds; n is at least 1.

    By Hazen's rule, under which the shares of several runs add up to those of all their requests.
    """
    return LatencySketch(len(latencies), np.quantile(latencies, SHARES, method="hazen").tolist())


def pooled_percentile(values: ArrayLike, runs: Sequence[LatencySketch], share: float, level: float = LEVEL) -> Interval:
    """Return the latency, seconds, that a share of the requests of all runs together do not exceed, with its interval.

    ``values``: this percentile of each run by itself, shape (n,). ``share``: 0.95 for P95. The interval is that of
    independent runs as long as these are: from the lower to the upper of the ends that the pivots have around the
    model's own percentile and around the one that was seen. Two runs tell too little of how runs differ, and latencies
    of 0 have no logarithms: these have the t interval of the runs' own percentiles, widened to the pooled one. With one
    run both ends are infinite.
    """
    own = np.array(values, dtype=np.float64)
    around = replication_interval(own, level)
    quantiles = np.array([run.quantiles for run in runs])
    if (quantiles == quantiles[0]).all():
        return around
    counts = np.array([run.requests for run in runs], dtype=np.float64)
    latencies, shares = _together(quantiles, counts)
    value = float(np.interp(share, shares, latencies))
    n = len(own)
    if n < _FEWEST_RUNS or own.min() <= 0 or value <= 0:
        return Interval(value, min(around.low, value), max(around.high, value))
    logs = np.log(own)
    mean, deviation = float(logs.mean()), float(logs.std(ddof=1))
    scales, shifts = _pivots(n)
    at = np.geomspace(scales.min(), scales.max(), _SCALES)
    within = np.log(np.maximum(quantiles, _LEAST_S)) - logs[:, np.newaxis]
    of_model = _above(_together(within, counts), deviation * np.append(at, 1.0), share)
    found = np.sort(mean + deviation * shifts * scales / math.sqrt(n) + np.interp(scales, at, of_model[:-1]))
    low, high = np.interp([(1 - level) / 2, (1 + level) / 2], np.linspace(0, 1, _PIVOTS), found).tolist()
    off = math.log(value) - (mean + float(of_model[-1]))
    # Rounding must not push the estimate out of its own interval.
    return Interval(value, min(math.exp(low + min(off, 0)), value), max(math.exp(high + max(off, 0)), value))


def _together(quantiles: FloatArray, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The values of all runs, in order, and the share of all requests up to each; ``quantiles``: (runs, shares)."""
    values = np.sort(quantiles, axis=None)
    if len(values) > _MOST_KNOTS:
        values = values[np.linspace(0, len(values) - 1, _MOST_KNOTS).round().astype(int)]
    shares = np.zeros(len(values))
    for each, count in zip(quantiles, counts, strict=True):
        shares += count * np.interp(values, each, SHARES)
    return values, shares / counts.sum()


def _above(within: tuple[FloatArray, FloatArray], deviations: FloatArray, share: float) -> FloatArray:
    """How far the percentile of all requests is above the runs' mean, on a log scale, for each deviation."""
    values, shares = within
    between = np.outer(deviations, _normal(_BETWEEN))
    low, high = values[0] + between[:, 0], values[-1] + between[:, -1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = np.interp(middle[:, np.newaxis] - between, values, shares).mean(axis=1) < share
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    above: FloatArray = (low + high) / 2
    return above


@cache
def _normal(points: int) -> FloatArray:
    """The middles of equally likely parts of the standard normal distribution."""
    from scipy.special import ndtri  # Without scipy.stats, which takes several times as long to import.

    middles: FloatArray = ndtri((np.arange(points) + 0.5) / points)
    return middles


@cache
def _pivots(n: int) -> tuple[FloatArray, FloatArray]:
    """Pairs of sqrt((n - 1) / X) and Z that fill their distribution evenly; a lattice of the golden ratio."""
    from scipy.special import chdtri, ndtri

    k = np.arange(_PIVOTS)
    first, second = (k + 0.5) / _PIVOTS, (k * (math.sqrt(5) - 1) / 2 + 0.5 / _PIVOTS) % 1
    return np.sqrt((n - 1) / chdtri(n - 1, 1 - first)), ndtri(second)
