"""Arrival processes with independent gaps, and the interface of all arrival processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gamma

import numpy as np

from workloads.generators.lengths import FloatArray

Draw = Callable[[int], FloatArray]
"""Draws the next n gaps between arrivals, in seconds; shape (n,). Splitting a call in two gives the same gaps."""

Gaps = Callable[[np.random.Generator], Draw]
"""Starts an arrival process at time 0; the process may keep its state between draws."""


def poisson_gaps(rate: float) -> Gaps:
    """Exponential gaps: ``rate`` requests/s, coefficient of variation 1."""
    return lambda rng: lambda n: rng.exponential(1.0 / rate, n)


def gamma_gaps(rate: float, cv: float) -> Gaps:
    """Gamma gaps with mean ``1 / rate`` seconds and coefficient of variation ``cv``: above 1 is bursty."""
    shape = 1.0 / cv**2
    return lambda rng: lambda n: rng.gamma(shape, 1.0 / (rate * shape), n)


def weibull_gaps(rate: float, shape: float) -> Gaps:
    """Weibull gaps with mean ``1 / rate`` seconds; a ``shape`` below 1 is bursty, 1 is Poisson."""
    scale = 1.0 / (rate * gamma(1.0 + 1.0 / shape))
    return lambda rng: lambda n: scale * rng.weibull(shape, n)


def empirical_gaps(quantiles: Sequence[float], rate: float | None = None) -> Gaps:
    """Independent gaps with the given quantiles, in seconds, at even steps from 0 to 100 %, linear in between.

    There are two quantiles or more, in rising order. With a ``rate``, the gaps are scaled to a mean of ``1 / rate``
    seconds; then at least one quantile must be above 0.
    """
    seconds = np.array(quantiles, dtype=np.float64)
    if rate is not None:
        seconds = seconds / (rate * np.mean((seconds[1:] + seconds[:-1]) / 2))
    shares = np.linspace(0.0, 1.0, len(seconds))
    return lambda rng: lambda n: np.interp(rng.random(n), shares, seconds)


def no_gaps(rng: np.random.Generator) -> Draw:
    """All requests arrive at time 0; uses no random numbers."""
    return lambda n: np.zeros(n)


def moments(now: float, gaps: FloatArray) -> FloatArray:
    """Arrival times, in seconds, of requests that follow ``now`` with these gaps; shape (n,).

    Gaps are added one by one, so that the times of a seed do not depend on the size of batches.
    """
    return np.add.accumulate(np.concatenate(([now], gaps)))[1:]
