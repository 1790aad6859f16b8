"""Statistics of workloads: how bursty arrivals are, and how long requests are."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from workloads.generators.lengths import FloatArray, IntArray
from workloads.request import Request, Workload, WorkloadError, timed
from workloads.reuse import LoggedHits, Reuse

WINDOWS_S = (1.0, 60.0)
"""Windows, in seconds, in which arrivals are counted to measure burstiness."""
_FEW_WINDOWS = 10
"""With fewer windows, the variance of their counts is not reported."""
_TICKING = 0.05
"""From this share of gaps of 0 s on, the clock is considered coarse."""
_FINE_S = 1e-6
"""Steps below this come from rounding, not from a clock."""
_MOST = 10**8
"""The most requests that can be described; they take 2.4 GB."""


class RequestColumns(NamedTuple):
    """The arrivals and lengths of a workload; each array has shape (requests,)."""

    arrivals_s: FloatArray
    """Seconds since the first arrival, in order."""
    prompt_tokens: IntArray
    output_tokens: IntArray

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrivals_s[-1])


class Spread(NamedTuple):
    """Summary of a distribution of lengths, in tokens."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: int
    mu: float
    """Mean of the logarithms, the ``mu`` of the best lognormal fit."""
    sigma: float
    """Standard deviation of the logarithms."""

    @classmethod
    def of(cls, tokens: IntArray) -> Spread:
        """Summarise lengths, shape (n,)."""
        logs = np.log(tokens)
        p50, p95, p99 = np.quantile(tokens, (0.5, 0.95, 0.99)).tolist()
        return cls(float(tokens.mean()), p50, p95, p99, int(tokens.max()), float(logs.mean()), float(logs.std()))


class Statistics(NamedTuple):
    """Statistics of one workload, as ``kvsim workload describe`` prints them."""

    requests: int
    duration_s: float
    """Seconds from the first arrival to the last."""
    rate: float | None
    """Requests/s; None if all arrive at once."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 is Poisson, above is bursty."""
    dispersion: dict[float, float | None]
    """Variance over mean of the number of arrivals, by length of window in seconds; None for too few windows."""
    tick_s: float | None
    """Step of the clock if many requests have equal times: burstiness at shorter times cannot be measured."""
    prompt: Spread
    output: Spread
    correlation: float | None
    """Spearman's rank correlation of prompt and output lengths; None if one of them is constant."""
    users: int | None
    """Users who wait for each answer; None where requests arrive by themselves."""
    sessions: int
    """Number of conversations; 0 if the workload has no sessions."""
    reuse: Reuse | None = None
    """What prompts share; None if that is not known."""
    logged: LoggedHits | None = None
    """Hits that the server counted that was logged; None if the log does not say."""


def describe(workload: Workload, each: Callable[[Request], object] | None = None) -> Statistics:
    """Compute statistics of all requests but ``reuse``.

    ``each`` is called with every request. A closed loop has no arrival times: nothing is said of them.
    """
    columns, sessions = read_columns(workload, each, closed=True)
    tick = clock_tick(columns.arrivals_s)
    gaps = np.diff(columns.arrivals_s)
    spans = len(gaps) > 0 and columns.duration_s > 0
    return Statistics(
        requests=len(columns.arrivals_s),
        duration_s=columns.duration_s,
        rate=len(columns.arrivals_s) / columns.duration_s if spans else None,
        gap_cv=float(gaps.std() / gaps.mean()) if spans else None,
        dispersion={w: dispersion(columns.arrivals_s, w) for w in WINDOWS_S},
        tick_s=tick,
        prompt=Spread.of(columns.prompt_tokens),
        output=Spread.of(columns.output_tokens),
        correlation=rank_correlation(columns.prompt_tokens, columns.output_tokens),
        users=workload.users,
        sessions=sessions,
    )


def read_columns(
    workload: Workload, each: Callable[[Request], object] | None = None, *, closed: bool = False
) -> tuple[RequestColumns, int]:
    """Read arrivals and lengths, and the number of sessions. ``each`` is called with every request.

    ``closed``: a closed loop will do, all of whose requests arrive at time 0. Raises ``WorkloadError``.
    """
    if workload.users is not None and not closed:
        raise WorkloadError("a closed loop has no arrivals of its own: its users wait for the server's answers")
    if workload.n_requests > _MOST:
        raise WorkloadError(f"{workload.n_requests:,} requests are too many to describe; {_MOST:,} are accepted")
    arrivals, prompts, outputs = array("d"), array("q"), array("q")
    session, sessions = None, 0
    for now, request in timed(workload) if workload.users is None else ((0.0, request) for request in workload):
        sessions += request.session is not None and request.session != session
        session = request.session
        arrivals.append(now)
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        if each is not None:
            each(request)
    at = np.array(arrivals)
    order = np.argsort(at, kind="stable")
    columns = RequestColumns(at[order] - at[order[0]], np.array(prompts)[order], np.array(outputs)[order])
    return columns, sessions


def dispersion(arrivals_s: FloatArray, window_s: float) -> float | None:
    """Variance over mean of the number of arrivals in successive windows, without the last, partial one."""
    since = arrivals_s - arrivals_s[0]
    windows = int(since[-1] / window_s)
    if windows < _FEW_WINDOWS:
        return None
    inside = since[since <= windows * window_s]
    which = np.minimum((inside / window_s).astype(np.int64), windows - 1)
    # Empty windows are not stored: a trace may have any number of them.
    counts = np.unique(which, return_counts=True)[1].astype(np.float64)
    mean = len(inside) / windows
    return float((counts @ counts) / windows - mean**2) / mean


def clock_tick(arrivals_s: FloatArray) -> float | None:
    """Step in seconds of a coarse clock, which gives many requests the same time; None for a fine clock."""
    gaps = np.diff(arrivals_s)
    moved = gaps[gaps > 0]
    if len(moved) == 0 or len(moved) > (1 - _TICKING) * len(gaps):
        return None
    tick = float(moved.min())
    return tick if tick >= _FINE_S else None


def spread_within_ticks(arrivals_s: FloatArray, tick_s: float, rng: np.random.Generator) -> FloatArray:
    """Move each arrival to a random time within its tick, so that no two are equal; shape (n,).

    A Poisson process spreads arrivals uniformly within a tick, which adds no structure of its own.
    """
    return np.sort(arrivals_s + tick_s * rng.random(len(arrivals_s)))


def rank_correlation(prompts: IntArray, outputs: IntArray) -> float | None:
    """Spearman's rank correlation, from -1 to 1; None if one column is constant."""
    if len(prompts) < 2 or prompts.min() == prompts.max() or outputs.min() == outputs.max():
        return None
    return float(stats.spearmanr(prompts, outputs).statistic)
