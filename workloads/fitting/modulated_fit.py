"""Maximum-likelihood fits of Markov-modulated Poisson processes.

The likelihood is that of Meier-Hellstern, "A fitting algorithm for Markov-modulated Poisson processes having two
arrival rates" (European Journal of Operational Research 29, 1987): a product of one matrix for each gap; here for any
number of states, vectorised over all gaps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from workloads.generators.lengths import FloatArray

Floats = NDArray[np.float64]

_WIDEST = 12.0
"""Rates and dwell times lie within e**12 times the mean, either way."""
_WINDOWS = {2: (8, 64), 3: (8, 64)}
"""By number of states, arrivals in each window whose counts give starting values; else ``_WINDOW``."""
_WINDOW = (64,)
_NO_LIKELIHOOD = 1e12
"""Stands for the negative logarithm of a likelihood that cannot be computed."""


class Modulated(NamedTuple):
    """A Markov-modulated Poisson process in which all other states are equally likely to be next."""

    rates: FloatArray
    """Arrivals/s in each state, in falling order; shape (states,)."""
    dwell_s: FloatArray
    """Mean seconds in each state; shape (states,)."""
    log_likelihood: float


def fit_modulated(gaps: FloatArray, states: int) -> Modulated:
    """Fit a process with 2 or more ``states`` to gaps in seconds, all above 0, shape (n,).

    Starts from quantiles of the rate in windows, then maximises by L-BFGS-B over the logarithms of the parameters.
    """
    mean = float(gaps.mean())
    found = [
        _maximize(gaps / mean, *_start(gaps / mean, states, per_window)) for per_window in _WINDOWS.get(states, _WINDOW)
    ]
    best = max(found, key=lambda process: process.log_likelihood)
    order = np.argsort(-best.rates)
    # The fit is in units of the mean gap; convert the density back to seconds.
    return Modulated(
        best.rates[order] / mean, best.dwell_s[order] * mean, best.log_likelihood - len(gaps) * np.log(mean)
    )


def log_likelihood(gaps: FloatArray, rates: FloatArray, dwell_s: FloatArray) -> float:
    """Log-likelihood of gaps, shape (n,), under a process that starts in its stationary distribution."""
    n = len(rates)
    leaves = 1.0 / dwell_s
    generator = np.full((n, n), 1.0 / (n - 1)) * leaves[:, None]
    np.fill_diagonal(generator, -leaves)
    values, vectors = np.linalg.eig(generator - np.diag(rates))
    inverse = np.linalg.inv(vectors)
    # exp((Q - L) gap) L for each gap, by an eigendecomposition.
    decays = np.exp(values[None, :] * gaps[:, None])
    factors = np.real((vectors[None] * decays[:, None, :]) @ (inverse @ np.diag(rates)))
    product, scale = _product(factors)
    seen = dwell_s * rates
    start = seen / seen.sum()
    total = float(start @ product @ np.ones(n))
    return float(np.log(total)) + scale if total > 0 else -np.inf


def _product(factors: Floats) -> tuple[Floats, float]:
    """The ordered product of matrices, shape (n, k, k), divided by a scale; and the logarithm of that scale."""
    scale = 0.0
    while True:
        sizes = np.maximum(factors.max(axis=(1, 2)), 1e-300)
        factors, scale = factors / sizes[:, None, None], scale + float(np.log(sizes).sum())
        if len(factors) == 1:
            return factors[0], scale
        pairs = factors[0 : len(factors) // 2 * 2 : 2] @ factors[1::2]
        factors = np.concatenate((pairs, factors[-1:])) if len(factors) % 2 else pairs


def _start(gaps: FloatArray, states: int, per_window: int) -> tuple[Floats, Floats]:
    """Starting values of rates and dwell times, in units of the mean gap."""
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    windows = max(states, len(gaps) // per_window)
    width = times[-1] / windows
    counts = np.bincount(np.minimum((times / width).astype(np.int64), windows - 1), minlength=windows)
    shares = (np.arange(states) + 0.5) / states
    rates = np.maximum(np.quantile(counts / width, shares[::-1]), 0.02)
    rates *= 1.0 + 0.1 * np.arange(states)[::-1]
    return rates, np.full(states, 3.0 * width)


def _maximize(gaps: FloatArray, rates: FloatArray, dwells: FloatArray) -> Modulated:
    states = len(rates)

    def loss(logs: FloatArray) -> float:
        try:
            value = log_likelihood(gaps, np.exp(logs[:states]), np.exp(logs[states:]))
        except np.linalg.LinAlgError:
            return _NO_LIKELIHOOD
        return -value if np.isfinite(value) else _NO_LIKELIHOOD

    start: FloatArray = np.clip(np.log(np.concatenate((rates, dwells))), 1 - _WIDEST, _WIDEST - 1)
    found = optimize.minimize(
        loss,
        start,
        method="L-BFGS-B",
        bounds=[(-_WIDEST, _WIDEST)] * len(start),
        options={"maxiter": 80, "ftol": 1e-7},
    )
    return Modulated(np.exp(found.x[:states]), np.exp(found.x[states:]), -float(found.fun))
