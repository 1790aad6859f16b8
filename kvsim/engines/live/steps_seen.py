"""From the times at which tokens came to the steps of the server that made them.

While some requests generate, each step of a server gives every one of them a token. What a client sees of a step is one
token in each stream, at about the same time. Where the client or the server's front end waits for a processor, or an
event has several tokens, the tokens of several steps come at once: only the last of them tells when its step ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.costs.tables import FloatArray

_NEAR = 0.5
"""Tokens that come within this share of a step's seconds belong to one step."""
_AT_ONCE_S = 2e-4
"""A token that comes so soon after another of its stream had waited to be read: no step is so short."""


@dataclass(frozen=True)
class CommonSteps:
    """Steps in a row, each of which gave every stream a token."""

    at_s: FloatArray
    """When they ended: the median over the streams, evenly spread over those that are ``late``; shape (steps,)."""
    first: tuple[int, ...]
    """For each stream, the number of its token in the first of them."""
    apart: NDArray[np.bool_]
    """Whether the tokens of a step came so far apart that it is not certain that they are of one; shape (steps,)."""
    late: NDArray[np.bool_]
    """Whether the tokens of a step came at once with those of the next; shape (steps,)."""

    @property
    def gaps_s(self) -> FloatArray:
        """Seconds of each step after the first; shape (steps - 1,)."""
        return np.diff(self.at_s)

    @property
    def clean(self) -> NDArray[np.bool_]:
        """Whether the beginning and the end of each step after the first were seen; shape (steps - 1,)."""
        return ~(self.apart[1:] | self.apart[:-1]) & (self.gaps_s > 0)


def common_steps(
    streams: Sequence[Sequence[float]], from_s: float = float("-inf"), until_s: float = float("inf")
) -> CommonSteps:
    """The steps from the one in which the last of some streams began, until the first of them ends.

    ``streams``: when each token of each stream came, in order, at least one. Of each stream they begin with the token
    that is nearest to ``from_s``, if that is later, and end with the one nearest to ``until_s``.
    """
    begin = max(from_s, *(times[0] for times in streams))
    first = tuple(_nearest(times, begin) for times in streams)
    steps = min(_nearest(times, until_s) + 1 - i for times, i in zip(streams, first, strict=True))
    if steps < 1:
        return CommonSteps(np.zeros(0), first, *np.zeros((2, 0), dtype=bool))
    table = np.array([[*times, np.inf][i : i + steps + 1] for times, i in zip(streams, first, strict=True)])
    late = np.median(np.diff(table), axis=0) < _AT_ONCE_S
    table = table[:, :-1]
    ends = np.flatnonzero(~late) if not late.all() else np.array([steps - 1])
    at = np.interp(np.arange(steps), ends, np.median(table[:, ends], axis=0))
    gaps = np.concatenate([[np.inf], np.diff(at), [np.inf]])
    apart = ~late & (np.ptp(table, axis=0) > _NEAR * np.minimum(gaps[1:], gaps[:-1]))
    return CommonSteps(at, first, apart, late)


def _nearest(times: Sequence[float], at_s: float) -> int:
    """The number of the time that is nearest to ``at_s``; the earlier of two."""
    i = bisect_left(times, at_s)
    if i == len(times) or (i > 0 and at_s - times[i - 1] <= times[i] - at_s):
        return i - 1
    return i


def windows(clean: Sequence[bool] | NDArray[np.bool_], longest: int, shortest: int) -> list[tuple[int, int]]:
    """Stretches of ``shortest`` to ``longest`` numbers in a row that are all ``clean``: pairs of begin and end."""
    found, begin = [], 0
    for end in range(len(clean) + 1):
        broken = end == len(clean) or not clean[end]
        if (broken or end - begin == longest) and end - begin >= shortest:
            found.append((begin, end))
            begin = end
        if broken:
            begin = end + 1
    return found
