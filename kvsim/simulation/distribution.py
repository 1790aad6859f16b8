"""Mean and quantiles of values too many to be kept, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

EXACT = 1 << 20
"""Number of values that are kept exactly, 8 bytes each; beyond, they are binned."""
ACCURACY = 0.001
"""Largest relative error of a quantile of binned values."""
LOWEST = 1e-9
HIGHEST = 1e9
"""Range in which the error bound holds; 0 has a bin of its own."""

_BLOCK = 4096
"""Single values that are collected before they are processed together."""
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
"""Upper over lower bound of a bin."""
_LOG_GAMMA = math.log(_GAMMA)
_FIRST = math.ceil(math.log(LOWEST) / _LOG_GAMMA)
_BINS = math.ceil(math.log(HIGHEST) / _LOG_GAMMA) - _FIRST + 1


class Distribution:
    """Mean and quantiles of a stream of finite values, at least 0 (seconds), in bounded memory.

    Up to ``EXACT`` values quantiles are exact. From the next on, values are counted in bins, each ``_GAMMA`` times as
    wide as the one before (Masson, Rim, Lee, "DDSketch: A fast and fully-mergeable quantile sketch with
    relative-error guarantees", VLDB 2019): a quantile is then within ``ACCURACY`` of the exact one, if that lies
    between ``LOWEST`` and ``HIGHEST`` or is 0; what lies outside is counted in the end bins. Mean, minimum and maximum
    are exact in any case. How the values were split into calls makes no difference to any figure.

    Raises ``ValueError`` for a value that is negative, infinite or NaN, at the latest when a figure is asked for.
    """

    __slots__ = (
        "_append",
        "_blocks",
        "_counts",
        "_exact",
        "_high",
        "_lost",
        "_low",
        "_pending",
        "_settled",
        "_total",
    )

    def __init__(self, exact: int = EXACT):
        """``exact``: number of values that are kept before they are binned."""
        self._exact = exact
        self._pending = array("d")
        self._append = self._pending.append
        self._blocks: list[FloatArray] = []
        self._counts: NDArray[np.int64] | None = None
        """Number of values in each bin, the first for 0; None while all are kept."""
        self._settled = 0
        self._total = self._lost = 0.0
        """Sum of the processed values, and its rounding error."""
        self._low, self._high = math.inf, 0.0

    def __len__(self) -> int:
        return self._settled + len(self._pending)

    @property
    def exact(self) -> bool:
        """Whether all values are kept, so that quantiles are exact."""
        return len(self) <= self._exact

    def add(self, value: float) -> None:
        """Add one value."""
        self._append(value)
        if len(self._pending) == _BLOCK:
            self._settle()

    def extend(self, values: FloatArray) -> None:
        """Add many values, in order; shape (n,)."""
        done = 0
        while done < len(values):
            part = values[done : done + _BLOCK - len(self._pending)]
            self._pending.frombytes(part.astype(np.float64).tobytes())
            done += len(part)
            if len(self._pending) == _BLOCK:
                self._settle()

    @property
    def mean(self) -> float | None:
        """The mean, exact up to rounding; None without values."""
        if len(self) == 0:
            return None
        total, lost = _added(self._total, self._lost, float(self._rest().sum()))
        return (total + lost) / len(self)

    def quantiles(self, qs: Sequence[float]) -> list[float]:
        """The quantiles, between neighbouring values by linear interpolation as ``numpy.quantile`` has them.

        Raises ``ValueError`` for a ``q`` outside 0 to 1, and of no values.
        """
        if len(self) == 0:
            raise ValueError("no values, no quantiles")
        rest = self._rest()
        if self.exact:
            found: list[float] = np.quantile(np.concatenate([*self._blocks, rest]), list(qs)).tolist()
            return found
        wanted = np.array(qs, dtype=np.float64)
        if not ((wanted >= 0) & (wanted <= 1)).all():
            raise ValueError("quantiles must be in the range [0, 1]")
        return self._estimated(wanted, rest)

    def _estimated(self, qs: FloatArray, rest: FloatArray) -> list[float]:
        reached = np.cumsum(self._fold() + _counted(rest))
        low, high = min(self._low, float(rest.min(initial=math.inf))), max(self._high, float(rest.max(initial=0.0)))
        last = len(self) - 1
        ranks = qs * last
        below = np.floor(ranks)

        def value(rank: FloatArray) -> FloatArray:
            """Approximately the value of that rank, counted from 0."""
            # The middle of the bin, by relative error from both of its ends.
            bins = np.searchsorted(reached, rank, side="right")
            middle = np.exp((_FIRST + bins - 1.0) * _LOG_GAMMA) * (2 / (1 + _GAMMA))
            about = np.clip(np.where(bins == 0, 0.0, middle), low, high)
            return np.where(rank <= 0, low, np.where(rank >= last, high, about))

        lower = value(below)
        found: list[float] = (lower + (value(np.ceil(ranks)) - lower) * (ranks - below)).tolist()
        return found

    def _rest(self) -> FloatArray:
        """The values that have not been processed yet, checked."""
        return _checked(np.array(self._pending))

    def _settle(self) -> None:
        block = self._rest()
        self._total, self._lost = _added(self._total, self._lost, float(block.sum()))
        self._low, self._high = min(self._low, float(block.min())), max(self._high, float(block.max()))
        self._settled += len(block)
        del self._pending[:]
        if self._settled <= self._exact:
            self._blocks.append(block)
        else:
            counts = self._fold()
            counts += _counted(block)

    def _fold(self) -> NDArray[np.int64]:
        """Move all kept values into bins, and return the bins."""
        if self._counts is None:
            self._counts = np.zeros(_BINS + 1, dtype=np.int64)
        for block in self._blocks:
            self._counts += _counted(block)
        self._blocks.clear()
        return self._counts


def _added(total: float, lost: float, more: float) -> tuple[float, float]:
    """A sum and its rounding error after one addition (Knuth, TAOCP vol. 2, 4.2.2: exact two-sum)."""
    new = total + more
    there = new - total
    return new, lost + ((total - (new - there)) + (more - there))


def _checked(values: FloatArray) -> FloatArray:
    if not ((values >= 0) & (values < math.inf)).all():
        raise ValueError("a value is negative, infinite or not a number")
    return values


def _counted(values: FloatArray) -> NDArray[np.int64]:
    """Number of values in each bin; int64 of shape (_BINS + 1,)."""
    with np.errstate(divide="ignore"):
        bins = np.ceil(np.log(values) / _LOG_GAMMA) - (_FIRST - 1)
    return np.bincount(np.where(values > 0, np.clip(bins, 1, _BINS), 0).astype(np.int64), minlength=_BINS + 1)
