"""Free cells as sorted extents: first-fit search without looking at every cell."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from policies.vocabulary import IntArray

_FEW = 16
"""Up to this many extents are looked at one by one; more as arrays, all together."""


def extents_of_cells(cells: IntArray) -> tuple[IntArray, IntArray]:
    """Starts and ends (exclusive) of the extents that ``cells`` form, which must ascend strictly."""
    if len(cells) == 0:
        return cells, cells
    breaks = (cells[1:] - cells[:-1] != 1).nonzero()[0]
    starts, ends = np.empty((2, len(breaks) + 1), dtype=np.int64)
    ends[-1] = cells[-1]
    ends[:-1] = cells[breaks]
    ends += 1
    starts[0] = cells[0]
    breaks += 1
    starts[1:] = cells[breaks]
    return starts, ends


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

    def arrays(self, first: int = 0, stop: int | None = None) -> tuple[IntArray, IntArray]:
        """Starts and ends of the extents ``first`` to ``stop - 1``, both of shape (n,); not to be written to."""
        # Copies: an array cannot grow while a view of it exists, and a profiler that samples frames keeps views alive.
        return np.asarray(self.starts[first:stop]), np.asarray(self.ends[first:stop])

    def index_after(self, cell: int) -> int:
        """Index of the first extent that ends after ``cell``; ``len(self)`` if there is none."""
        return bisect_right(self.ends, cell)

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
