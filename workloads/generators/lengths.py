"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]

MAX_TOKENS = 10**7
"""No request is longer; a longer one in a trace is a damaged row."""
MAX_SUPPORT = 2**20
"""Values that a Zipf distribution can take at most: each has a place in a table."""


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, at least 1."""

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` independent lengths; shape (n,), int64. Drawn in several goes, they are the same."""
        ...

    def at(self, u: FloatArray) -> IntArray:
        """The lengths below which these shares of all lie, each within (0, 1); shape (n,), int64.

        Of uniform shares, these are lengths as ``draw`` gives them; not the same ones.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    value: int

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` times ``value``; draws nothing."""
        return np.full(n, self.value, dtype=np.int64)

    def at(self, u: FloatArray) -> IntArray:
        """``value`` for each."""
        return np.full(len(u), self.value, dtype=np.int64)


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
        return _tokens(rng.lognormal(self.mu, self.sigma, n), self.min, self.max)

    def at(self, u: FloatArray) -> IntArray:
        """The lengths at these shares."""
        # Here and below, so that whoever only runs the engine is spared the memory of scipy.
        from scipy.special import ndtri

        # Whatever overflows is longer than any limit.
        with np.errstate(over="ignore"):
            return _tokens(np.exp(self.mu + self.sigma * ndtri(u)), self.min, self.max)


@dataclass(frozen=True, slots=True)
class Gamma:
    """A gamma distribution with mean ``shape * scale``, rounded, held within ``[min, max]``."""

    shape: float
    scale: float
    """In tokens."""
    min: int = 1
    max: int | None = None

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths; a value outside the limits becomes the limit."""
        return _tokens(rng.gamma(self.shape, self.scale, n), self.min, self.max)

    def at(self, u: FloatArray) -> IntArray:
        """The lengths at these shares."""
        from scipy.special import gammaincinv

        return _tokens(self.scale * gammaincinv(self.shape, u), self.min, self.max)


@dataclass(frozen=True, slots=True)
class Zipf:
    """Zipf's law within limits: k tokens in proportion to ``k ** -exponent``, for k from ``min`` to ``max``.

    Drawn by inversion from a table. Raises ``ValueError`` for limits more than ``MAX_SUPPORT`` values apart.
    """

    exponent: float
    """At least 0, where all lengths are equally likely."""
    min: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max < self.min + MAX_SUPPORT:
            raise ValueError(f"from {self.min} to {self.max}; 1 to {MAX_SUPPORT} values are accepted")

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths."""
        return self.at(rng.random(n))

    def at(self, u: FloatArray) -> IntArray:
        """The lengths at these shares."""
        lengths: IntArray = self.min + np.searchsorted(_zipf_shares(self.exponent, self.min, self.max), u)
        return lengths


@dataclass(frozen=True, slots=True)
class Empirical:
    """Given quantiles in tokens; linear in between, rounded.

    At least two, not decreasing, each at least 1: as published of traces that cannot be published themselves.
    """

    quantiles: Sequence[float]
    shares: Sequence[float] | None = None
    """Of which share each is the quantile, rising from 0 to 1; None: even steps."""

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` lengths."""
        return self.at(rng.random(n))

    def at(self, u: FloatArray) -> IntArray:
        """The lengths at these shares."""
        tokens = np.array(self.quantiles, dtype=np.float64)
        shares = np.linspace(0.0, 1.0, len(tokens)) if self.shares is None else np.array(self.shares)
        return _tokens(np.interp(u, shares, tokens), 1, None)


def _tokens(drawn: NDArray[np.floating], low: int, high: int | None) -> IntArray:
    """Rounded and held within the limits."""
    top = float(MAX_TOKENS) if high is None else float(high)
    tokens: IntArray = np.clip(np.rint(drawn), low, top).astype(np.int64)
    return tokens


@lru_cache(maxsize=16)
def _zipf_shares(exponent: float, low: int, high: int) -> FloatArray:
    """Share of lengths up to each; shape (values,). Kept for a few only, as a table has up to 8 MB."""
    # In units of the shortest, so that no power underflows where it is the largest.
    shares = np.cumsum((np.arange(low, high + 1) / low) ** -exponent)
    shares /= shares[-1]
    shares.setflags(write=False)
    return shares
