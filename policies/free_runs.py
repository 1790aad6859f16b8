"""The free cells of an arena as sorted runs: first-fit search without looking at every cell."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice

import numpy as np

from policies.vocabulary import IntArray

_FEW = 16
"""Up to this many runs are returned one by one; more are merged as arrays in one go."""


def runs_of(cells: IntArray) -> tuple[IntArray, IntArray]:
    """Starts and ends (exclusive) of the runs in ``cells``, which must ascend strictly."""
    if len(cells) == 0:
        return cells, cells
    breaks = np.flatnonzero(np.diff(cells) != 1)
    starts = cells[np.concatenate(([0], breaks + 1))]
    ends = cells[np.concatenate((breaks, [len(cells) - 1]))] + 1
    return starts, ends


class FreeRuns:
    """Disjoint runs of free cells ``[start, end)``, ascending, never touching one another."""

    __slots__ = ("ends", "size", "starts", "total")

    def __init__(self, size: int):
        self.size = size
        self.starts: list[int] = [0]
        self.ends: list[int] = [size]
        self.total = size
        """Free cells in all."""

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.ends, strict=True)

    @property
    def largest(self) -> int:
        """Length of the largest run; 0 when there is none."""
        return max(map(int.__sub__, self.ends, self.starts), default=0)

    @property
    def top(self) -> int:
        """One past the highest cell that is not free."""
        if self.ends and self.ends[-1] == self.size:
            return self.starts[-1]
        return self.size

    def index_after(self, cell: int) -> int:
        """Index of the first run that ends after ``cell``; ``len(self)`` if there is none."""
        return bisect_right(self.ends, cell)

    def index_before(self, cell: int) -> int:
        """Index of the last run that starts before ``cell``; -1 if there is none."""
        return bisect_left(self.starts, cell) - 1

    def first_of(self, n: int, index: int) -> int | None:
        """Index of the first run of at least ``n`` cells from ``index`` on."""
        lengths = map(int.__sub__, islice(self.ends, index, None), islice(self.starts, index, None))
        return next((i for i, length in enumerate(lengths, index) if length >= n), None)

    def take(self, start: int, n: int) -> None:
        """Remove cells ``[start, start + n)``, which must lie in one run."""
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
        """Start anew from a mask of the cells that are not free; shape (size,)."""
        cells = np.flatnonzero(~used)
        starts, ends = runs_of(cells)
        self.starts, self.ends, self.total = starts.tolist(), ends.tolist(), len(cells)

    def take_cells(self, cells: IntArray) -> None:
        """Remove ``cells``, distinct and all free, in any order."""
        starts, ends = runs_of(np.sort(cells))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self.take(start, end - start)

    def release(self, cells: IntArray) -> None:
        """Give back ``cells``, distinct and none of them free, in any order."""
        if len(cells) == 0:
            return
        starts, ends = runs_of(np.sort(cells))
        if len(starts) <= _FEW:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self._release_run(start, end)
        else:
            self._merge(starts, ends)
        self.total += len(cells)

    def _release_run(self, start: int, end: int) -> None:
        i = self.index_after(start)
        joins_left = i > 0 and self.ends[i - 1] == start
        joins_right = i < len(self.starts) and self.starts[i] == end
        if joins_left and joins_right:
            self.ends[i - 1] = self.ends[i]
            del self.starts[i], self.ends[i]
        elif joins_left:
            self.ends[i - 1] = end
        elif joins_right:
            self.starts[i] = start
        else:
            self.starts.insert(i, start)
            self.ends.insert(i, end)

    def _merge(self, starts: IntArray, ends: IntArray) -> None:
        all_starts = np.sort(np.concatenate((np.array(self.starts, dtype=np.int64), starts)))
        all_ends = np.sort(np.concatenate((np.array(self.ends, dtype=np.int64), ends)))
        apart = all_starts[1:] != all_ends[:-1]
        self.starts = all_starts[np.concatenate(([True], apart))].tolist()
        self.ends = all_ends[np.concatenate((apart, [True]))].tolist()
