"""Which cells of a cache, or blocks of a pool, are free, and the extents that they form.

The length of each free extent is noted at its first and its last cell (boundary tags: Knuth, The Art of Computer
Programming, vol. 1, section 2.5), and the number of extents of each length is counted: cells are taken and given back,
and the largest extent is known, without a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.compiled import as_flags, i32, i64, mypyc_attr, u8, vec
from policies.vocabulary import IntArray

_SHIFT: Final[i64] = 6
"""So many neighbours, as a power of two, are counted together, so that a search passes over many at a time."""
_GROUP: Final[i64] = 64


class ExtentLengths:
    """How many free extents there are of each length, up to ``size``."""

    def __init__(self, size: int):
        self._of_length = vec[i32]([0] * (size + 2))
        """Number of extents of each length, from 1."""
        self._in_group = vec[i32]([0] * ((size + 2 >> 6) + 1))
        """Number of extents of the lengths of each group."""
        self._most: i64 = 0
        """No extent is longer."""
        self.count: i64 = 0
        """Number of extents."""

    def add(self, length: i64) -> None:
        """Count an extent."""
        self.count += 1
        self._of_length[length] += 1
        self._in_group[length >> _SHIFT] += 1
        if length > self._most:
            self._most = length

    def remove(self, length: i64) -> None:
        """Count an extent no longer."""
        self.count -= 1
        self._of_length[length] -= 1
        self._in_group[length >> _SHIFT] -= 1

    def largest(self) -> i64:
        """Length of the largest extent; 0 if there is none."""
        most, numbers, in_group = self._most, self._of_length, self._in_group
        while most > 0 and numbers[most] == 0:
            most = most - 1 if in_group[most >> _SHIFT] > 0 else (most >> _SHIFT << _SHIFT) - 1
        self._most = most = max(most, 0)
        return most


@mypyc_attr(allow_interpreted_subclasses=True)
class FreeCells:
    """The free cells of ``size`` cells, all of them to begin with."""

    def __init__(self, size: int):
        self.size: i64 = size
        self.head: i64 = 0
        """Where the next search for free cells begins."""
        self.total: i64 = 0
        """Number of free cells."""
        self.changes: i64 = 0
        """How often cells were taken or given back."""
        # Cells are counted from 1 in here: a used one is before the first, and another behind the last.
        self._free = vec[u8]([0] * (size + 2))
        """1 for each cell that is free, 0 for all others."""
        self._free_in_group = vec[i32]([0] * ((size + 2 >> 6) + 1))
        self._length = vec[i32]([0] * (size + 2))
        """Of each free extent, at its first and its last cell; of other cells it says nothing."""
        self.lengths = ExtentLengths(size)
        self.mask: NDArray[np.bool_] = as_flags(self._free)[1:-1]
        """Shape (size,): whether each cell is free. Shares its memory with what is kept here; not to be written to."""
        self.release_run(0, size)

    @staticmethod
    def of(size: int, free: Iterable[int]) -> FreeCells:
        """Only these of ``size`` cells are free."""
        found = FreeCells(size)
        used = np.ones(size, dtype=np.bool_)
        used[list(free)] = False
        found.rebuild(used)
        return found

    def __reduce__(self) -> tuple[object, tuple[NDArray[np.bool_], int, int]]:
        """A copy that shares nothing."""
        return _restored, (~self.mask, int(self.head), int(self.changes + 1))

    def __len__(self) -> int:
        """Number of free extents."""
        return int(self.lengths.count)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        starts, ends = self.arrays()
        return zip(starts.tolist(), ends.tolist(), strict=True)

    @property
    def largest(self) -> int:
        """Length of the largest extent; 0 if there is none."""
        return int(self.lengths.largest())

    @property
    def top(self) -> int:
        """One past the highest cell that is not free."""
        last = self.size
        return int(last - i64(self._length[last]) if self._free[last] > 0 else last)

    def span(self, pad: i64) -> i64:
        """``top`` rounded up to ``pad``, at most ``size``: what attention over all cells reads (``n_kv``)."""
        return min(self.size, max(pad, (self.top + pad - 1) // pad * pad))

    def arrays(self, start: int = 0, stop: int | None = None) -> tuple[IntArray, IntArray]:
        """First cells and ends (exclusive) of the free extents in ``[start, stop)``, ascending, both of shape (n,)."""
        mask = self.mask[start:stop]
        edges = (mask[1:] != mask[:-1]).nonzero()[0] + (start + 1)
        if len(mask) and mask[0]:
            edges = np.concatenate(([start], edges))
        if len(mask) and mask[-1]:
            edges = np.concatenate((edges, [start + len(mask)]))
        return edges[::2], edges[1::2]

    # Searches

    def free_from(self, cell: i64) -> i64:
        """How many cells are free from this one on without a gap."""
        if cell >= self.size or self._free[cell + 1] == 0:
            return 0
        return self.end_of_run(cell) - cell

    def first_cell(self, start: i64) -> i64:
        """The first free cell from ``start`` on; ``size`` if there is none."""
        free, in_group, size = self._free, self._free_in_group, self.size
        at = start + 1
        while at <= size and free[at] == 0:
            at += 1
            while at & (_GROUP - 1) == 0 and at <= size and in_group[at >> _SHIFT] == 0:
                at += _GROUP
        return min(at - 1, size)

    def end_of_run(self, start: i64) -> i64:
        """One past the last of the free cells that follow the free cell ``start`` without a gap."""
        free, in_group = self._free, self._free_in_group
        at = start + 1
        if free[at - 1] == 0:
            return start + i64(self._length[at])
        while free[at + 1] > 0:
            at += 1
            while at & (_GROUP - 1) == 0 and i64(in_group[at >> _SHIFT]) == _GROUP and free[at + _GROUP] > 0:
                at += _GROUP
        return at

    def start_of_run(self, cell: i64) -> i64:
        """The first of the free cells that lead up to the free ``cell`` without a gap."""
        free, in_group = self._free, self._free_in_group
        at = cell + 1
        if free[at + 1] == 0:
            return at - i64(self._length[at])
        while free[at - 1] > 0:
            at -= 1
            while at & (_GROUP - 1) == 0 and at > 0 and i64(in_group[(at >> _SHIFT) - 1]) == _GROUP:
                at -= _GROUP
        return at - 1

    def last_before(self, cell: i64) -> i64:
        """The highest free cell below ``cell``; -1 if there is none."""
        free, in_group = self._free, self._free_in_group
        at = min(cell, self.size)
        while at > 0 and free[at] == 0:
            at -= 1
            while at & (_GROUP - 1) == _GROUP - 1 and at > 0 and in_group[at >> _SHIFT] == 0:
                at -= _GROUP
        return max(at, 0) - 1

    def used_below(self, cell: i64) -> i64:
        """The highest cell below this one that is not free; -1 if there is none."""
        return self.start_of_run(cell - 1) - 1 if cell > 0 and self._free[cell] > 0 else cell - 1

    # Changes

    def take(self, start: i64, n: i64) -> None:
        """Remove cells ``[start, start + n)``, all of them free."""
        if n == 0:
            return
        free, lengths = self._free, self._length
        at = start + 1
        first = at if free[at - 1] == 0 else self.start_of_run(start) + 1
        length = i64(lengths[first])
        left = at - first
        right = length - left - n
        self.lengths.remove(length)
        if left > 0:
            lengths[first] = lengths[at - 1] = i32(left)
            self.lengths.add(left)
        if right > 0:
            lengths[at + n] = lengths[at + n + right - 1] = i32(right)
            self.lengths.add(right)
        self._mark(at, n, 0)

    def release_run(self, start: i64, n: i64) -> None:
        """Give back cells ``[start, start + n)``, none of them free."""
        if n == 0:
            return
        free, lengths = self._free, self._length
        at = start + 1
        left: i64 = 0
        right: i64 = 0
        if free[at - 1] > 0:
            left = i64(lengths[at - 1])
            self.lengths.remove(left)
        if free[at + n] > 0:
            right = i64(lengths[at + n])
            self.lengths.remove(right)
        length = left + n + right
        lengths[at - left] = lengths[at + n + right - 1] = i32(length)
        self.lengths.add(length)
        self._mark(at, n, 1)

    def take_each(self, cells: list[int]) -> None:
        """Remove cells, distinct and all free, in any order."""
        at: i64 = 0
        while at < len(cells):
            first: i64 = cells[at]
            n = _run_at(cells, at)
            if n > 0:
                self.take(first, n)
                at += n
            else:
                self.take(first + n + 1, -n)
                at -= n

    def release_each(self, cells: list[int]) -> None:
        """Give back cells, distinct and none of them free, in any order."""
        at: i64 = 0
        while at < len(cells):
            first: i64 = cells[at]
            n = _run_at(cells, at)
            if n > 0:
                self.release_run(first, n)
                at += n
            else:
                self.release_run(first + n + 1, -n)
                at -= n

    def release_part(self, numbers: vec[i64], start: i64, stop: i64) -> None:
        """Give back the cells that are in a part of a table, distinct and none of them free."""
        while start < stop:
            first = numbers[start]
            n: i64 = 1
            while start + n < stop and numbers[start + n] == first + n:
                n += 1
            self.release_run(first, n)
            start += n

    def take_next(self, head: i64, n: i64) -> list[int]:
        """Take the next ``n`` free cells, going once round from ``head``, and list them in that order.

        There must be so many. These are the cells that ``find_scattered`` finds.
        """
        cells, cell = list[int](), head
        while n > 0:
            cell = self.first_cell(cell)
            if cell == self.size:
                cell = self.first_cell(0)
            taken = min(self.end_of_run(cell) - cell, n)
            self.take(cell, taken)
            n -= taken
            for _ in range(taken):
                cells.append(int(cell))
                cell += 1
        return cells

    def take_run(self, head: i64, n: i64) -> i64:
        """Take the next ``n`` free cells, going once round from ``head``, if they are consecutive; the first, or -1.

        There must be so many.
        """
        cell = self.first_cell(head)
        if cell == self.size:
            cell = self.first_cell(0)
        if self.end_of_run(cell) - cell < n:
            return -1
        self.take(cell, n)
        return cell

    def take_last(self, n: i64) -> list[int]:
        """Take the last ``n`` free cells, and list them, descending; there must be so many."""
        cells, cell = list[int](), self.size
        for _ in range(n):
            cell = self.last_before(cell)
            self.take(cell, 1)
            cells.append(int(cell))
        return cells

    def rebuild(self, used: NDArray[np.bool_]) -> None:
        """Start again from a mask of the cells that are not free; all cells after the mask are free."""
        changes = self.changes
        starts, ends = self.arrays()
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self.take(start, end - start)
        free = np.ones(self.size, dtype=np.bool_)
        free[: len(used)] = ~used
        cells = free.nonzero()[0]
        self.release_each(cells.tolist())
        self.changes = changes + 1

    def _mark(self, at: i64, n: i64, state: u8) -> None:
        """Write down that cells are free now, or used."""
        free, in_group = self._free, self._free_in_group
        stop = at + n
        more: i64 = n if state > 0 else -n
        self.total += more
        self.changes += 1
        if n == 1:
            free[at] = state
            in_group[at >> _SHIFT] += i32(more)
            return
        while at < stop:
            end = min(((at >> _SHIFT) + 1) << _SHIFT, stop)
            in_group[at >> _SHIFT] += i32(end - at if state > 0 else at - end)
            while at < end:
                free[at] = state
                at += 1


def _run_at(cells: list[int], at: i64) -> i64:
    """How many cells from an index on follow each other; negative where they descend."""
    end: i64 = len(cells)
    first: i64 = cells[at]
    n: i64 = 1
    while at + n < end and cells[at + n] == first + n:
        n += 1
    if n > 1:
        return n
    while at + n < end and cells[at + n] == first - n:
        n += 1
    return -n if n > 1 else 1


def _restored(used: NDArray[np.bool_], head: int, changes: int) -> FreeCells:
    """The free cells of a copy."""
    cells = FreeCells(len(used))
    cells.rebuild(used)
    cells.head, cells.changes = head, changes
    return cells
