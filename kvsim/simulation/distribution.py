"""Mean and quantiles of values too many to be kept, and means over time of states, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
_Sum = TypeVar("_Sum", float, FloatArray)

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


class TimeMean:
    """Means over time of the columns of a state that changes now and then, in bounded memory unless states are kept.

    Raises ``ValueError`` for times that go back, at the latest when the means are asked for.
    """

    __slots__ = ("_begin", "_kept", "_lasts", "_n_settled", "_names", "_pending", "_settled", "_size")

    def __init__(self, names: Sequence[str], *, keeps: bool = False):
        """``names``: names of the columns, in order; ``keeps``: keep all states, for means from any time on."""
        self._names = tuple(names)
        self._kept: list[FloatArray] | None = [] if keeps else None
        self._lasts: dict[int, tuple[float, ...]] = {}
        """The last state of each that is a mean of several, by its number."""
        self._n_settled = 0
        """Number of states that have been processed."""
        self._size = _BLOCK * (1 + len(names))
        self._pending: list[float] = []
        """Start and columns of each state that has not been processed yet, flat; a list grows fastest."""
        self._settled: _Spent | None = None
        self._begin = -math.inf

    def hold(self, start_s: float, values: tuple[float, ...]) -> None:
        """From ``start_s`` on the state is this, a number for each column, until the next one.

        One that starts at the same time as the next has lasted for 0 s.
        """
        pending = self._pending
        pending.append(start_s)
        pending += values
        if len(pending) == self._size:
            self._settle()

    def hold_mean(self, start_s: float, values: tuple[float, ...], last: tuple[float, ...]) -> None:
        """From ``start_s`` until the next there are several states, whose mean this is; ``last``: the last of them."""
        if self._kept is not None:
            self._lasts[self._n_settled + len(self._pending) // (1 + len(self._names))] = last
        self.hold(start_s, values)

    def extend(self, starts_s: FloatArray, columns: Sequence[NDArray[np.generic]]) -> None:
        """Many states, as if held one after another; all arrays of shape (steps,)."""
        rows = np.column_stack((starts_s, *columns)).astype(np.float64).ravel()
        done = 0
        while done < len(rows):
            part = rows[done : done + self._size - len(self._pending)]
            self._pending += part.tolist()
            done += len(part)
            if len(self._pending) == self._size:
                self._settle()

    def begin(self, begin_s: float) -> None:
        """Give no weight to anything before ``begin_s``; the state that holds then counts from there on.

        Raises ``ValueError`` if states that began before and after ``begin_s`` have been held already: in bounded
        memory the former cannot be told from the latter any more.
        """
        self._settle()
        if self._settled is not None and self._settled.since_s < begin_s:
            if self._settled.start_s > begin_s:
                raise ValueError(f"cannot begin at {begin_s} s: a state from {self._settled.start_s} s on is known")
            self._settled = self._settled._replace(total=np.zeros(len(self._names)), lost=np.zeros(len(self._names)))
        self._begin = begin_s

    def means(self) -> dict[str, float] | None:
        """Each column's mean over time, from the beginning to the last change: the last state has no weight.

        None where no time has passed until then.
        """
        spent = self._spent()
        if spent is None:
            return None
        seconds = spent.start_s - max(spent.since_s, self._begin)
        if seconds <= 0:
            return None
        return dict(zip(self._names, ((spent.total + spent.lost) / seconds).tolist(), strict=True))

    def rows(self) -> FloatArray:
        """All states that were kept, the start first in each; shape (states, 1 + columns)."""
        assert self._kept is not None, "the states are kept"
        return np.concatenate([*self._kept, self._rows()])

    def means_between(self, start_s: float, end_s: float) -> dict[str, float] | None:
        """Each column's mean over time from ``start_s`` to ``end_s``; None where no time passes.

        Where a mean of several states is held at ``start_s``, it must be within the last of them. States must be kept.
        """
        rows = self.rows()
        starts, states = rows[:, 0], rows[:, 1:]
        lasted = np.diff(np.clip(np.append(starts, end_s), start_s, end_s))
        seconds = float(lasted.sum())
        if seconds <= 0:
            return None
        at_start = int(np.searchsorted(starts, start_s, side="right")) - 1
        if at_start in self._lasts:
            states[at_start] = self._lasts[at_start]
        # BLAS would sum in an order that depends on its threads.
        totals = [float((lasted * column).sum()) for column in states.T]
        return {name: total / seconds for name, total in zip(self._names, totals, strict=True)}

    def _settle(self) -> None:
        rows = self._rows()
        self._settled = self._spent()
        self._n_settled += len(rows)
        if self._kept is not None:
            self._kept.append(rows)
        self._pending.clear()

    def _rows(self) -> FloatArray:
        """The states that have not been processed yet."""
        return np.array(self._pending, dtype=np.float64).reshape(-1, 1 + len(self._names))

    def _spent(self) -> _Spent | None:
        """The sums over all states so far; None without any."""
        rows = self._rows()
        before = self._settled
        if before is not None:
            rows = np.vstack(((before.start_s, *before.state), rows))
        elif len(rows) == 0:
            return None
        else:
            before = _Spent(float(rows[0, 0]), 0.0, rows[0, 1:], np.zeros(len(self._names)), np.zeros(len(self._names)))
        starts, states = rows[:, 0], rows[:, 1:]
        if not (starts[1:] >= starts[:-1]).all():
            raise ValueError("a state starts earlier than the one before")
        lasted = np.diff(np.maximum(starts, self._begin))
        total, lost = _added(before.total, before.lost, (states[:-1] * lasted[:, None]).sum(axis=0))
        return _Spent(before.since_s, float(starts[-1]), states[-1].copy(), total, lost)


class _Spent(NamedTuple):
    """Sums over the states so far."""

    since_s: float
    """Start of the first state, seconds."""
    start_s: float
    """Start of the last state, seconds."""
    state: FloatArray
    """The last state; shape (columns,), like the next two."""
    total: FloatArray
    """Sum over all states but the last of each column times the seconds that it held."""
    lost: FloatArray
    """Rounding error of that sum."""


def _added(total: _Sum, lost: _Sum, more: _Sum) -> tuple[_Sum, _Sum]:
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
