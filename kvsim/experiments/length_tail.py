"""How long requests may become that were not seen: the tail of their lengths, fitted.

Source of the fit: Hosking, Wallis, "Parameter and quantile estimation for the generalized Pareto distribution",
Technometrics 29(3), 1987 (probability-weighted moments).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvsim.experiments.interval_text import plain

CHANCE = 1e-4
"""The share of requests that may be longer than what is made room for."""
_TAIL, _FEWEST, _SHAPED = 0.1, 20, 50
"""The share of the lengths that the tail is fitted to, how many at least, and how many tell its shape."""
_HEAVIEST = 0.5
"""Shapes above this have no variance."""


class Headroom(NamedTuple):
    """How many tokens a request may need."""

    tokens: int
    chance: float
    """The chance that a request is longer, by the fitted tail and by the number of requests that were seen."""
    seen: int
    longest: int
    """The longest that was seen."""

    @property
    def said(self) -> str:
        """The tail in words."""
        few = "" if _TAIL * self.seen >= _SHAPED else ", as far as so few tell"
        return (
            f"room for {self.tokens:,} tokens: of {self.seen:,} requests the longest has {self.longest:,}; by their "
            f"tail one in {plain(1 / self.chance, 2)} is longer still{few}"
        )


def headroom(lengths: Sequence[int]) -> Headroom:
    """The length that one request in 10,000 exceeds, by a generalised Pareto tail, but no less than the longest seen.

    ``lengths``: of shape (n,), in tokens. A tail is taken to fall no faster than exponentially, and just so where it
    has fewer than 50 lengths: what was not seen in few requests may still come.
    """
    x = np.sort(np.asarray(lengths, dtype=np.float64))
    n, longest = len(x), int(x[-1])
    k = min(max(math.ceil(_TAIL * n), _FEWEST), n // 2)
    if k < 2 or x[-1] == x[-k - 1]:
        return Headroom(longest, max(1 / (n + 1), CHANCE), n, longest)
    threshold, above = float(x[-k - 1]), x[-k:] - x[-k - 1]
    mean = float(above.mean())
    # Weighted by the share of the sample that is longer: a1 = E[X (1 - F(X))].
    weighted = float((above * np.arange(k - 1, -1, -1) / (k - 1)).mean())
    told = k >= _SHAPED and mean > 2 * weighted
    shape = min(max(2 - mean / (mean - 2 * weighted), 0.0), _HEAVIEST) if told else 0.0
    scale = mean * (1 - shape)
    rarer = CHANCE * n / k
    reach = -math.log(rarer) if shape < 1e-6 else (rarer**-shape - 1) / shape
    tokens = max(longest, math.ceil(threshold + scale * reach))
    beyond = (tokens - threshold) / scale
    share = math.exp(-beyond) if shape < 1e-6 else (1 + shape * beyond) ** (-1 / shape)
    return Headroom(tokens, min(k / n * share, CHANCE), n, longest)
