"""Which cells of an arena are free, a byte for each: searched as text is, and changed many cells at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.compiled import i64
from policies.vocabulary import IntArray, Moves

Cells = range | IntArray
"""Cells in the order in which they are filled; a range if they are consecutive and ascend."""

_FREE: Final = b"\1"
_USED: Final = b"\0"

_CLAIM: Final = 1024
"""The most cells that are claimed at a time."""

_LONG: Final = 48
"""From so many consecutive cells on, a search looks from the end of each window; shorter runs are found as text is."""

_LOOK_AHEAD: Final = 256
"""A search for n scattered cells looks at the next 2 n + this many first: mostly enough of them are free."""

_FEW_RUNS: Final = 32
"""So many runs are moved one after the other, more all at once."""

_UNKNOWN: Final = 1 << 60
"""More than any extent has."""


class FreeCells:
    """The free cells of ``size`` cells, all of them to begin with."""

    def __init__(self, size: int):
        self.size: i64 = size
        self._bytes = bytearray(_FREE) * size + _USED
        # With a used cell behind the last one, which is also the one before the first.
        self._edged: NDArray[np.bool_] = np.frombuffer(self._bytes, dtype=np.bool_)
        self._mask: NDArray[np.bool_] = self._edged[:size]
        self._claimed: i64 = 0
        self._claim_end: i64 = 0
        """Cells ``[_claimed, _claim_end)`` are free, but written down as used: steps take them next, one after another,
        without a look at the bytes. Whatever else looks at these gives them up first."""
        self.head: i64 = 0
        """Where the next search for free cells begins."""
        self.total: i64 = size
        """Number of free cells."""
        self.changes: i64 = 0
        """How often cells were taken or given back."""
        self._extents: i64 = -1
        """Number of free extents, kept up to date from the first question on; negative: not counted."""
        self._top: i64 = 0
        """No cell from here on is used."""
        self._last: i64 = size
        """No cell from here on is free."""
        # The free cells that steps take next, if neither of these has changed since: as long as there are any left.
        self._ahead = list[int]()
        self._next_ahead: i64 = 0
        self._ahead_changes: i64 = -1
        self._ahead_head: i64 = 0
        # The largest free extent, and the most cells that any other has: cells that are taken leave this true.
        self._low: i64 = 0
        self._high: i64 = size
        self._others: i64 = 0

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Shape (size,): whether each cell is free. Shares its memory with the bytes; not to be written to."""
        if self._claimed < self._claim_end:
            self._unclaim()
        return self._mask

    def _unclaim(self) -> None:
        """Write down as free what steps have not taken."""
        self._bytes[self._claimed : self._claim_end] = _FREE * (self._claim_end - self._claimed)
        self._claimed = self._claim_end = 0

    def __reduce__(self) -> tuple[object, tuple[bytes, int, int]]:
        """A copy whose mask and bytes share memory again."""
        if self._claimed < self._claim_end:
            self._unclaim()
        return _restored, (bytes(self._bytes[:-1]), self.head, self.changes + 1)

    def __len__(self) -> int:
        """Number of free extents."""
        if self._extents < 0:
            if self._claimed < self._claim_end:
                self._unclaim()
            self._extents = self._bytes.count(b"\0\1") + (self._bytes[:1] == _FREE)
        return int(self._extents)

    def count(self) -> i64:
        """Number of free extents, as ``len`` says."""
        return self._extents if self._extents >= 0 else len(self)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        starts, ends = self.arrays()
        return zip(starts.tolist(), ends.tolist(), strict=True)

    @property
    def largest(self) -> int:
        """Length of the largest extent; 0 if there is none."""
        if self._high - self._low < self._others:
            if self.total == 0:
                return 0
            starts, ends = self.arrays()
            lengths = ends - starts
            at = int(lengths.argmax())
            self._low, self._high = int(starts[at]), int(ends[at])
            lengths[at] = 0
            self._others = int(lengths.max())
        return int(self._high - self._low)

    @property
    def top(self) -> int:
        """One past the highest cell that is not free."""
        top, claimed = self._top, self._claim_end
        if self._claimed < top <= claimed:
            self._top = top = self._claimed  # Before which the last cell is used.
        elif top > 0 and self._bytes[top - 1]:
            top = self._bytes.rfind(_USED, claimed, top) + 1
            self._top = top = top if top > claimed else self._claimed
        return int(top)

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
        if self._claimed < self._claim_end:
            self._unclaim()
        return start + n <= self.size and self._bytes.find(_USED, start, start + n) < 0

    def first_run(self, n: int, start: int, stop: int | None = None) -> int | None:
        """The first of ``n`` consecutive free cells in ``[start, stop)``; None if there are none."""
        if self._claimed < self._claim_end:
            if start == self._claimed and start + n <= self._claim_end and stop is None:
                return start
            self._unclaim()
        data, end = self._bytes, self.size if stop is None else stop
        # Over used cells one byte is found sooner than many.
        found = data.find(_FREE, start, end)
        if found < 0 or (found + n <= end and data.find(_USED, found, found + n) < 0):
            return None if found < 0 else found
        if n < _LONG:
            found = data.find(_FREE * n, found, end)
            return None if found < 0 else found
        # Behind the last used cell of a window that is as wide: most windows are passed over as a whole.
        while found >= 0 and found + n <= end:
            used = data.rfind(_USED, found, found + n)
            if used < 0:
                return found
            found = data.find(_FREE, used, end)
        return None

    def first_cell(self, start: int) -> int:
        """The first free cell from ``start`` on; ``size`` if there is none."""
        if self._claimed < self._claim_end:
            self._unclaim()
        found = self._bytes.find(_FREE, start)
        return self.size if found < 0 else found

    def end_of_run(self, start: int, stop: int | None = None) -> int:
        """One past the last of the free cells that follow the free cell ``start`` without a gap; at most ``stop``."""
        if self._claimed < self._claim_end:
            self._unclaim()
        stop = self.size if stop is None else min(stop, self.size)
        end = self._bytes.find(_USED, start, stop)
        return stop if end < 0 else end

    def start_of_run(self, cell: int) -> int:
        """The first of the free cells that lead up to the free ``cell`` without a gap."""
        if self._claimed < self._claim_end:
            self._unclaim()
        return self._bytes.rfind(_USED, 0, cell) + 1

    def last_before(self, cell: int) -> int:
        """The highest free cell below ``cell``; -1 if there is none."""
        if self._claimed < self._claim_end:
            self._unclaim()
        return self._bytes.rfind(_FREE, 0, max(cell, 0))

    def first_cells(self, n: int, start: int) -> Cells:
        """The first ``n`` free cells from ``start`` on, consecutive or not; fewer if there are not as many."""
        if self._claimed < self._claim_end:
            self._unclaim()
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
        if self._claimed < self._claim_end:
            self._unclaim()
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

    # Single cells for steps: found and taken at once, quicker than any array

    def take_next(self, head: i64, n: i64) -> list[int]:
        """Take the next ``n`` free cells, going once round from ``head``, and list them in that order.

        There must be so many. These are the cells that ``find_scattered`` finds.
        """
        if not self._knows_next(head, n):
            if self._claimed < self._claim_end:
                self._unclaim()
            cell = self.first_cell(head)
            if cell == self.size:
                cell = self.first_cell(0)
            self._ahead = (self._mask[cell : cell + _LOOK_AHEAD].nonzero()[0] + cell).tolist()
            self._next_ahead = 0
        at = self._next_ahead
        cells = self._ahead[at : at + n]
        for cell in cells:
            self.take(cell, 1)
        while len(cells) < n:
            cell = self.first_cell(cells[-1])
            if cell == self.size:
                cell = self.first_cell(0)
            self.take(cell, 1)
            cells.append(cell)
        self._next_ahead, self._ahead_head, self._ahead_changes = at + n, cells[-1] + 1, self.changes
        return cells

    def _knows_next(self, head: i64, n: i64) -> bool:
        """Whether the next ``n`` free cells from ``head`` on have been looked up, and nothing has changed since."""
        known = self._ahead_changes == self.changes and self._ahead_head == head
        return known and self._next_ahead + n <= len(self._ahead)

    def take_run(self, head: i64, n: i64) -> i64:
        """Take the next ``n`` free cells, going once round from ``head``, if they are consecutive; the first, or -1.

        There must be so many. Cells behind them are claimed for the next steps. -1, too, where ``take_next`` has looked
        the cells up already.
        """
        if head == self._claimed and head + n <= self._claim_end:
            self.take(head, n)
            return head
        if self._knows_next(head, n):
            return -1
        if self._claimed < self._claim_end:
            self._unclaim()
        data = self._bytes
        first: i64 = data.find(_FREE, head)
        if first < 0:
            first = data.find(_FREE)
        stop = first + n
        if stop > self.size or data.find(_USED, first, stop) >= 0:
            return -1
        self.take(first, n)
        self.claim(stop)
        return first

    @property
    def has_claim(self) -> bool:
        """Whether cells are claimed for the next steps."""
        return self._claimed < self._claim_end

    def claimed_from(self, cell: i64) -> i64:
        """How many cells are claimed from this one on, if it is the first of them; else 0."""
        return self._claim_end - cell if cell == self._claimed < self._claim_end else 0

    def claim(self, start: i64) -> None:
        """Expect that steps take the free cells from ``start`` on, and nothing else, for a while."""
        if self._claimed < self._claim_end:
            self._unclaim()
        data = self._bytes
        if start >= self.size or not data[start]:
            return
        most = min(start + _CLAIM, self.size)
        end: i64 = data.find(_USED, start, most)
        if end < 0:
            end = most
        data[start:end] = bytes(end - start)
        self._claimed, self._claim_end = start, end

    def take_last(self, n: int) -> list[int]:
        """Take the last ``n`` free cells, and list them, descending; there must be so many."""
        if self._claimed < self._claim_end:
            self._unclaim()
        data = self._bytes
        cell = data.rfind(_FREE, 0, self._last)
        first = cell + 1 - n
        if first >= 0 and data.find(_USED, first, cell) < 0:
            self.take(first, n)
            self._last = first
            return list(range(cell, first - 1, -1))
        cells = list[int]()
        for _ in range(n):
            cell = data.rfind(_FREE, 0, cell + 1)
            self.take(cell, 1)
            cells.append(cell)
        self._last = cell
        return cells

    # Changes

    def take(self, start: int, n: int) -> None:
        """Remove cells ``[start, start + n)``, all of them free."""
        if n == 0:
            return
        data, stop = self._bytes, start + n
        self.changes += 1
        if self._claimed < self._claim_end:
            if start == self._claimed and stop <= self._claim_end:
                self._take_claimed(n)
                return
            self._unclaim()
        if self._extents >= 0:
            self._extents += data[start - 1] + data[stop] - 1
        if n == 1:
            data[start] = 0
        else:
            data[start:stop] = bytes(n)
        self.total -= n
        self._top = max(self._top, stop)
        low, high = self._low, self._high
        if low <= start < high:
            # What is left of the largest extent is on either side.
            if high - stop < start - low:
                self._high, self._others = start, max(self._others, high - stop)
            else:
                self._low, self._others = stop, max(self._others, start - low)

    def _take_claimed(self, n: i64) -> None:
        """Take the first ``n`` claimed cells, before which none is free."""
        start = self._claimed
        stop = start + n
        self.changes += 1
        self._claimed = stop
        self.total -= n
        if stop > self._top:
            self._top = stop
        if stop == self._claim_end:
            if self._extents >= 0 and not self._bytes[stop]:
                self._extents -= 1
            self._claimed = self._claim_end = 0
        if self._low == start:
            self._low = stop

    def take_cells(self, cells: IntArray) -> None:
        """Remove ``cells``, distinct and all free, in any order."""
        if self._claimed < self._claim_end:
            self._unclaim()
        self.changes += 1
        # There are as many extents as free cells less pairs of adjacent ones.
        if self._extents < 0:
            self._edged[cells] = False
        else:
            pairs = np.count_nonzero(self._edged[cells + 1])
            self._edged[cells] = False
            self._extents += int(pairs + np.count_nonzero(self._edged[cells - 1])) - len(cells)
        self.total -= len(cells)
        self._top = self.size
        # No extent has grown, so that the largest stays it where it was not touched.
        if len(cells) and int(cells.max()) >= self._low and int(cells.min()) < self._high:
            self._others = _UNKNOWN

    def release(self, cells: IntArray) -> None:
        """Give back ``cells``, distinct and none of them free, in any order."""
        if self._claimed < self._claim_end:
            self._unclaim()
        if self._extents < 0:
            self._edged[cells] = True
        else:
            pairs = np.count_nonzero(self._edged[cells - 1])
            self._edged[cells] = True
            self._extents -= int(pairs + np.count_nonzero(self._edged[cells + 1])) - len(cells)
        self.total += len(cells)
        self.changes += 1
        self._last, self._others = self.size, _UNKNOWN

    def move(self, plan: Moves) -> None:
        """Note that the tokens of used cells were moved."""
        if self._claimed < self._claim_end:
            self._unclaim()
        if plan.n_runs > _FEW_RUNS:
            # A cell is left as often as it is read, and filled as often as it is written.
            change = np.zeros(self.size + 1, dtype=np.int8)
            np.add.at(change, np.concatenate((plan.src, plan.dst + plan.length)), 1)
            np.subtract.at(change, np.concatenate((plan.dst, plan.src + plan.length)), 1)
            now = self.mask.view(np.int8)
            now += change[:-1].cumsum(dtype=np.int8)
        else:
            data = self._bytes
            for src, dst, n in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
                data[src : src + n] = _FREE * n
                data[dst : dst + n] = bytes(n)
        self._forget()

    def rebuild(self, used: NDArray[np.bool_]) -> None:
        """Start again from a mask of the cells that are not free; all cells after the mask are free."""
        if self._claimed < self._claim_end:
            self._unclaim()
        self.mask[: len(used)] = ~used
        self.mask[len(used) :] = True
        self._forget()
        self.total = self.size - int(np.count_nonzero(used))

    def _forget(self) -> None:
        """Note that any cells may be free now."""
        self.changes += 1
        self._extents = -1
        self._top = self._last = self.size
        self._others = _UNKNOWN


def _restored(free: bytes, head: int, changes: int) -> FreeCells:
    """The free cells of a copy."""
    cells = FreeCells(len(free))
    cells.head = head
    cells.rebuild(np.frombuffer(free, dtype=np.uint8) == 0)
    cells.changes = changes
    return cells
