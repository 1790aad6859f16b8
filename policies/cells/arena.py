"""An arena: one array of cells, each with a position and the set of sequences that see it.

The bookkeeping of llama.cpp's unified cache (``llama-kv-cache.cpp``), shared by every layout that places single
cells. The arena keeps its parts consistent: positions and owners by cell, the free extents, the interned sets of
sequences (so that removing, sharing or keeping a sequence is one table look-up over an array, however many cells are
shared), and the updates that an engine must still make.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.cells.arena_cells import ArenaCells
from policies.cells.ordering import new_cells
from policies.cells.sequence_cells import Row
from policies.cells.sequence_sets import SetIndices
from policies.vocabulary import IntArray, Moves

FOREVER = np.iinfo(np.int64).max
"""A position after every other: the end of an open range."""


class Arena(ArenaCells):
    """``size`` cells, what each holds, and the operations on sequences and on cells."""

    # Operations on sequences

    def remove(self, seq: int, start: int = 0, stop: int = FOREVER) -> IntArray:
        """Take positions ``[start, stop)`` from a sequence (from every sequence, if ``seq`` is negative).

        Returns the cells that are empty now, ascending.
        """
        row = None if seq < 0 else self.row_of(seq)
        if row is not None and (start <= row.begin or stop >= row.end):
            return self._remove_from_row(row, max(start, row.begin), min(stop, row.end))
        self._irregular.clear()
        self._give_up_row(seq)
        cells = np.flatnonzero(self._owner[: self.top]) if seq < 0 else self._contents.seen_by(seq)
        if start > 0 or stop != FOREVER:
            cells = _within(cells, self._position, start, stop)
        if seq < 0:
            return self._relabel(cells, lambda _: frozenset())
        if not self.sets.shares_nothing(seq):
            return self._relabel(cells, lambda seqs: seqs - {seq})
        self._clear(cells)
        return cells

    def _remove_from_row(self, row: Row, start: int, stop: int) -> IntArray:
        """``remove`` from one of the ends of a row, positions that it has; the cells in ascending order."""
        if stop <= start:
            return np.zeros(0, dtype=np.int64)
        cells = np.sort(self.rows.cells(row)[start - row.begin : stop - row.begin])
        self._clear_row(row, start, stop)
        self.free.release_each(cells.tolist())
        return cells

    def _clear_row(self, row: Row, start: int, stop: int) -> None:
        """Shorten a row by positions at one of its ends, whose cells remain to be given back."""
        written = min(row.written, stop)
        if written > start:
            gone = self.rows.cells(row)[start - row.begin : written - row.begin]
            self._position[gone] = -1
            self._owner[gone] = 0
        if stop == row.end:
            row.end = start
            row.written = min(row.written, start)
        else:
            row.begin = stop
            row.written = max(row.written, stop)
        row.lowest = -1
        if row.begin == row.end:
            index = self.sets.singletons.get(row.seq)
            if index is not None and self.sets.shares_nothing(row.seq):
                self._bounds.set_empty(index)
            self.rows.drop(row.seq)
            self._add_row(row.seq, 0)

    def empty(self, seq: int) -> int | None:
        """Take all positions from a sequence.

        Returns the first of the cells that are empty now, None if there is none.
        """
        row = self.rows.rows.get(seq)
        if row is None:
            gone = self.remove(seq)
            return int(gone[0]) if len(gone) else None
        if row.begin == row.end:
            return None
        first = int(self.rows.lowest(row))
        self.rows.give_back(row, self.free)
        self._clear_row(row, row.begin, row.end)
        return first

    def keep(self, seq: int) -> IntArray:
        """Take everything from all other sequences; returns the cells that are empty now, ascending."""
        self._irregular.clear()
        self._give_up_row(-1)
        gone = self._relabel(np.flatnonzero(self._owner[: self.top]), lambda seqs: seqs & {seq})
        self.sets.drop_unused(self._owner)
        return gone

    def share(self, src: int, dst: int, start: int = 0, stop: int = FOREVER) -> None:
        """Let ``dst`` see the cells that hold positions ``[start, stop)`` of ``src``: nothing is copied."""
        self._irregular.clear()
        self._give_up_row(-1)
        cells = _within(self._contents.seen_by(src), self._position, start, stop)
        self._relabel(cells, lambda seqs: seqs | {dst})
        self.sets.drop_unused(self._owner)

    def shift(self, seq: int, start: int, stop: int, delta: int) -> tuple[IntArray, IntArray]:
        """Add ``delta`` to positions ``[start, stop)`` of a sequence; a negative result frees the cell.

        Returns the cells whose position changed and those that are empty now, both ascending.
        """
        self._irregular.clear()
        self._give_up_row(-1)
        changed = _within(self._contents.seen_by(seq), self._position, start, stop)
        self._position[changed] += delta
        self.pending.rotate(changed, delta)
        gone = changed[self._position[changed] < 0]
        self._clear(gone)
        return changed, gone

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> IntArray:
        """Divide positions ``[start, stop)`` of a sequence, rounding down; returns the cells, ascending."""
        self._irregular.clear()
        self._give_up_row(-1)
        changed = _within(self._contents.seen_by(seq), self._position, start, stop)
        divided = self._position[changed] // divisor
        self.pending.rotate(changed, divided - self._position[changed])
        self._position[changed] = divided
        return changed

    # Operations on cells

    def compact(self, plan: Moves) -> None:
        """Move tokens: each run's tokens go where the plan says, and the cells that they leave are empty."""
        if plan.n_runs == 0:
            return
        reached = max(self.top, int((plan.dst + plan.length).max()))
        rows_only = self.pending.rotations is None and self.has_rows_only()
        held = None if rows_only else (~self.free.mask[:reached]).nonzero()[0]
        for src, dst, n in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
            self.free.release_run(src, n)
            self.free.take(dst, n)
        goes = new_cells(plan, ~self.free.mask[:reached])
        if held is not None:
            self.write_rows()
            self._carry(held, goes[held])
        elif self.rows.forget_written():
            self._position[:reached] = -1
            self._owner[:reached] = 0
        self.rows.move(goes)
        self._bounds.widen_to_all_cells()
        self.pending.add_moves(plan)

    def _carry(self, held: IntArray, goes_to: IntArray) -> None:
        """Carry what is known of each used cell to the cell that its token goes to."""
        for array, empty in ((self._position, -1), (self._owner, 0), (self.pending.rotations, 0)):
            if array is not None:
                moved = array[held]
                array[held] = empty
                array[goes_to] = moved

    def vacate(self, cells: IntArray) -> None:
        """Empty ``cells``, all of them used, whichever sequences see them."""
        if len(cells):
            self._irregular.clear()
            for index in set(self.owner[cells].tolist()):
                for seq in self.sets[index]:
                    self._give_up_row(seq)
            self._clear(cells)

    def clear(self) -> None:
        """Empty every cell and return the head to the start."""
        self._position[:] = -1
        self._owner[:] = 0
        self.free.rebuild(np.zeros(0, dtype=np.bool_))
        self.rows.drop_all()
        self._irregular.clear()
        self.sets.reset()
        self.head = 0
        self.pending.rotations = None

    def restore(self, cells: IntArray, position: IntArray, owner: SetIndices) -> None:
        """Let ``cells`` hold what they held before, whatever they hold now; rotations are left alone."""
        self._irregular.clear()
        self._give_up_row(-1)
        used_now, used_before = self._owner[cells] > 0, owner > 0
        self._position[cells] = position
        self._owner[cells] = owner
        if used_before.any():
            low, high = int(cells.min()), int(cells.max()) + 1
            for index in set(owner.tolist()):
                self._bounds.widen(index, low, high)
        self.free.release_each(cells[used_now & ~used_before].tolist())
        self.free.take_each(cells[used_before & ~used_now].tolist())

    def _relabel(self, cells: IntArray, change: Callable[[frozenset[int]], frozenset[int]]) -> IntArray:
        """Give ``cells``, which ascend, the set that ``change`` makes of theirs; return those that are empty now."""
        if len(cells) == 0:
            return cells
        old = self._owner[cells]
        table = np.zeros(len(self.sets), dtype=np.int32)
        low, high = int(cells[0]), int(cells[-1]) + 1
        for index in np.flatnonzero(np.bincount(old)).tolist():
            table[index] = new = self.sets.index_of(change(self.sets[index]))
            self._bounds.widen(new, low, high)
        now = table[old]
        self._owner[cells] = now
        gone: IntArray = cells[now == 0]
        self._clear(gone)
        return gone

    def _clear(self, cells: IntArray) -> None:
        self._position[cells] = -1
        self._owner[cells] = 0
        self.free.release_each(cells.tolist())


def _within(cells: IntArray, position: IntArray, start: int, stop: int) -> IntArray:
    """The ``cells`` whose position is in ``[start, stop)``."""
    positions = position[cells]
    held: IntArray = cells[(positions >= start) & (positions < stop)]
    return held
