"""Arrival processes whose rate changes: between hidden states, or along the day."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workloads.generators.gaps import Gaps, moments
from workloads.generators.lengths import FloatArray, IntArray

_BLOCK = 4096
"""Stays in a state drawn at a time. Part of what a seed means."""


def modulated_gaps(rates: Sequence[float], dwell_s: Sequence[float]) -> Gaps:
    """A Markov-modulated Poisson process (Heffes & Lucantoni 1986; Fischer & Meier-Hellstern 1993).

    It stays in each of its states for an exponential time with a mean of ``dwell_s`` seconds, then goes to one of the
    others, all equally likely. While it stays, requests come at the state's rate, in requests/s; a rate may be 0, but
    not all. It begins in its stationary distribution, so that its mean rate is the mean of ``rates`` weighted by
    ``dwell_s`` from the start. Raises ``ValueError`` for fewer than two states or unequal lists.
    """
    if len(rates) != len(dwell_s) or len(rates) < 2:
        raise ValueError(f"{len(rates)} rates for {len(dwell_s)} states; at least 2 of both are needed")
    by_state, dwell = np.array(rates, dtype=np.float64), np.array(dwell_s, dtype=np.float64)
    return lambda rng: _Modulated(rng, by_state, dwell).draw


class _Modulated:
    """One run of the process.

    The integral of the rate over time turns its arrivals into those of a Poisson process of rate 1 (Cinlar 1975), so
    these are drawn and turned back. The way through the states has a generator of its own: where pages end, it is
    the same.
    """

    def __init__(self, rng: np.random.Generator, rates: FloatArray, dwell_s: FloatArray):
        self._arrivals, self._walk = rng.spawn(2)
        self._rates, self._dwell_s = rates, dwell_s
        # Left after equally many stays, a state holds the process in proportion to how long it stays.
        start = np.searchsorted(np.cumsum(dwell_s) / np.sum(dwell_s), self._walk.random(), side="right")
        self._state = min(int(start), len(rates) - 1)
        self._now = self._ended = self._due = self._done = 0.0
        """The last arrival; where the last block ends; how much of the integral belongs to either."""

    def draw(self, n: int) -> FloatArray:
        """The next n gaps."""
        due = moments(self._due, self._arrivals.exponential(size=n))
        times, found = np.empty(n), 0
        if found < n and self._done == 0:
            self._advance()
        while found < n:
            stop = int(np.searchsorted(due, self._done))
            here = due[found:stop]
            stay = np.searchsorted(self._sums[1:], here, side="right")
            since = self._starts[stay] + (here - self._sums[stay]) / self._rates[self._stays[stay]]
            # Rounding must not carry an arrival beyond its stay, or time could go back at the next.
            times[found:stop] = np.minimum(since, self._starts[stay + 1])
            found = stop
            if found < n:
                self._advance()
        if n:
            gaps = np.diff(times, prepend=self._now)
            self._now, self._due = float(times[-1]), float(due[-1])
            return gaps
        return times

    def _advance(self) -> None:
        """Draws the next block of stays."""
        n = len(self._rates)
        steps = np.concatenate(([self._state], 1 + self._walk.integers(0, n - 1, _BLOCK)))
        reached = np.add.accumulate(steps) % n
        stays: IntArray = reached[:-1]
        self._stays, self._state = stays, int(reached[-1])
        seconds = self._walk.exponential(self._dwell_s[stays])
        self._starts = np.concatenate(([self._ended], moments(self._ended, seconds)))
        self._sums = np.concatenate(([self._done], moments(self._done, seconds * self._rates[stays])))
        self._ended, self._done = float(self._starts[-1]), float(self._sums[-1])


def diurnal_gaps(rate: float, profile: Sequence[float], period_s: float, phase_s: float = 0.0) -> Gaps:
    """A Poisson process whose rate repeats every ``period_s`` seconds, with a mean of ``rate`` requests/s.

    ``profile``: relative rates of equal parts of the period, not all 0; the run begins ``phase_s`` seconds into it.
    By inversion, as above: thinning (Lewis & Shedler 1979) draws candidates all through a night in which nothing comes.
    """
    share = np.concatenate(([0.0], np.cumsum(profile))) / np.sum(profile)
    return lambda rng: _Daily(rng, rate * period_s, share, period_s, phase_s % period_s).draw


class _Daily:
    """One run of the process."""

    def __init__(self, rng: np.random.Generator, requests: float, share: FloatArray, period_s: float, phase_s: float):
        """``requests``: of a period; ``share``: of them, up to the end of each part, shape (parts + 1,)."""
        self._rng, self._requests, self._share, self._period_s = rng, requests, share, period_s
        self._ends = np.linspace(0.0, period_s, len(share))
        self._now = phase_s
        self._due = requests * float(np.interp(phase_s, self._ends, share))
        """The last arrival, and the integral of the rate up to it, from the start of the first period."""

    def draw(self, n: int) -> FloatArray:
        """The next n gaps."""
        due = moments(self._due, self._rng.exponential(size=n))
        periods = np.floor(due / self._requests)
        rest = np.clip(due / self._requests - periods, 0.0, 1.0)
        times = periods * self._period_s + np.interp(rest, self._share, self._ends)
        # The sums and the period, both rounded, may disagree in the last digit.
        gaps = np.maximum(np.diff(times, prepend=self._now), 0.0)
        if n:
            self._now, self._due = float(times[-1]), float(due[-1])
        return gaps
