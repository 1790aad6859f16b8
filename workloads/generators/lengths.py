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
"""The most tokens of a prompt or an output; a longer one in a trace is a damaged row."""
MAX_SUPPORT = 2**20
"""The most values that a Zipf distribution can take, since each has an entry in a table."""


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, at least 1."""

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw ``n`` independent lengths; shape (n,), int64. Splitting a call in two gives the same lengths."""
        ...

    def at(self, u: FloatArray) -> IntArray:
        """The quantiles at the shares ``u``, each within (0, 1); shape (n,), int64.

        Uniform random shares give the distribution of ``draw``, but not the same lengths as ``draw``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    value: int

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` times ``value``; uses no random numbers."""
        return np.full(n, self.value, dtype=np.int64)

    def at(self, u: FloatArray) -> IntArray:
        """``value`` for each."""
        return np.full(len(u), self.value, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Capped:
    """Another distribution's lengths, at most ``max``."""

    lengths: Lengths
    max: int

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw ``n`` lengths; longer ones become ``max``."""
        return np.minimum(self.lengths.draw(rng, n), self.max)

    def at(self, u: FloatArray) -> IntArray:
        """The quantiles at the shares ``u``."""
        return np.minimum(self.lengths.at(u), self.max)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution: exp(normal(mu, sigma)), rounded and limited to ``[min, max]``.

    It fits most of nearly every published trace; some have a heavier tail.
    """

    mu: float
    sigma: float
    min: int = 1
    max: int | None = None

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw ``n`` lengths; values outside the limits become the limit."""
        return _tokens(rng.lognormal(self.mu, self.sigma, n), self.min, self.max)

    def at(self, u: FloatArray) -> IntArray:
        """The quantiles at the shares ``u``."""
        # Imported here: SciPy takes long to load, and most workloads never need it.
        from scipy.special import ndtri

        # A value that overflows is above any limit.
        with np.errstate(over="ignore"):
            return _tokens(np.exp(self.mu + self.sigma * ndtri(u)), self.min, self.max)


@dataclass(frozen=True, slots=True)
class Gamma:
    """A gamma distribution with mean ``shape * scale``, rounded and limited to ``[min, max]``."""

    shape: float
    scale: float
    """In tokens."""
    min: int = 1
    max: int | None = None

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw ``n`` lengths; values outside the limits become the limit."""
        return _tokens(rng.gamma(self.shape, self.scale, n), self.min, self.max)

    def at(self, u: FloatArray) -> IntArray:
        """The quantiles at the shares ``u``."""
        from scipy.special import gammaincinv

        return _tokens(self.scale * gammaincinv(self.shape, u), self.min, self.max)


@dataclass(frozen=True, slots=True)
class Zipf:
    """Zipf's law on ``min`` to ``max``: k tokens with a probability proportional to ``k ** -exponent``.

    Drawn by inversion of a table. Raises ``ValueError`` if there are more than ``MAX_SUPPORT`` values.
    """

    exponent: float
    """At least 0; with 0, all lengths are equally likely."""
    min: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max < self.min + MAX_SUPPORT:
            raise ValueError(f"from {self.min} to {self.max}; 1 to {MAX_SUPPORT} values are accepted")

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw ``n`` lengths."""
        return self.at(rng.random(n))

    def at(self, u: FloatArray) -> IntArray:
        """The quantiles at the shares ``u``."""
        lengths: IntArray = self.min + np.searchsorted(_zipf_shares(self.exponent, self.min, self.max), u)
        return lengths


@dataclass(frozen=True, slots=True)
class Empirical:
    """A distribution given by its quantiles in tokens, linear in between, rounded.

    There are two quantiles or more, in rising order, each at least 1. Such quantiles are sometimes published for
    traces that are not.
    """

    quantiles: Sequence[float]
    shares: Sequence[float] | None = None
    """The share that each quantile belongs to, rising from 0 to 1; None or empty: even steps."""

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw ``n`` lengths."""
        return self.at(rng.random(n))

    def at(self, u: FloatArray) -> IntArray:
        """The quantiles at the shares ``u``."""
        tokens = np.array(self.quantiles, dtype=np.float64)
        shares = np.array(self.shares) if self.shares else np.linspace(0.0, 1.0, len(tokens))
        return _tokens(np.interp(u, shares, tokens), 1, None)


def _tokens(drawn: NDArray[np.floating], low: int, high: int | None) -> IntArray:
    """Round the lengths and limit them to ``[low, high]``."""
    top = float(MAX_TOKENS) if high is None else float(high)
    tokens: IntArray = np.clip(np.rint(drawn), low, top).astype(np.int64)
    return tokens


@lru_cache(maxsize=16)
def _zipf_shares(exponent: float, low: int, high: int) -> FloatArray:
    """The distribution function at each value; shape (values,). Few are cached, since a table takes up to 8 MB."""
    # Relative to ``low``, so that the largest power is 1 and does not underflow.
    shares = np.cumsum((np.arange(low, high + 1) / low) ** -exponent)
    shares /= shares[-1]
    shares.setflags(write=False)
    return shares
