"""Piecewise linear tables of seconds by number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Batch sizes in tokens between which the cost of matrix work is linear; it is 0 for one token, and the last slope
goes on."""

ATTENTION_KNOTS = (1, 2, 4, 8, 16, 64, 512, 2048, 8192)
"""Numbers of tokens that scan the same cells together, between which the cost of a cell is linear."""


def knots_within(knots: Sequence[int], most: int) -> tuple[int, ...]:
    """The knots up to the first one that is not below ``most`` tokens, but two at least.

    Nothing is known of the segments behind it: the slope of the last one goes on.
    """
    reached = sum(knot < most for knot in knots) + 1
    return tuple(knots[: max(reached, 2)])


def segments(tokens: ArrayLike, knots: Sequence[int]) -> FloatArray:
    """Number of ``tokens`` in each segment between knots; float64 of shape (len(tokens), len(knots) - 1).

    The last segment has no end.
    """
    given = np.asarray(tokens)
    bounds = [(low, high) for low, high in pairwise(knots)]
    bounds[-1] = (bounds[-1][0], np.iinfo(np.int64).max)
    return np.stack([np.clip(given, low, high) - low for low, high in bounds], axis=-1).astype(float)


def seconds_of_each(
    first_s: float,
    slopes_s: Sequence[float],
    knots: Sequence[int],
    behind: tuple[int, float, float] | None,
    stop: int,
) -> FloatArray:
    """Seconds for 0, 1, ..., ``stop - 1`` tokens: none for 0, then linear between knots; shape (stop,).

    ``first_s``: seconds of one token; ``slopes_s``: seconds of each further token, by segment. ``behind``: a number of
    tokens from which on another line holds: its seconds of one and of each further token.
    """
    tokens = np.arange(stop)
    seconds = np.full(stop, first_s)
    for slope, (low, high) in zip(slopes_s, pairwise((*knots[:-1], max(stop, knots[-1]))), strict=True):
        seconds += slope * (np.clip(tokens, low, high) - low)
    if behind is not None:
        start, first, slope = behind
        seconds[start:] = first + slope * (tokens[start:] - 1)
    seconds[0] = 0.0
    return seconds
