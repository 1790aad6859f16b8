"""Where the cells of each set of sequences are, so that few cells or none need to be searched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.vocabulary import Chunk, IntArray

Extent = tuple[int, int, int]
"""Some cells of one set: the first, one past the last, and the distance from each to the next."""

_FEW_SETS = 4
"""Where more sets than these are written together, their extents would soon be too many to keep."""

_MOST_EXTENTS = 16
"""The cells of a set with more extents than these are searched for instead."""


class SequenceExtents:
    """For each set, by its index: bounds of its cells, and the extents that they form where those are known."""

    __slots__ = ("high", "known", "low", "size")

    def __init__(self, size: int):
        self.size = size
        self.low: list[int] = []
        """No cell of the set is below this one."""
        self.high: list[int] = []
        """All cells of the set are below this one; it has none where this is not above ``low``."""
        self.known: dict[int, list[Extent]] = {}
        """All cells of a set, for the sets whose extents are known."""

    def reset(self) -> None:
        """Forget all sets."""
        self.low.clear()
        self.high.clear()
        self.known.clear()

    def add_set(self) -> None:
        """Add the next set, which has no cells yet."""
        self.low.append(self.size)
        self.high.append(0)

    def may_have_cells(self, index: int) -> bool:
        """Whether a set may have cells: certain if False."""
        return self.low[index] < self.high[index]

    def set_empty(self, index: int) -> None:
        """Note that a set has no cells any more."""
        self.low[index], self.high[index] = self.size, 0

    def widen(self, index: int, low: int, high: int) -> None:
        """Note that a set may have cells in ``[low, high)`` too."""
        if low < self.low[index]:
            self.low[index] = low
        if high > self.high[index]:
            self.high[index] = high

    def widen_all(self, indices: Iterable[int], low: int, high: int) -> None:
        """Note that several sets may have cells in ``[low, high)`` too."""
        lows, highs = self.low, self.high
        for index in indices:
            if low < lows[index]:
                lows[index] = low
            if high > highs[index]:
                highs[index] = high

    def widen_to_all_cells(self) -> None:
        """Note that any set that has cells may have them anywhere now."""
        self.known.clear()
        for index in range(1, len(self.low)):
            if self.low[index] < self.high[index]:
                self.low[index], self.high[index] = 0, self.size

    def forget(self, indices: Iterable[int]) -> None:
        """Forget the extents of some sets, but not their bounds."""
        if self.known:
            for index in indices:
                self.known.pop(index, None)

    def add_chunks(self, indices: Sequence[int], chunks: Sequence[Chunk], first: int, stop: int) -> None:
        """Note that the chunks of some sets fill ``[first, stop)``, in order."""
        if len(indices) <= _FEW_SETS:
            at = first
            for index, chunk in zip(indices, chunks, strict=True):
                self._append(index, at, at + chunk.n, 1)
                at += chunk.n
        else:
            self.forget(indices)
        self.widen_all(indices, first, stop)

    def add_cells(self, indices: Sequence[int], cells: IntArray, low: int, high: int) -> None:
        """Note that some sets got ``cells``, all of which are in ``[low, high)``."""
        if len(cells) == len(indices) <= _FEW_SETS:
            for index, cell in zip(indices, cells.tolist(), strict=True):
                self._append(index, cell, cell + 1, 1)
        else:
            self.forget(indices)
        self.widen_all(indices, low, high)

    def add_interleaved(self, indices: Sequence[int], low: int, high: int, *, descending: bool = False) -> None:
        """Note that some sets fill ``[low, high)`` in turn, a cell each time; ``descending``: from the high end."""
        n = len(indices)
        if n > _FEW_SETS:
            self.forget(indices)
        elif descending:
            for at, index in enumerate(indices):
                self._append(index, low + n - 1 - at, high - at, n)
        else:
            for at, index in enumerate(indices, low):
                self._append(index, at, high, n)
        self.widen_all(indices, low, high)

    def _append(self, index: int, start: int, stop: int, stride: int) -> None:
        """Add an extent. Comes before ``widen``: the bounds say whether this is all that the set has."""
        extents = self.known.get(index)
        if extents is None:
            if self.low[index] >= self.high[index]:
                self.known[index] = [(start, stop, stride)]
            return
        first, last, distance = extents[-1]
        if last == start and distance == stride == 1:
            extents[-1] = (first, stop, 1)
        elif stop == first and distance == stride == 1:
            extents[-1] = (start, last, 1)
        elif len(extents) < _MOST_EXTENTS:
            extents.append((start, stop, stride))
        else:
            del self.known[index]
