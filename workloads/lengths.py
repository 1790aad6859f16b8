"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]

MAX_TOKENS = 10**7
"""No request is longer; a longer one in a trace is a damaged row."""


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, at least 1."""

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` independent lengths; shape (n,), int64. Drawn in several goes, they are the same."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    value: int

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` times ``value``; draws nothing."""
        return np.full(n, self.value, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp of a normal with mean ``mu`` and deviation ``sigma``, rounded, held within ``[min, max]``.

    The body of nearly every published trace looks like this; the tail is heavier in some.
    """

    mu: float
    sigma: float
    min: int = 1
    max: int | None = None

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths; a value outside the limits becomes the limit."""
        top = float(MAX_TOKENS) if self.max is None else float(self.max)
        return np.clip(np.rint(rng.lognormal(self.mu, self.sigma, n)), self.min, top).astype(np.int64)
