"""Where the cells of each set of an arena lie, so that few of them have to be looked through, or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.vocabulary import Chunk, IntArray

Extent = tuple[int, int, int]
"""Some cells of one set: the first, one past the last, and the distance from one to the next."""

_FEW = 4
"""Where more sets take turns than these, none is long in few pieces."""

_MANY = 16
"""What lies in more pieces than these is looked for in the array instead."""


class SequenceExtents:
    """Of each set, by its index: bounds of its cells, and the pieces that they lie in where those are known."""

    __slots__ = ("high", "low", "pieces", "size")

    def __init__(self, size: int):
        self.size = size
        self.low: list[int] = []
        self.high: list[int] = []
        """From the one up to below the other; rather too wide than too narrow."""
        self.pieces: dict[int, list[Extent]] = {}
        """All cells of a set."""

    def add(self) -> None:
        """There is one more set, without cells."""
        self.low.append(self.size)
        self.high.append(0)

    def holds(self, index: int) -> bool:
        """Whether a set may have cells: certain if not."""
        return self.low[index] < self.high[index]

    def vanish(self, index: int) -> None:
        """A set has no cells any more."""
        self.low[index], self.high[index] = self.size, 0

    def widen(self, index: int, low: int, high: int) -> None:
        """A set may have cells from ``low`` up to below ``high`` too."""
        if low < self.low[index]:
            self.low[index] = low
        if high > self.high[index]:
            self.high[index] = high

    def widen_all(self, indices: Iterable[int], low: int, high: int) -> None:
        """The same of several."""
        lows, highs = self.low, self.high
        for index in indices:
            if low < lows[index]:
                lows[index] = low
            if high > highs[index]:
                highs[index] = high

    def scatter(self) -> None:
        """Those that hold cells may have them anywhere now."""
        self.pieces.clear()
        for index in range(1, len(self.low)):
            if self.low[index] < self.high[index]:
                self.low[index], self.high[index] = 0, self.size

    def forget(self, indices: Iterable[int]) -> None:
        """In which pieces these lie is not worth to know, or not known any more."""
        if self.pieces:
            for index in indices:
                self.pieces.pop(index, None)

    def took(self, indices: Sequence[int], chunks: Sequence[Chunk], first: int, stop: int) -> None:
        """Sets got the cells from ``first`` on, one chunk after another."""
        if len(indices) <= _FEW:
            at = first
            for index, chunk in zip(indices, chunks, strict=True):
                self._got(index, at, at + chunk.n, 1)
                at += chunk.n
        else:
            self.forget(indices)
        self.widen_all(indices, first, stop)

    def took_scattered(self, indices: Sequence[int], cells: IntArray, low: int, high: int) -> None:
        """Sets got these cells, which lie in between."""
        if len(cells) == len(indices) <= _FEW:
            for index, cell in zip(indices, cells.tolist(), strict=True):
                self._got(index, cell, cell + 1, 1)
        else:
            self.forget(indices)
        self.widen_all(indices, low, high)

    def took_turns(self, indices: Sequence[int], low: int, high: int, *, down: bool = False) -> None:
        """Sets got the cells from ``low`` up to below ``high`` in turns, a cell at each, or from the other end."""
        n = len(indices)
        if n > _FEW:
            self.forget(indices)
        elif down:
            for at, index in enumerate(indices):
                self._got(index, low + n - 1 - at, high - at, n)
        else:
            for at, index in enumerate(indices, low):
                self._got(index, at, high, n)
        self.widen_all(indices, low, high)

    def _got(self, index: int, start: int, stop: int, stride: int) -> None:
        """To be told before its bounds, which say whether this is all that it has."""
        pieces = self.pieces.get(index)
        if pieces is None:
            if self.low[index] >= self.high[index]:
                self.pieces[index] = [(start, stop, stride)]
            return
        first, last, apart = pieces[-1]
        if last == start and apart == stride == 1:
            pieces[-1] = (first, stop, 1)
        elif stop == first and apart == stride == 1:
            pieces[-1] = (start, last, 1)
        elif len(pieces) < _MANY:
            pieces.append((start, stop, stride))
        else:
            del self.pieces[index]
