"""Maximum-likelihood fits of lengths and of gaps between arrivals, by several distributions.

Lengths are whole numbers; the likelihood of a continuous distribution is that of its rounded values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from workloads.fitting.modulated_fit import fit_modulated
from workloads.generators.lengths import FloatArray, IntArray

Share = Callable[[NDArray[np.floating[Any]]], NDArray[np.float64]]
"""The distribution function: the share below each of the given values."""

_MOST_GAPS = 20_000
"""The most gaps that are fitted: modulated processes are slow to fit, and all candidates must have the same gaps."""
_EVEN = 1e-3
"""Gaps whose coefficient of variation is below this are all the same; laws would have no spread to fit."""
_WEIBULL_SHAPES = 0.1, 100.0
"""The shapes that a scenario accepts."""
_SHARES = (*(i / 100 for i in range(100)), *(i / 1000 for i in range(991, 1001)))
_MOST_STATES = 4
_HOURS = 24
_DAY_S = 86_400.0


class Candidate(NamedTuple):
    """A distribution with its maximum-likelihood parameters; arrivals keep the mean rate of the data."""

    kind: str
    """The ``kind`` that a scenario has for it."""
    keys: dict[str, Any]
    """Parameters by their keys in a scenario."""
    parameters: int
    """Number of fitted parameters."""
    log_likelihood: float
    distance: float | None = None
    """Kolmogorov-Smirnov statistic: the largest difference between the distribution functions of model and data."""
    by_moments: bool = False
    """Whether the parameters give the mean and the variance of the data instead of the highest likelihood."""

    @property
    def aic(self) -> float:
        """Akaike's information criterion; smaller is better."""
        return 2 * self.parameters - 2 * self.log_likelihood


def fit_lengths(tokens: IntArray) -> list[Candidate]:
    """Fit lengths of at least 1 token, shape (n,); candidates in order of AIC, or only ``fixed`` for equal lengths."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        return [Candidate("fixed", {"value": low}, 1, 0.0, 0.0)]
    values, counts = np.unique(tokens, return_counts=True)
    limits = {"min": low, "max": high}
    logs = np.log(values)
    mean_log = float((logs * counts).sum() / counts.sum())
    sigma = float(np.sqrt(((logs - mean_log) ** 2 * counts).sum() / counts.sum()))
    mean = float((values * counts).sum() / counts.sum())
    shape = _gamma_shape(np.log(mean) - mean_log)
    candidates = [
        _rounded("lognormal", {"mu": mean_log, "sigma": sigma, **limits}, values, counts, _lognormal(mean_log, sigma)),
        _rounded(
            "gamma", {"shape": shape, "scale": mean / shape, **limits}, values, counts, _gamma(shape, mean / shape)
        ),
        _fit_zipf(values, counts),
    ]
    return sorted(candidates, key=lambda c: c.aic)


def quantiles_of(tokens: IntArray) -> tuple[list[int], list[float]]:
    """Quantiles as whole tokens, and their shares: every hundredth, and every thousandth within the last hundredth.

    With a heavy tail, a straight line from the last hundredth to the maximum would add many tokens.
    """
    found: list[int] = np.rint(np.quantile(tokens, _SHARES)).astype(np.int64).tolist()
    return found, list(_SHARES)


def fit_gaps(arrivals_s: FloatArray, *, coarse: bool = False) -> tuple[list[Candidate], int]:
    """Fit increasing arrival times, shape (n,); candidates in order of AIC, and the number of gaps that were fitted.

    The candidates are renewal processes with exponential, gamma or Weibull gaps; from two days of data on, a Poisson
    process with a rate for each hour of the day; and Markov-modulated Poisson processes with two states and more, until
    a further state no longer lowers the AIC. Gaps that are all the same are one renewal process, without a fit. Each is
    scaled to the mean rate of the arrivals, but its likelihood is that of the unscaled maximum. ``coarse``: the clock
    is, so that the shortest gaps, which weigh most in the likelihood, are made up: gamma and Weibull gaps are fitted
    by their moments too.
    """
    gaps = np.maximum(np.diff(arrivals_s)[:_MOST_GAPS], 1e-9)
    n, total = len(gaps), float(gaps.sum())
    rate = n / total
    if float(gaps.std()) < _EVEN * total / n:
        return [Candidate("renewal", {"quantiles": [total / n, total / n]}, 1, 0.0)], n
    shape = _gamma_shape(float(np.log(gaps.mean()) - np.log(gaps).mean()))
    form, _, scale = stats.weibull_min.fit(gaps, floc=0)
    laws = [_gamma_gaps(rate, float(shape**-0.5)), _weibull_gaps(rate, float(form), scale)]
    candidates = [
        _rated("poisson", {"rate": rate}, stats.expon(scale=1 / rate), gaps),
        *(_rated(*law, gaps) for law in laws),
    ]
    if coarse:
        cv = float(gaps.std() / gaps.mean())
        shape_of_cv = _weibull_shape(cv)
        laws = [
            _gamma_gaps(rate, cv),
            _weibull_gaps(rate, shape_of_cv, 1 / (rate * special.gamma(1 + 1 / shape_of_cv))),
        ]
        candidates += [_rated(*law, gaps)._replace(by_moments=True) for law in laws]
    if total >= 2 * _DAY_S:
        candidates.append(_fit_diurnal(arrivals_s[: n + 1]))
    best = np.inf
    for states in range(2, _MOST_STATES + 1):
        if n < 50 * states:
            break
        found = fit_modulated(gaps, states)
        # With few, long stays the mean rate is poorly determined, but the load depends on it: take that of the data.
        faster = rate / float(found.rates @ found.dwell_s / found.dwell_s.sum())
        keys = {"rates": (found.rates * faster).tolist(), "dwell_s": (found.dwell_s / faster).tolist()}
        candidate = Candidate("mmpp", keys, 2 * states, found.log_likelihood)
        candidates.append(candidate)
        if candidate.aic > best - 2:
            break
        best = candidate.aic
    return sorted(candidates, key=lambda c: c.aic), n


def _gamma_gaps(rate: float, cv: float) -> tuple[str, dict[str, Any], Any]:
    """Gamma gaps as kind, keys and law."""
    return "gamma", {"rate": rate, "cv": cv}, stats.gamma(cv**-2, scale=cv**2 / rate)


def _weibull_gaps(rate: float, shape: float, scale: float) -> tuple[str, dict[str, Any], Any]:
    """Weibull gaps as kind, keys and law."""
    return "weibull", {"rate": rate, "shape": shape}, stats.weibull_min(shape, scale=scale)


def _weibull_shape(cv: float) -> float:
    """The shape of Weibull gaps with a coefficient of variation, or the nearest that a scenario accepts."""

    def excess(shape: float) -> float:
        return float(special.gammaln(1 + 2 / shape) - 2 * special.gammaln(1 + 1 / shape) - np.log1p(cv**2))

    low, high = _WEIBULL_SHAPES
    if excess(low) <= 0:
        return low
    return high if excess(high) >= 0 else float(optimize.brentq(excess, low, high))


def _rated(kind: str, keys: dict[str, Any], law: Any, gaps: FloatArray) -> Candidate:
    """A law of gaps with its likelihood and its distance."""
    return Candidate(kind, keys, len(keys), float(law.logpdf(gaps).sum()), float(stats.kstest(gaps, law.cdf).statistic))


def _rounded(
    kind: str,
    keys: dict[str, Any],
    values: IntArray,
    counts: IntArray,
    below: Share,
) -> Candidate:
    """Rate a continuous distribution of lengths, rounded and limited as a scenario draws it."""
    upper, lower = below(values + 0.5), below(values - 0.5)
    upper[-1], lower[0] = 1.0, 0.0
    likelihood = float((counts * np.log(np.maximum(upper - lower, 1e-300))).sum())
    return Candidate(kind, keys, 2, likelihood, _distance(counts, upper, lower))


def _distance(counts: IntArray, upper: NDArray[np.float64], lower: NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov statistic of counted values; the model has shares ``upper`` up to each and ``lower`` below."""
    share = np.cumsum(counts) / counts.sum()
    before = np.concatenate(([0.0], share[:-1]))
    return float(max(np.abs(share - upper).max(), np.abs(before - lower).max()))


def _lognormal(mu: float, sigma: float) -> Share:
    return lambda x: np.asarray(special.ndtr((np.log(np.maximum(x, 1e-300)) - mu) / sigma), dtype=np.float64)


def _gamma(shape: float, scale: float) -> Share:
    return lambda x: np.asarray(special.gammainc(shape, np.maximum(x, 0) / scale), dtype=np.float64)


def _gamma_shape(excess: float) -> float:
    """The maximum-likelihood shape, given the log of the mean minus the mean of the logs, ``excess`` > 0."""
    excess = max(excess, 1e-9)
    # Starting value by Minka ("Estimating a Gamma distribution", 2002), then Newton's method on log(k) - digamma(k).
    start = (3 - excess + np.sqrt((excess - 3) ** 2 + 24 * excess)) / (12 * excess)
    return float(
        optimize.newton(
            lambda k: np.log(k) - special.digamma(k) - excess, start, lambda k: 1 / k - special.polygamma(1, k)
        )
    )


def _fit_zipf(values: IntArray, counts: IntArray) -> Candidate:
    """Fit the exponent of Zipf's law on the range of the values."""
    low, high = int(values[0]), int(values[-1])
    logs, total = float((np.log(values) * counts).sum()), int(counts.sum())

    def mass(exponent: float) -> float:
        if exponent == 1.0:
            exponent += 1e-12
        return _power_sum(exponent, low, high)

    found = optimize.minimize_scalar(
        lambda a: a * logs + total * np.log(mass(a)), bounds=(1e-6, 20.0), method="bounded"
    )
    exponent = float(found.x)
    whole = mass(exponent)
    upper = np.array([_power_sum(exponent, low, int(v)) for v in values]) / whole
    lower = upper - values.astype(np.float64) ** -exponent / whole
    keys = {"exponent": exponent, "min": low, "max": high}
    return Candidate("zipf", keys, 1, -float(found.fun), _distance(counts, upper, lower))


def _power_sum(exponent: float, low: int, high: int, exact: int = 1024) -> float:
    """The sum of k ** -exponent for k from low to high: ``exact`` terms, then the Euler-Maclaurin formula."""
    head = np.arange(low, min(high, low + exact) + 1, dtype=np.float64)
    total = float((head**-exponent).sum())
    a, b = float(head[-1]), float(high)
    if b > a:
        area = (
            np.log(b / a) if abs(exponent - 1) < 1e-9 else (b ** (1 - exponent) - a ** (1 - exponent)) / (1 - exponent)
        )
        total += (
            area + (b**-exponent - a**-exponent) / 2 - exponent * (b ** -(exponent + 1) - a ** -(exponent + 1)) / 12
        )
    return total


def _fit_diurnal(arrivals_s: FloatArray) -> Candidate:
    """Fit a rate for each hour of a day that starts at the first arrival."""
    since = arrivals_s[1:] - arrivals_s[0]
    end = float(since[-1])
    width = _DAY_S / _HOURS
    counts = np.bincount((since % _DAY_S // width).astype(np.int64), minlength=_HOURS)
    starts = np.arange(_HOURS) * width
    days = np.floor(end / _DAY_S)
    lasted = days * width + np.clip(end - days * _DAY_S - starts, 0.0, width)
    rates = np.maximum(counts, 0.5) / lasted
    rate = float(rates.mean())
    likelihood = float((counts * np.log(rates)).sum() - (rates * lasted).sum())
    keys = {"rate": rate, "profile": (rates / rate).tolist(), "period_s": _DAY_S}
    return Candidate("diurnal", keys, _HOURS, likelihood)
