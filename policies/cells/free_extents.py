"""Free cells as sorted extents: first-fit search without looking at every cell."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from policies.vocabulary import IntArray

_FEW = 16
"""Up to this many extents are taken or released singly; more are merged as arrays, all together."""


def extents_of_cells(cells: IntArray) -> tuple[IntArray, IntArray]:
    """Starts and ends (exclusive) of the extents that ``cells`` form, which must ascend strictly."""
    if len(cells) == 0:
        return cells, cells
    return _extents_between(cells, (cells[1:] - cells[:-1] != 1).nonzero()[0])


def _extents_between(cells: IntArray, breaks: IntArray) -> tuple[IntArray, IntArray]:
    """Extents of at least one cell, given the indices of their last cells but the very last; overwrites ``breaks``."""
    starts, ends = np.empty((2, len(breaks) + 1), dtype=np.int64)
    ends[-1] = cells[-1]
    ends[:-1] = cells[breaks]
    ends += 1
    starts[0] = cells[0]
    breaks += 1
    starts[1:] = cells[breaks]
    return starts, ends


def _extents_of_unsorted(cells: IntArray) -> tuple[IntArray, IntArray]:
    if len(cells) > 1 and (cells[1:] < cells[:-1]).any():
        cells = np.sort(cells)
    return extents_of_cells(cells)


class FreeExtents:
    """Disjoint extents ``[start, end)`` of free cells, ascending, no two of them adjacent."""

    __slots__ = ("ends", "size", "starts", "total")

    def __init__(self, size: int):
        self.size = size
        # Arrays of the standard library: as quick as lists by element, and NumPy can use their memory.
        self.starts: array[int] = array("q", (0,))
        self.ends: array[int] = array("q", (size,))
        self.total = size
        """Number of free cells."""

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.ends, strict=True)

    @property
    def largest(self) -> int:
        """Length of the largest extent; 0 if there is none."""
        if len(self.starts) <= _FEW:
            return max(map(int.__sub__, self.ends, self.starts), default=0)
        starts, ends = self.arrays()
        return int((ends - starts).max())

    @property
    def top(self) -> int:
        """One past the highest cell that is not free."""
        if self.ends and self.ends[-1] == self.size:
            return self.starts[-1]
        return self.size

    def arrays(self, first: int = 0, stop: int | None = None) -> tuple[IntArray, IntArray]:
        """Starts and ends of the extents ``first`` to ``stop - 1``, both of shape (n,); not to be written to."""
        # Copies: an array cannot grow while a view of it exists, and a profiler that samples frames keeps views alive.
        return np.asarray(self.starts[first:stop]), np.asarray(self.ends[first:stop])

    def below(self, cells: IntArray) -> IntArray:
        """Number of free cells below each of ``cells``; the same shape."""
        starts, ends = self.arrays()
        if len(starts) == 0:
            return np.zeros_like(cells)
        upto = np.cumsum(ends - starts)
        at = np.searchsorted(starts, cells, side="right") - 1
        # Of the last extent that begins before the cell, the part from the cell on does not count.
        beyond = np.maximum(ends[at] - cells, 0)
        return np.where(at < 0, 0, upto[at] - beyond)

    def count_below(self, cell: int) -> int:
        """Number of free cells below ``cell``."""
        if len(self.starts) > _FEW:
            starts, ends = self.arrays()
            n = bisect_left(self.starts, cell)
            return int(np.minimum(ends[:n], cell).sum() - starts[:n].sum())
        return sum(min(end, cell) - start for start, end in self if start < cell)

    def index_after(self, cell: int) -> int:
        """Index of the first extent that ends after ``cell``; ``len(self)`` if there is none."""
        return bisect_right(self.ends, cell)

    def index_before(self, cell: int) -> int:
        """Index of the last extent that starts before ``cell``; -1 if there is none."""
        return bisect_left(self.starts, cell) - 1

    def is_free(self, start: int, n: int) -> bool:
        """Whether cells ``[start, start + n)`` are free."""
        i = bisect_right(self.ends, start)
        return i < len(self.ends) and self.starts[i] <= start and self.ends[i] - start >= n

    def first_of(self, n: int, index: int, stop: int | None = None) -> int | None:
        """Index of the first extent of at least ``n`` cells from ``index`` to ``stop - 1``; None if there is none."""
        starts, ends = self.starts, self.ends
        stop = len(starts) if stop is None else stop
        few = min(index + _FEW // 2, stop)
        for i in range(index, few):
            if ends[i] - starts[i] >= n:
                return i
        if few >= stop:
            return None
        first, last = self.arrays(few, stop)
        wide = last - first >= n
        i = int(wide.argmax())
        return few + i if wide[i] else None

    def best_of(self, n: int) -> int | None:
        """Index of the smallest extent of at least ``n`` cells, the first among equals; None if there is none."""
        at = self.first_of(n, 0)
        if at is None or at + 1 == len(self):
            return at
        starts, ends = self.arrays(at)
        sizes = ends - starts
        sizes[sizes < n] = self.size + 1
        return at + int(sizes.argmin())

    def take(self, start: int, n: int) -> None:
        """Remove cells ``[start, start + n)``, which must be in one extent."""
        i = self.index_after(start)
        first, end = self.starts[i], self.ends[i]
        stop = start + n
        assert first <= start < stop <= end, "cells taken twice"
        if first == start and stop == end:
            del self.starts[i], self.ends[i]
        elif first == start:
            self.starts[i] = stop
        elif stop == end:
            self.ends[i] = start
        else:
            self.starts.insert(i + 1, stop)
            self.ends.insert(i, start)
        self.total -= n

    def rebuild(self, used: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Start again from a mask of the cells that are not free; all cells after the mask are free."""
        edges: list[IntArray] = [(used[1:] != used[:-1]).nonzero()[0] + 1]
        if len(used) == 0 or not used[0]:
            edges.insert(0, np.zeros(1, dtype=np.int64))
        if len(used) and used[-1]:
            edges.append(np.array([len(used)]))
        edges.append(np.array([self.size]))
        self._set(np.concatenate(edges))
        if self.starts and self.starts[-1] == self.size:
            del self.starts[-1], self.ends[-1]
        self.total = self.size - int(np.count_nonzero(used))

    def take_cells(self, cells: IntArray) -> None:
        """Remove ``cells``, distinct and all free, in any order."""
        if len(cells) and self._take_all(cells):
            return
        starts, ends = _extents_of_unsorted(cells)
        if len(starts) <= _FEW:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self.take(start, end - start)
        else:
            self._toggle(starts, ends)
            self.total -= len(cells)

    def _take_all(self, cells: IntArray) -> bool:
        """Remove ``cells`` if they ascend and no other cell between them is free, as most searches find them.

        Returns whether they were removed.
        """
        starts, ends, start, stop = self.starts, self.ends, int(cells[0]), int(cells[-1]) + 1
        first = bisect_right(ends, start)
        last = bisect_left(starts, stop, first)
        left, right = starts[first], ends[last - 1]
        lengths = np.asarray(ends)[first:last] - np.asarray(starts)[first:last]
        free = int(lengths.sum()) - (start - left) - (right - stop)
        if free != len(cells) or not (cells[1:] > cells[:-1]).all():
            return False
        rest = [extent for extent in ((left, start), (stop, right)) if extent[0] < extent[1]]
        starts[first:last] = array("q", [extent[0] for extent in rest])
        ends[first:last] = array("q", [extent[1] for extent in rest])
        self.total -= len(cells)
        return True

    def release(self, cells: IntArray) -> None:
        """Give back ``cells``, distinct and none of them free, in any order."""
        if len(cells) == 0:
            return
        distances = cells[1:] - cells[:-1]
        breaks = (distances != 1).nonzero()[0]
        if len(breaks) < _FEW:
            # Few extents, in any order: adjacent ones are joined as they come.
            start = int(cells[0])
            for at in breaks.tolist():
                self._release_extent(start, int(cells[at]) + 1)
                start = int(cells[at + 1])
            self._release_extent(start, int(cells[-1]) + 1)
        elif (distances[breaks] < 0).any():
            self._toggle(*extents_of_cells(np.sort(cells)))
        else:
            self._toggle(*_extents_between(cells, breaks))
        self.total += len(cells)

    def release_strided(self, extents: Sequence[tuple[int, int, int]]) -> None:
        """Give back cells ``range(start, stop, stride)`` for each extent (start, stop, stride); none is free."""
        single = sum([(stop - start - 1) // stride for start, stop, stride in extents if stride > 1])
        if single + len(extents) <= _FEW:
            for start, stop, stride in extents:
                if stride == 1:
                    self._release_extent(start, stop)
                    self.total += stop - start
                else:
                    cells = range(start, stop, stride)
                    for cell in cells:
                        self._release_extent(cell, cell + 1)
                    self.total += len(cells)
            return
        starts, ends = [], []
        for start, stop, stride in extents:
            cells_of = np.arange(start, stop, stride) if stride > 1 else np.array([start])
            starts.append(cells_of)
            ends.append(cells_of + (1 if stride > 1 else stop - start))
            self.total += len(cells_of) if stride > 1 else stop - start
        self._toggle(np.concatenate(starts), np.concatenate(ends))

    def give_back(self, start: int, n: int) -> None:
        """Give back cells ``[start, start + n)``, none of them free."""
        self._release_extent(start, start + n)
        self.total += n

    def _release_extent(self, start: int, end: int) -> None:
        starts, ends = self.starts, self.ends
        i = bisect_right(ends, start)
        joins_left = i > 0 and ends[i - 1] == start
        joins_right = i < len(starts) and starts[i] == end
        if joins_left and joins_right:
            ends[i - 1] = ends[i]
            del starts[i], ends[i]
        elif joins_left:
            ends[i - 1] = end
        elif joins_right:
            starts[i] = start
        else:
            starts.insert(i, start)
            ends.insert(i, end)

    def _toggle(self, starts: IntArray, ends: IntArray) -> None:
        """Make the cells of some extents used if they were free, and free if they were used.

        Every border of an extent, old or new, stays one unless an old and a new one coincide.
        """
        # Extents that end before the first of these or start after the last stay as they are.
        first = bisect_left(self.ends, int(starts.min()))
        last = bisect_right(self.starts, int(ends.max()), first)
        edges = np.concatenate((np.asarray(self.starts)[first:last], np.asarray(self.ends)[first:last], starts, ends))
        # A stable sort merges a few ascending rows quickly.
        edges.sort(kind="stable")
        stays = np.ones(len(edges), dtype=np.bool_)
        np.not_equal(edges[1:], edges[:-1], out=stays[1:])
        stays[:-1] &= stays[1:]
        self._set(edges[stays], first, last)

    def _set(self, edges: IntArray, first: int = 0, last: int | None = None) -> None:
        """Replace some extents, or all, by others given as start, end, start, end, ..., ascending."""
        self.starts[first:last], self.ends[first:last] = (array("q", edges[i::2].tobytes()) for i in (0, 1))
