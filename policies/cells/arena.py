"""An arena: one array of cells, each with a position and the set of sequences that see it.

The bookkeeping of llama.cpp's unified cache (``llama-kv-cache.cpp``), shared by every layout that places single
cells. The arena keeps its parts consistent: positions and owners by cell, the free extents, the interned sets of
sequences (so that removing, sharing or keeping a sequence is one table look-up over an array, however many cells are
shared), and the updates that an engine must still make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from policies.cells.free_extents import FreeExtents
from policies.cells.last_positions import LastPositions
from policies.cells.ordering import carry
from policies.cells.pending import PendingUpdates
from policies.cells.search import Cells
from policies.cells.sequence_sets import SequenceSets, SetIndices
from policies.vocabulary import CellMap, Chunk, IntArray, Moves

FOREVER = np.iinfo(np.int64).max
"""A position after every other: the end of an open range."""


class Arena:
    """``size`` cells, a search position ``head``, and what each cell holds."""

    def __init__(self, size: int):
        self.size = size
        self.head = 0
        """Where the next search for free cells begins."""
        self.position: IntArray = np.full(size, -1, dtype=np.int64)
        """Shape (size,): position of the cell's token, -1 where it is empty."""
        self.owner: SetIndices = np.zeros(size, dtype=np.int32)
        """Shape (size,): index into ``sets`` of the sequences that see the cell; 0 is the empty set."""
        self.sets = SequenceSets(size)
        self.free = FreeExtents(size)
        self.last_positions = LastPositions()
        self.pending = PendingUpdates(size)
        self._extents = self.sets.extents

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
        cells = self._cells_seen_by(seq)
        positions = self.position[cells]
        if (positions[1:] > positions[:-1]).all():
            return cells, positions
        order = np.argsort(positions, kind="stable")
        return cells[order], positions[order]

    def last_position(self, seq: int) -> int:
        """The highest position of a sequence; -1 if it holds none."""
        last = self.last_positions.get(seq)
        if last is None:
            last = self.last_positions[seq] = int(self.position[self._cells_seen_by(seq)].max(initial=-1))
        return last

    def first_position(self, seq: int) -> int:
        """The lowest position of a sequence; -1 if it holds none."""
        held = self.position[self._cells_seen_by(seq)]
        return int(held.min()) if len(held) else -1

    def sequences(self) -> list[int]:
        """All sequences that hold cells, ascending."""
        present = np.flatnonzero(np.bincount(self.owner[: self.top], minlength=1))
        return sorted(frozenset().union(*(self.sets[i] for i in present.tolist())))

    def cell_map(self) -> CellMap:
        """A copy of the whole state, cell by cell."""
        sets = list(self.sets)
        return CellMap(self.position.copy(), tuple(sets[i] for i in self.owner.tolist()))

    def first_owners(self) -> IntArray:
        """Shape (size,): the smallest sequence in each cell, -1 where it holds no token."""
        return self.sets.smallest_members()[self.owner]

    # Writing tokens

    def put(self, cells: IntArray, seqs: Iterable[int], start: int) -> None:
        """Write positions ``start, start + 1, ...`` of ``seqs`` into ``cells``, which have been taken from ``free``."""
        seqs = tuple(seqs)
        index = self.sets.index_of(seqs)
        self._extents.forget((index,))
        self.position[cells] = np.arange(start, start + len(cells))
        self.owner[cells] = index
        if len(cells):
            self._extents.widen(index, int(cells.min()), int(cells.max()) + 1)
        self.last_positions.advance([Chunk(seqs[0], start, len(cells), seqs[1:])])
        if self.pending.rotations is not None:
            self.pending.rotations[cells] = 0

    def take(self, cells: Cells, chunks: Sequence[Chunk]) -> None:
        """Take free ``cells`` and write the tokens of ``chunks`` into them, in order."""
        indices = self.sets.indices_of(chunks)
        rotations = self.pending.rotations
        if isinstance(cells, range):
            low, high = cells.start, cells.stop
            self.free.take(low, high - low)
            position, owner, at = self.position, self.owner, low
            self._extents.add_chunks(indices, chunks, low, high)
            for index, (_, start, n, _) in zip(indices, chunks, strict=True):
                if n == 1:
                    position[at] = start
                    owner[at] = index
                    at += 1
                else:
                    position[at : at + n] = np.arange(start, start + n)
                    owner[at : at + n] = index
                    at += n
            if rotations is not None:
                rotations[low:high] = 0
        else:
            self.free.take_cells(cells)
            self._extents.add_cells(indices, cells, int(cells.min()), int(cells.max()) + 1)
            counts = [chunk.n for chunk in chunks]
            begins = np.cumsum([0, *counts[:-1]])
            self.position[cells] = np.repeat([chunk.start for chunk in chunks] - begins, counts) + np.arange(len(cells))
            self.owner[cells] = np.repeat(indices, counts)
            if rotations is not None:
                rotations[cells] = 0
        self.last_positions.advance(chunks)

    def take_steps(self, cells: Cells, step: Sequence[Chunk], k: int) -> None:
        """Take free cells for ``k`` decode steps: ``step``, and ``k - 1`` times the same sequences a token further.

        ``cells``: ``k * len(step)`` of them, ascending or descending, step after step.
        """
        indices = self.sets.indices_of(step)
        where: slice | IntArray
        if isinstance(cells, range):
            self.free.take(cells.start, len(cells))
            where = slice(cells.start, cells.stop)
            self._extents.add_interleaved(indices, cells.start, cells.stop)
        else:
            first, last = int(cells[0]), int(cells[-1])
            if first - last == len(cells) - 1:
                self.free.take(last, len(cells))
                where = slice(first, last - 1 if last else None, -1)
                self._extents.add_interleaved(indices, last, first + 1, descending=True)
            else:
                self.free.take_cells(cells)
                where = cells
                self._extents.forget(indices)
                self._extents.widen_all(indices, min(first, last), max(first, last) + 1)
        if len(step) == 1:
            start = step[0].start
            self.position[where] = np.arange(start, start + k)
            self.owner[where] = indices[0]
        else:
            table = np.arange(k)[:, None] + np.array([chunk.start for chunk in step])
            owners = np.array(indices, dtype=np.int32)
            if isinstance(cells, range):
                self.position[where].reshape(table.shape)[:] = table
                self.owner[where].reshape(table.shape)[:] = owners
            else:
                self.position[where] = table.ravel()
                self.owner[where] = np.tile(owners, k)
        if self.pending.rotations is not None:
            self.pending.rotations[where] = 0
        self.last_positions.advance(step, k)

    # Operations on sequences

    def remove(self, seq: int, start: int = 0, stop: int = FOREVER) -> IntArray:
        """Take positions ``[start, stop)`` from a sequence (from every sequence, if ``seq`` is negative).

        Returns the cells that are empty now, ascending.
        """
        cells = np.flatnonzero(self.owner[: self.top]) if seq < 0 else self._cells_seen_by(seq)
        whole = start <= 0 and stop == FOREVER
        singletons, last = self.sets.singletons, self.last_positions
        self._extents.forget((singletons.get(seq, 0),))
        if not whole:
            cells = _within(cells, self.position, start, stop)
        if seq < 0:
            return self._relabel(cells, lambda _: frozenset())
        if not self.sets.shares_nothing(seq):
            return self._relabel(cells, lambda seqs: seqs - {seq})
        if whole and seq in last:
            last[seq] = -1
        elif last.get(seq, -1) < stop:
            last.pop(seq, None)
        if whole and seq in singletons:
            self._extents.set_empty(singletons[seq])
        self._clear(cells)
        return cells

    def empty(self, seq: int) -> int | None:
        """Take all positions from a sequence.

        Returns the first of the cells that are empty now, None if there is none.
        """
        extents = self.sets.take_extents_of(seq)
        if extents is None:
            gone = self.remove(seq)
            return int(gone[0]) if len(gone) else None
        if seq in self.last_positions:
            self.last_positions[seq] = -1
        for start, stop, stride in extents:
            self.position[start:stop:stride] = -1
            self.owner[start:stop:stride] = 0
        self.free.release_strided(extents)
        return min(extents)[0]

    def keep(self, seq: int) -> IntArray:
        """Take everything from all other sequences; returns the cells that are empty now, ascending."""
        gone = self._relabel(np.flatnonzero(self.owner[: self.top]), lambda seqs: seqs & {seq})
        self.sets.drop_unused(self.owner)
        return gone

    def share(self, src: int, dst: int, start: int = 0, stop: int = FOREVER) -> None:
        """Let ``dst`` see the cells that hold positions ``[start, stop)`` of ``src``: nothing is copied."""
        cells = _within(self._cells_seen_by(src), self.position, start, stop)
        self._relabel(cells, lambda seqs: seqs | {dst})
        self.sets.drop_unused(self.owner)

    def shift(self, seq: int, start: int, stop: int, delta: int) -> tuple[IntArray, IntArray]:
        """Add ``delta`` to positions ``[start, stop)`` of a sequence; a negative result frees the cell.

        Returns the cells whose position changed and those that are empty now, both ascending.
        """
        changed = _within(self._cells_seen_by(seq), self.position, start, stop)
        self.position[changed] += delta
        self.last_positions.clear()
        self._extents.known.clear()
        self.pending.rotate(changed, delta)
        gone = changed[self.position[changed] < 0]
        self._clear(gone)
        return changed, gone

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> IntArray:
        """Divide positions ``[start, stop)`` of a sequence, rounding down; returns the cells, ascending."""
        changed = _within(self._cells_seen_by(seq), self.position, start, stop)
        divided = self.position[changed] // divisor
        self.pending.rotate(changed, divided - self.position[changed])
        self.position[changed] = divided
        self.last_positions.clear()
        return changed

    # Operations on cells

    def compact(self, plan: Moves) -> None:
        """Move tokens: each run's tokens go where the plan says, and the cells that they leave are empty."""
        if plan.n_runs == 0:
            return
        reached = max(self.top, int((plan.dst + plan.length).max()))
        carry(plan, ((self.position, -1), (self.owner, 0), (self.pending.rotations, 0)))
        self._extents.widen_to_all_cells()
        self.free.rebuild(self.owner[:reached] > 0)
        self.pending.add_moves(plan)

    def vacate(self, cells: IntArray) -> None:
        """Empty ``cells``, all of them used, whichever sequences see them."""
        if len(cells):
            for index in set(self.owner[cells].tolist()):
                self._extents.forget((index,))
                for seq in self.sets[index]:
                    self.last_positions.pop(seq, None)
            self._clear(cells)

    def clear(self) -> None:
        """Empty every cell and return the head to the start."""
        self.position[:] = -1
        self.owner[:] = 0
        self.free = FreeExtents(self.size)
        self.sets.reset()
        self.head = 0
        self.pending.rotations = None
        self.last_positions.clear()

    def _cells_seen_by(self, seq: int) -> IntArray:
        """Cells that a sequence sees, ascending."""
        indices, lows, highs = self.sets.indices_with(seq), self._extents.low, self._extents.high
        cells: IntArray
        if len(indices) == 1:
            index = indices[0]
            low = lows[index]
            cells = (self.owner[low : min(highs[index], self.top)] == index).nonzero()[0]
        else:
            low = min((lows[index] for index in indices), default=0)
            high = min(max((highs[index] for index in indices), default=0), self.top)
            sees = np.zeros(len(self.sets), dtype=np.bool_)
            sees[list(indices)] = True
            cells = sees[self.owner[low:high]].nonzero()[0]
        cells += low
        return cells

    def _relabel(self, cells: IntArray, change: Callable[[frozenset[int]], frozenset[int]]) -> IntArray:
        """Give ``cells``, which ascend, the set that ``change`` makes of theirs; return those that are empty now."""
        if len(cells) == 0:
            return cells
        self.last_positions.clear()
        self._extents.known.clear()
        old = self.owner[cells]
        table = np.zeros(len(self.sets), dtype=np.int32)
        low, high = int(cells[0]), int(cells[-1]) + 1
        for index in np.flatnonzero(np.bincount(old)).tolist():
            table[index] = new = self.sets.index_of(change(self.sets[index]))
            self._extents.widen(new, low, high)
        now = table[old]
        self.owner[cells] = now
        gone: IntArray = cells[now == 0]
        self._clear(gone)
        return gone

    def _clear(self, cells: IntArray) -> None:
        self.position[cells] = -1
        self.owner[cells] = 0
        self.free.release(cells)


def _within(cells: IntArray, position: IntArray, start: int, stop: int) -> IntArray:
    """The ``cells`` whose position is in ``[start, stop)``."""
    positions = position[cells]
    held: IntArray = cells[(positions >= start) & (positions < stop)]
    return held
