"""The pace of a machine over time, from reference passes timed among other measurements.

A virtual machine's speed can change twofold within seconds. Whatever is measured is divided by the pace at its moment,
so that measurements of slow and of fast moments tell the same cost.

Passes of few tokens are bound by memory, passes of many by arithmetic, and both need not slow down alike. The pace is
therefore a level, the geometric mean of the two, and their ratio; each is smoothed over a window of its own, as wide as
predicts a reference pass best from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvsim.costs.tables import FloatArray

DECODE_TOKENS, PROMPT_TOKENS = 2, 32
"""Tokens of the two reference passes."""

WINDOWS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 1e6)
"""Standard deviations of the windows to choose from; the last is the mean over all."""
_AS_GOOD = 1.03
"""Error over that of the best window at which another one is as good."""
_NEIGHBOURS = 2
"""Neighbours on each side by which an outlier is recognised."""
_OUTLIER = 0.3
"""Largest logarithm of a reference pass over the median of its neighbourhood."""


class Tick(NamedTuple):
    """One measurement of the reference passes."""

    at_s: float
    """When, on the clock of what was measured among them."""
    seconds: tuple[float, float]
    """Seconds of the decode and of the prompt."""


class Windows(NamedTuple):
    """Standard deviations, in seconds, of the windows over which level and ratio are smoothed."""

    level_s: float
    ratio_s: float


class PaceCurve:
    """The pace over one uninterrupted stretch of time: seconds now over seconds at the known pace."""

    def __init__(self, ticks: Sequence[Tick], known_s: Sequence[float], windows: Windows):
        """``known_s``: seconds of the two reference passes at pace 1. At least one tick is needed."""
        self._at, self._level, self._ratio = _logarithms(ticks, known_s)
        self._windows = windows

    def at(self, at_s: ArrayLike, tokens: ArrayLike) -> FloatArray:
        """Pace of passes of ``tokens`` tokens at these moments; both of shape (n,), float64 of shape (n,)."""
        moments = np.atleast_1d(np.asarray(at_s, dtype=float))
        level = smoothed(moments, self._at, self._level, self._windows.level_s)
        ratio = smoothed(moments, self._at, self._ratio, self._windows.ratio_s)
        pace: FloatArray = np.exp(level + ratio * (_prompt_share(tokens) - 0.5))
        return pace

    def levels(self) -> FloatArray:
        """The smoothed level at each tick; shape (n_ticks,)."""
        level: FloatArray = np.exp(smoothed(self._at, self._at, self._level, self._windows.level_s))
        return level


def choose_windows(stretches: Sequence[Sequence[Tick]], known_s: Sequence[float]) -> Windows:
    """The windows that predict each tick best from the others of its stretch of time."""
    found = [_logarithms(ticks, known_s) for ticks in stretches if len(ticks) > _NEIGHBOURS]

    level, ratio = (best_window([(each[0], each[values]) for each in found]) for values in (1, 2))
    return Windows(level_s=level, ratio_s=ratio)


def best_window(stretches: Sequence[tuple[FloatArray, FloatArray]]) -> float:
    """The window that predicts each value best from the others of its stretch: pairs of moments and values."""
    errors = [sum(_left_out_error(at, values, window) for at, values in stretches) for window in WINDOWS_S]
    # Of windows that predict about as well, the widest adds least noise.
    return [window for window, error in zip(WINDOWS_S, errors, strict=True) if error <= _AS_GOOD * min(errors)][-1]


def median_seconds(stretches: Sequence[Sequence[Tick]]) -> tuple[float, float]:
    """Median seconds of both reference passes over all ticks."""
    decode, prompt = np.median([tick.seconds for ticks in stretches for tick in ticks], axis=0).tolist()
    return decode, prompt


def _prompt_share(tokens: ArrayLike) -> FloatArray:
    """How much a pass of so many tokens is like the prompt rather than like the decode, from 0 to 1."""
    doublings = np.log2(np.maximum(np.asarray(tokens, dtype=float), 1) / DECODE_TOKENS)
    share: FloatArray = np.clip(doublings / np.log2(PROMPT_TOKENS / DECODE_TOKENS), 0, 1)
    return share


def _logarithms(ticks: Sequence[Tick], known_s: Sequence[float]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Moments, and logarithms of level and ratio; each of shape (n_ticks,)."""
    at = np.array([tick.at_s for tick in ticks])
    decode, prompt = (clipped(each) for each in np.log(np.array([tick.seconds for tick in ticks]) / known_s).T)
    return at, (decode + prompt) / 2, prompt - decode


def clipped(values: FloatArray) -> FloatArray:
    """Values no further than an outlier's bound from the median of their neighbourhood."""
    padded = np.pad(values, _NEIGHBOURS, mode="edge")
    around = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBOURS + 1), axis=1)
    clipped: FloatArray = np.clip(values, around - _OUTLIER, around + _OUTLIER)
    return clipped


def smoothed(moments: FloatArray, at: FloatArray, values: FloatArray, window_s: float) -> FloatArray:
    """Mean of the values weighted by a normal window around each moment; the nearest one where none is in reach."""
    return _weights(-0.5 * ((moments[:, None] - at) / window_s) ** 2) @ values


def _left_out_error(at: FloatArray, values: FloatArray, window_s: float) -> float:
    """Sum of the absolute errors of predicting each value from the others."""
    exponent = -0.5 * ((at[:, None] - at) / window_s) ** 2
    np.fill_diagonal(exponent, -np.inf)
    return float(np.abs(_weights(exponent) @ values - values).sum())


def _weights(exponent: FloatArray) -> FloatArray:
    """Weights of each row, which add up to 1; shape as given."""
    weights = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    normalised: FloatArray = weights / weights.sum(axis=1, keepdims=True)
    return normalised
