"""Arrival processes whose gaps are independent of one another, and what all arrival processes have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gamma

import numpy as np

from workloads.generators.lengths import FloatArray

Draw = Callable[[int], FloatArray]
"""The next n gaps between arrivals, in seconds; shape (n,). Drawn in several goes, they are the same."""

Gaps = Callable[[np.random.Generator], Draw]
"""Begins an arrival process at time 0; it may remember where it is from one page of gaps to the next."""


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
    """Independent gaps with these quantiles in seconds, from 0 to 100 % in even steps, linear in between.

    At least two, not decreasing. With a ``rate`` they are stretched to a mean of ``1 / rate`` seconds, for which they
    must not all be 0.
    """
    seconds = np.array(quantiles, dtype=np.float64)
    if rate is not None:
        seconds = seconds / (rate * np.mean((seconds[1:] + seconds[:-1]) / 2))
    shares = np.linspace(0.0, 1.0, len(seconds))
    return lambda rng: lambda n: np.interp(rng.random(n), shares, seconds)


def no_gaps(rng: np.random.Generator) -> Draw:
    """Everything arrives at once, at time 0; draws nothing."""
    return lambda n: np.zeros(n)


def moments(now: float, gaps: FloatArray) -> FloatArray:
    """When each of several arrivals comes after ``now``, in seconds; shape (n,).

    Each is the float that adding one gap after the other gives, so that a seed's times do not depend on pages.
    """
    return np.add.accumulate(np.concatenate(([now], gaps)))[1:]
