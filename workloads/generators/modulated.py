"""Arrival processes whose rate changes: between hidden states, or over the day."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workloads.generators.gaps import Gaps, moments
from workloads.generators.lengths import FloatArray, IntArray

_BLOCK = 4096
"""State changes that are drawn at a time. Another value would change the arrivals of a seed."""


def modulated_gaps(rates: Sequence[float], dwell_s: Sequence[float]) -> Gaps:
    """A Markov-modulated Poisson process (Heffes & Lucantoni 1986; Fischer & Meier-Hellstern 1993).

    The process stays in a state for an exponential time with a mean of ``dwell_s`` seconds, then goes to one of the
    others, all equally likely. Meanwhile requests arrive at the rate of the state, in requests/s; some rates may be 0.
    The first state is drawn from the stationary distribution, so that the mean rate is the mean of ``rates`` weighted
    by ``dwell_s`` from the start. Raises ``ValueError`` for fewer than two states or unequal lists.
    """
    if len(rates) != len(dwell_s) or len(rates) < 2:
        raise ValueError(f"{len(rates)} rates for {len(dwell_s)} states; at least 2 of both are needed")
    by_state, dwell = np.array(rates, dtype=np.float64), np.array(dwell_s, dtype=np.float64)
    return lambda rng: _Modulated(rng, by_state, dwell).draw


class _Modulated:
    """One run of a Markov-modulated Poisson process.

    The integral of the rate over time maps its arrivals to those of a Poisson process of rate 1 (Cinlar 1975); those
    are drawn and mapped back. States have a random generator of their own, so that the sizes of draws do not matter.
    """

    def __init__(self, rng: np.random.Generator, rates: FloatArray, dwell_s: FloatArray):
        self._arrivals, self._walk = rng.spawn(2)
        self._rates, self._dwell_s = rates, dwell_s
        # All states are visited equally often, so that the share of time in each is proportional to its stay.
        start = np.searchsorted(np.cumsum(dwell_s) / np.sum(dwell_s), self._walk.random(), side="right")
        self._state = min(int(start), len(rates) - 1)
        self._now = self._ended = self._due = self._done = 0.0
        """Times of the last arrival and of the end of the drawn states, then the integral of the rate up to either."""

    def draw(self, n: int) -> FloatArray:
        """Draw the next n gaps, in seconds; shape (n,)."""
        due = moments(self._due, self._arrivals.exponential(size=n))
        times, found = np.empty(n), 0
        if found < n and self._done == 0:
            self._advance()
        while found < n:
            stop = int(np.searchsorted(due, self._done))
            here = due[found:stop]
            stay = np.searchsorted(self._sums[1:], here, side="right")
            since = self._starts[stay] + (here - self._sums[stay]) / self._rates[self._stays[stay]]
            # Rounding must not move an arrival past the end of its state, or the next one could be earlier.
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
        """Draw the next ``_BLOCK`` states and how long each lasts."""
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

    ``profile`` has the relative rates of equal parts of the period, not all 0; the run begins ``phase_s`` seconds into
    the period. Drawn by inversion, as above, since thinning (Lewis & Shedler 1979) wastes draws at hours of low rates.
    """
    share = np.concatenate(([0.0], np.cumsum(profile))) / np.sum(profile)
    return lambda rng: _Daily(rng, rate * period_s, share, period_s, phase_s % period_s).draw


class _Daily:
    """One run of a Poisson process with a periodic rate."""

    def __init__(self, rng: np.random.Generator, requests: float, share: FloatArray, period_s: float, phase_s: float):
        """``requests``: mean number in a period; ``share``: cumulative share at each part's end, (parts + 1,)."""
        self._rng, self._requests, self._share, self._period_s = rng, requests, share, period_s
        self._ends = np.linspace(0.0, period_s, len(share))
        self._now = phase_s
        self._due = requests * float(np.interp(phase_s, self._ends, share))
        """The integral of the rate from the start of the first period up to the last arrival, ``_now``."""

    def draw(self, n: int) -> FloatArray:
        """Draw the next n gaps, in seconds; shape (n,)."""
        due = moments(self._due, self._rng.exponential(size=n))
        periods = np.floor(due / self._requests)
        rest = np.clip(due / self._requests - periods, 0.0, 1.0)
        times = periods * self._period_s + np.interp(rest, self._share, self._ends)
        # Rounding may make a gap slightly negative.
        gaps = np.maximum(np.diff(times, prepend=self._now), 0.0)
        if n:
            self._now, self._due = float(times[-1]), float(due[-1])
        return gaps
