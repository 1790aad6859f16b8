"""An arena: one array of cells, each with a position and the set of sequences that see it.

The bookkeeping of llama.cpp's unified cache (``llama-kv-cache.cpp``), shared by every layout that places single
cells. The arena keeps its parts consistent: positions and owners by cell, the free extents, the interned sets of
sequences (so that removing, sharing or keeping a sequence is one table look-up over an array, however many cells are
shared), and the updates that an engine must still make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from policies.cells.free_cells import Cells, FreeCells
from policies.cells.ordering import carry
from policies.cells.pending import PendingUpdates
from policies.cells.search import cells_array
from policies.cells.sequence_cells import Row, SequenceCells
from policies.cells.sequence_sets import SequenceSets, SetIndices
from policies.vocabulary import NO_MOVES, NO_SHIFT, CellMap, Chunk, IntArray, Moves, Shift

FOREVER = np.iinfo(np.int64).max
"""A position after every other: the end of an open range."""

_FEW_ROWS = 6
"""Up to so many rows get their cells one after the other, more all at once."""


class Arena:
    """``size`` cells, a search position ``head``, and what each cell holds.

    Sequences that share no cell and have no gap are kept as rows of cells; ``position`` and ``owner`` are brought up
    to date when they are asked for.
    """

    def __init__(self, size: int):
        self.size = size
        self.head = 0
        """Where the next search for free cells begins."""
        self._position: IntArray = np.full(size, -1, dtype=np.int64)
        self._owner: SetIndices = np.zeros(size, dtype=np.int32)
        self.sets = SequenceSets(size)
        self.free = FreeCells(size)
        self.rows = SequenceCells()
        """Sequences that have all of their cells to themselves, and no gap."""
        self.pending = PendingUpdates(size)
        self._irregular: set[int] = set()
        """Sequences that cannot have a row, since the last operation that could have changed that."""
        self._bounds = self.sets.bounds

    @property
    def position(self) -> IntArray:
        """Shape (size,): position of the cell's token, -1 where it is empty."""
        self.write_rows()
        return self._position

    @property
    def owner(self) -> SetIndices:
        """Shape (size,): index into ``sets`` of the sequences that see the cell; 0 is the empty set."""
        self.write_rows()
        return self._owner

    @property
    def used(self) -> int:
        """Cells that hold a token."""
        return self.size - self.free.total

    @property
    def top(self) -> int:
        """One past the highest used cell."""
        return self.free.top

    # What it holds

    def cells_of(self, seq: int) -> tuple[IntArray, IntArray]:
        """Cells of a sequence in order of position, and those positions; both of shape (n,)."""
        row = self.rows.rows.get(seq)
        if row is not None:
            return self.rows.cells(row).copy(), np.arange(row.begin, row.end)
        cells = self._cells_seen_by(seq)
        positions = self._position[cells]
        if (positions[1:] > positions[:-1]).all():
            return cells, positions
        order = np.argsort(positions, kind="stable")
        return cells[order], positions[order]

    def last_position(self, seq: int) -> int:
        """The highest position of a sequence; -1 if it holds none."""
        row = self.row_of(seq)
        if row is None:
            return int(self._position[self._cells_seen_by(seq)].max(initial=-1))
        return row.end - 1 if row.end > row.begin else -1

    def first_position(self, seq: int) -> int:
        """The lowest position of a sequence; -1 if it holds none."""
        row = self.row_of(seq)
        if row is None:
            held = self._position[self._cells_seen_by(seq)]
            return int(held.min()) if len(held) else -1
        return row.begin if row.end > row.begin else -1

    def continues(self, chunks: Sequence[Chunk]) -> bool:
        """Whether each chunk has a sequence of its own with a row, which ends where the chunk begins, or is empty."""
        for seq, start, _, also in chunks:
            row = None if also else self.row_of(seq)
            if row is None or (row.end != start and row.end > row.begin):
                return False
        return len({chunk.seq for chunk in chunks}) == len(chunks)

    def sequences(self) -> list[int]:
        """All sequences that hold cells, ascending."""
        present = np.flatnonzero(np.bincount(self.owner[: self.top], minlength=1))
        return sorted(frozenset().union(*(self.sets[i] for i in present.tolist())))

    def cell_map(self) -> CellMap:
        """A copy of the whole state, cell by cell."""
        position, owner = self.position.copy(), self.owner
        sets = list(self.sets)
        return CellMap(position, tuple(sets[i] for i in owner.tolist()))

    def first_owners(self) -> IntArray:
        """Shape (size,): the smallest sequence in each cell, -1 where it holds no token."""
        owner = self.owner
        return self.sets.smallest_members()[owner]

    def settle(self) -> tuple[Moves, Shift]:
        """Give out the updates that an engine still owes, moves first."""
        pending = self.pending
        if pending.rotations is None:
            return (NO_MOVES if pending.is_empty else pending.settle_moves()), NO_SHIFT
        return pending.settle(self.owner)

    # Writing tokens

    def put(self, cells: IntArray, seqs: Iterable[int], start: int) -> None:
        """Write positions ``start, start + 1, ...`` of ``seqs`` into ``cells``, which have been taken from ``free``."""
        seqs = tuple(seqs)
        for seq in seqs:
            self._give_up_row(seq)
        self._irregular.update(seqs)
        index = self.sets.index_of(seqs)
        self._position[cells] = np.arange(start, start + len(cells))
        self._owner[cells] = index
        if len(cells):
            self._bounds.widen(index, int(cells.min()), int(cells.max()) + 1)
        if self.pending.rotations is not None:
            self.pending.rotations[cells] = 0

    def take(self, cells: Cells, chunks: Sequence[Chunk]) -> None:
        """Take free ``cells`` and write the tokens of ``chunks`` into them, in order."""
        found = cells_array(cells)
        if isinstance(cells, range):
            self.free.take(cells.start, len(cells))
        else:
            self.free.take_cells(cells)
        if self.pending.rotations is not None:
            self.pending.rotations[found] = 0
        at = 0
        for seq, start, n, also in chunks:
            row = None if also else self.row_of(seq)
            if row is not None and row.end == row.begin != start:
                self.rows.drop(seq)
                row = self.rows.add(seq, start)
            if row is None or row.end != start:
                self.put(found[at : at + n], (seq, *also), start)
            elif n == 1:
                self.rows.append_one(row, int(found[at]))
            else:
                self.rows.append(row, found[at : at + n])
            at += n

    def take_steps(self, cells: Cells, step: Sequence[Chunk], k: int) -> None:
        """Take free cells for ``k`` decode steps: ``step``, and ``k - 1`` times the same sequences a token further.

        ``cells``: ``k * len(step)`` of them, step after step.
        """
        n = len(step)
        rows = [None if chunk.also else self.row_of(chunk.seq) for chunk in step]
        if all(row is not None and row.end == chunk.start for row, chunk in zip(rows, step, strict=True)):
            self.take_rows(cells, [row for row in rows if row is not None])
            return
        table = cells_array(cells).reshape(k, n)
        for i, chunk in enumerate(step):
            self.take(np.ascontiguousarray(table[:, i]), [chunk._replace(n=k)])

    def take_rows(self, cells: Cells, rows: Sequence[Row]) -> None:
        """Take free cells for decode steps of sequences that have rows, in turn, a token of each in every step."""
        n = len(rows)
        if isinstance(cells, range):
            self.free.take(cells.start, len(cells))
        else:
            self.free.take_cells(cells)
        found = cells_array(cells)
        if self.pending.rotations is not None:
            self.pending.rotations[found] = 0
        if n <= _FEW_ROWS:
            for i, row in enumerate(rows):
                self.rows.append(row, found[i::n])
        else:
            self.rows.append_steps(rows, found.reshape(-1, n))

    def row_of(self, seq: int) -> Row | None:
        """The row of a sequence that may have one, which is made if it is missing; else None."""
        row = self.rows.rows.get(seq)
        if row is not None or seq in self._irregular:
            return row
        cells, positions = self.cells_of(seq)
        n = len(cells)
        if n == 0:
            return self.rows.add(seq, 0)
        alone = self.sets.shares_nothing(seq) or (self._owner[cells] == self.sets.singletons.get(seq, -1)).all()
        if not alone or int(positions[-1]) - int(positions[0]) != n - 1 or (positions[1:] == positions[:-1]).any():
            self._irregular.add(seq)
            return None
        return self.rows.add(seq, int(positions[0]), cells)

    def write_rows(self) -> None:
        """Bring ``position`` and ``owner`` up to date."""
        for row in self.rows:
            if row.written < row.end:
                self._write_row(row)

    def _write_row(self, row: Row) -> None:
        start = max(row.written, row.begin)
        cells = self.rows.cells(row)[start - row.begin :]
        index = self.sets.index_of((row.seq,))
        self._position[cells] = np.arange(start, row.end)
        self._owner[cells] = index
        self._bounds.widen(index, int(cells.min()), int(cells.max()) + 1)
        row.written = row.end

    def _give_up_row(self, seq: int) -> None:
        """Keep a sequence in ``position`` and ``owner`` alone from now on; all sequences, if negative."""
        for row in list(self.rows) if seq < 0 else [self.rows.rows.get(seq)]:
            if row is not None:
                if row.written < row.end:
                    self._write_row(row)
                self.rows.drop(row.seq)

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
        cells = np.flatnonzero(self._owner[: self.top]) if seq < 0 else self._cells_seen_by(seq)
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
        self.free.release(cells)
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
        if row.begin == row.end:
            index = self.sets.singletons.get(row.seq)
            if index is not None and self.sets.shares_nothing(row.seq):
                self._bounds.set_empty(index)
            self.rows.drop(row.seq)
            self.rows.add(row.seq, 0)

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
        cells = self.rows.cells(row)
        first = int(cells.min())
        self.free.release(cells)
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
        cells = _within(self._cells_seen_by(src), self._position, start, stop)
        self._relabel(cells, lambda seqs: seqs | {dst})
        self.sets.drop_unused(self._owner)

    def shift(self, seq: int, start: int, stop: int, delta: int) -> tuple[IntArray, IntArray]:
        """Add ``delta`` to positions ``[start, stop)`` of a sequence; a negative result frees the cell.

        Returns the cells whose position changed and those that are empty now, both ascending.
        """
        self._irregular.clear()
        self._give_up_row(-1)
        changed = _within(self._cells_seen_by(seq), self._position, start, stop)
        self._position[changed] += delta
        self.pending.rotate(changed, delta)
        gone = changed[self._position[changed] < 0]
        self._clear(gone)
        return changed, gone

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> IntArray:
        """Divide positions ``[start, stop)`` of a sequence, rounding down; returns the cells, ascending."""
        self._irregular.clear()
        self._give_up_row(-1)
        changed = _within(self._cells_seen_by(seq), self._position, start, stop)
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
        self.write_rows()
        origin = np.arange(reached)
        carry(plan, ((self._position, -1), (self._owner, 0), (self.pending.rotations, 0), (origin, -1)))
        self.rows.move(origin)
        self._bounds.widen_to_all_cells()
        self.free.rebuild(self._owner[:reached] > 0)
        self.pending.add_moves(plan)

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
        self.free = FreeCells(self.size)
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
        self.free.release(cells[used_now & ~used_before])
        self.free.take_cells(cells[used_before & ~used_now])

    def _cells_seen_by(self, seq: int) -> IntArray:
        """Cells that a sequence without a row sees, ascending."""
        indices, lows, highs = self.sets.indices_with(seq), self._bounds.low, self._bounds.high
        cells: IntArray
        if len(indices) == 1:
            index = indices[0]
            low = lows[index]
            if low >= highs[index]:
                return np.zeros(0, dtype=np.int64)
            cells = (self._owner[low : highs[index]] == index).nonzero()[0]
        else:
            low = min((lows[index] for index in indices), default=0)
            high = max((highs[index] for index in indices), default=0)
            sees = np.zeros(len(self.sets), dtype=np.bool_)
            sees[list(indices)] = True
            cells = sees[self._owner[low:high]].nonzero()[0]
        cells += low
        return cells

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
        self.free.release(cells)


def _within(cells: IntArray, position: IntArray, start: int, stop: int) -> IntArray:
    """The ``cells`` whose position is in ``[start, stop)``."""
    positions = position[cells]
    held: IntArray = cells[(positions >= start) & (positions < stop)]
    return held
