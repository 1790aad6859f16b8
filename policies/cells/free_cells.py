"""Which cells of an arena are free, a byte for each: searched as text is, and changed many cells at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from policies.vocabulary import IntArray, Moves

Cells = range | IntArray
"""Cells in the order in which they are filled; a range if they are consecutive and ascend."""

_FREE, _USED = b"\1", b"\0"

_LOOK_AHEAD = 256
"""A search for n scattered cells looks at the next 2 n + this many first: mostly enough of them are free."""

_MANY_RUNS = 512
"""So many runs are moved all at once, fewer one after the other."""


class FreeCells:
    """The free cells of ``size`` cells, all of them to begin with."""

    __slots__ = ("_bytes", "_edged", "_extents", "_has_grown", "_largest", "_largest_n", "mask", "size", "total")

    def __init__(self, size: int):
        self.size = size
        self._bytes = bytearray(_FREE) * size + _USED
        # With a used cell behind the last one, which is also the one before the first.
        self._edged: NDArray[np.bool_] = np.frombuffer(self._bytes, dtype=np.bool_)
        self.mask: NDArray[np.bool_] = self._edged[:size]
        """Shape (size,): whether each cell is free. Shares its memory with ``_bytes``; not to be written to."""
        self._extents: int | None = None
        """Number of free extents, kept up to date from the first question on."""
        self._largest = 0
        """A cell of the extent that was the largest when last asked."""
        self._largest_n = size
        """Its length then."""
        self._has_grown = False
        """Whether any cell has been given back since."""
        self.total = size
        """Number of free cells."""

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        """A copy whose mask and bytes share memory again."""
        return _restored, (bytes(self._bytes[:-1]),)

    def __len__(self) -> int:
        """Number of free extents."""
        if self._extents is None:
            self._extents = self._bytes.count(b"\0\1") + (self._bytes[:1] == _FREE)
        return self._extents

    def __iter__(self) -> Iterator[tuple[int, int]]:
        starts, ends = self.arrays()
        return zip(starts.tolist(), ends.tolist(), strict=True)

    @property
    def largest(self) -> int:
        """Length of the largest extent; 0 if there is none."""
        data, at = self._bytes, self._largest
        most = self.end_of_run(at) - self.start_of_run(at) if data[at] else 0
        # As long as cells are only taken, none can outgrow it.
        if self._has_grown or most < self._largest_n:
            self._largest_n, self._has_grown = self.largest_between(0, self.size, most), False
        return self._largest_n

    def largest_between(self, start: int, stop: int, least: int) -> int:
        """Length of the largest extent in ``[start, stop)``, if that is more than ``least``, else ``least``."""
        find, most = self._bytes.find, least
        at = find(_FREE * (most + 1), start, stop)
        while at >= 0:
            self._largest = at
            end = self.end_of_run(at, stop)
            most = end - at
            at = find(_FREE * (most + 1), end, stop)
        return most

    @property
    def top(self) -> int:
        """One past the highest cell that is not free."""
        return self._bytes.rfind(_USED, 0, self.size) + 1

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

    def count_below(self, cell: int) -> int:
        """Number of free cells below ``cell``."""
        return int(np.count_nonzero(self.mask[:cell]))

    def below(self, cells: IntArray) -> IntArray:
        """Number of free cells below each of ``cells``; the same shape."""
        most = int(cells.max(initial=0))
        upto: IntArray = np.concatenate(([0], np.cumsum(self.mask[:most], dtype=np.int64)))
        return upto[cells]

    def is_free(self, start: int, n: int) -> bool:
        """Whether cells ``[start, start + n)`` are free."""
        return start + n <= self.size and self._bytes.find(_USED, start, start + n) < 0

    def first_run(self, n: int, start: int, stop: int | None = None) -> int | None:
        """The first of ``n`` consecutive free cells in ``[start, stop)``; None if there are none."""
        found = self._bytes.find(_FREE * n, start, self.size if stop is None else stop)
        return None if found < 0 else found

    def first_cell(self, start: int) -> int:
        """The first free cell from ``start`` on; ``size`` if there is none."""
        found = self._bytes.find(_FREE, start)
        return self.size if found < 0 else found

    def end_of_run(self, start: int, stop: int | None = None) -> int:
        """One past the last of the free cells that follow the free cell ``start`` without a gap; at most ``stop``."""
        stop = self.size if stop is None else min(stop, self.size)
        end = self._bytes.find(_USED, start, stop)
        return stop if end < 0 else end

    def start_of_run(self, cell: int) -> int:
        """The first of the free cells that lead up to the free ``cell`` without a gap."""
        return self._bytes.rfind(_USED, 0, cell) + 1

    def last_before(self, cell: int) -> int:
        """The highest free cell below ``cell``; -1 if there is none."""
        return self._bytes.rfind(_FREE, 0, max(cell, 0))

    def first_cells(self, n: int, start: int) -> Cells:
        """The first ``n`` free cells from ``start`` on, consecutive or not; fewer if there are not as many."""
        data, size = self._bytes, self.size
        first = data.find(_FREE, start)
        if first < 0 or n < 1:
            return range(0)
        end = data.find(_USED, first, first + n)
        if end < 0 and first + n <= size:
            return range(first, first + n)
        parts, at, width, left = list[IntArray](), first, 2 * n + _LOOK_AHEAD, n
        while left > 0 and at < size:
            cells: IntArray = self.mask[at : at + width].nonzero()[0][:left]
            cells += at
            parts.append(cells)
            left -= len(cells)
            at += width
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def last_cells(self, n: int) -> Cells:
        """The last ``n`` free cells, descending; fewer if there are not as many."""
        last = self._bytes.rfind(_FREE)
        if last < 0 or n < 1:
            return range(0)
        if n == 1:
            return range(last, last + 1)
        width = 2 * n + _LOOK_AHEAD
        while True:
            low = max(last + 1 - width, 0)
            cells: IntArray = self.mask[low : last + 1].nonzero()[0][::-1]
            if len(cells) >= n or low == 0:
                cells = cells[:n]
                cells += low
                return cells
            width *= 4

    # Changes

    def take(self, start: int, n: int) -> None:
        """Remove cells ``[start, start + n)``, all of them free."""
        data, stop = self._bytes, start + n
        if self._extents is not None and n:
            self._extents += data[start - 1] + data[stop] - 1
        data[start:stop] = bytes(n)
        self.total -= n

    def take_cells(self, cells: IntArray) -> None:
        """Remove ``cells``, distinct and all free, in any order."""
        # There are as many extents as free cells less pairs of adjacent ones.
        if self._extents is None:
            self._edged[cells] = False
        else:
            pairs = np.count_nonzero(self._edged[cells + 1])
            self._edged[cells] = False
            self._extents += int(pairs + np.count_nonzero(self._edged[cells - 1])) - len(cells)
        self.total -= len(cells)

    def release(self, cells: IntArray) -> None:
        """Give back ``cells``, distinct and none of them free, in any order."""
        if self._extents is None:
            self._edged[cells] = True
        else:
            pairs = np.count_nonzero(self._edged[cells - 1])
            self._edged[cells] = True
            self._extents -= int(pairs + np.count_nonzero(self._edged[cells + 1])) - len(cells)
        self.total += len(cells)
        self._has_grown = True

    def move(self, plan: Moves) -> None:
        """Note that the tokens of used cells were moved."""
        if plan.n_runs > _MANY_RUNS:
            # A cell is left as often as it is read, and filled as often as it is written.
            left = np.bincount(np.concatenate((plan.src, plan.dst + plan.length)), minlength=self.size + 1)
            left -= np.bincount(np.concatenate((plan.dst, plan.src + plan.length)), minlength=self.size + 1)
            self.mask[:] = left[:-1].cumsum() + self.mask
        else:
            data = self._bytes
            for src, dst, n in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
                data[src : src + n] = _FREE * n
                data[dst : dst + n] = bytes(n)
        self._extents = None
        self._has_grown = True

    def rebuild(self, used: NDArray[np.bool_]) -> None:
        """Start again from a mask of the cells that are not free; all cells after the mask are free."""
        self.mask[: len(used)] = ~used
        self.mask[len(used) :] = True
        self._extents = None
        self._has_grown = True
        self.total = self.size - int(np.count_nonzero(used))


def _restored(free: bytes) -> FreeCells:
    """The free cells of a copy."""
    cells = FreeCells(len(free))
    cells.rebuild(np.frombuffer(free, dtype=np.uint8) == 0)
    return cells
