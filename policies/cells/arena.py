"""An arena: one array of cells, each with a position and the set of sequences that see it.

The bookkeeping of llama.cpp's unified cache (``llama-kv-cache.cpp``), shared by every layout that places single
cells. Sets of sequences are interned, so that removing, sharing or keeping a sequence is one table look-up
over its part of the array, however many cells are shared. What an engine must still do, copies and rotations of keys,
is kept until somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cells.free_extents import FreeExtents
from policies.cells.ordering import carry
from policies.cells.search import Cells
from policies.cells.sequence_extents import Extent, SequenceExtents
from policies.vocabulary import NO_MOVES, NO_SHIFT, CellMap, Chunk, IntArray, Moves, Shift

FOREVER = np.iinfo(np.int64).max
"""A position after every other: the end of an open range."""

OwnerArray = NDArray[np.int32]
"""Indices of sets of sequences: half as long to look through as positions."""

_MANY_SETS = 4096
"""With more sets than these, those that no cell needs are forgotten now and then."""


class Saved(NamedTuple):
    """Some cells and what they held; arrays of shape (n,)."""

    cells: IntArray
    position: IntArray
    owner: OwnerArray
    turned: IntArray
    """How far each cell's key had still to be rotated."""
    last: dict[int, int]
    """Highest positions that were known."""


class Arena:
    """``size`` cells, a search position ``head``, and what each cell holds."""

    def __init__(self, size: int):
        self.size = size
        self.head = 0
        """Where the next search for free cells begins."""
        self.position: IntArray = np.full(size, -1, dtype=np.int64)
        """Shape (size,): position of the cell's token, -1 where it is empty."""
        self.owner: OwnerArray = np.zeros(size, dtype=np.int32)
        """Shape (size,): index into ``sets`` of the sequences that see the cell; 0 is the empty set."""
        self.free = FreeExtents(size)
        self._begin_sets([frozenset()])
        self._owed: list[Moves] = []
        self._turned: IntArray | None = None
        self._last: dict[int, int] = {}
        """Highest positions, of the sequences for which they are known."""

    @property
    def used(self) -> int:
        """Cells that hold a token."""
        return self.size - self.free.total

    @property
    def top(self) -> int:
        """One past the highest used cell."""
        return self.free.top

    def count_above(self) -> int:
        """Used cells at or above the ``used``-th, the fewest that packing must move: as many as there are free ones
        below it."""
        return self.free.count_below(self.used)

    def set_of(self, seqs: Iterable[int]) -> int:
        """The index of a set of sequences, new if it has not been seen before."""
        key = frozenset(seqs)
        index = self._set_index.get(key)
        if index is None:
            index = self._set_index[key] = len(self.sets)
            self.sets.append(key)
            self._where.add()
            for seq in key:
                self._sets_with.setdefault(seq, []).append(index)
            if len(key) == 1:
                self._alone[min(key)] = index
        return index

    def ends_with(self, seq: int) -> bool:
        """Whether the highest used cell is a sequence's alone."""
        top = self.top
        return top > 0 and int(self.owner[top - 1]) == self._alone.get(seq)

    @property
    def singles(self) -> list[tuple[int, int]]:
        """The sequences that may hold cells alone, and of each the index of the set of it alone."""
        return [(seq, index) for seq, index in self._alone.items() if self._where.holds(index)]

    def is_alone(self, seq: int) -> bool:
        """Whether a sequence shares cells with nobody: certain if so."""
        return self._sets_with.get(seq, []) in ([], [self._alone.get(seq)])

    def put(self, cells: IntArray, seqs: Iterable[int], start: int) -> None:
        """Write positions ``start, start + 1, ...`` of ``seqs`` into ``cells``, which are free."""
        seqs = tuple(seqs)
        index = self.set_of(seqs)
        self._where.forget((index,))
        self.position[cells] = np.arange(start, start + len(cells))
        self.owner[cells] = index
        if len(cells):
            self._where.widen(index, int(cells.min()), int(cells.max()) + 1)
        for seq in seqs:
            if seq in self._last:
                self._last[seq] = max(self._last[seq], start + len(cells) - 1)
        if self._turned is not None:
            self._turned[cells] = 0

    def take(self, cells: Cells, chunks: Sequence[Chunk]) -> None:
        """Write the tokens of some chunks, one after another, into ``cells``, which are free and then so no more."""
        indices = self._sets_with_each(chunks)
        if isinstance(cells, range):
            low, high = cells.start, cells.stop
            self.free.take(low, high - low)
            position, owner, at = self.position, self.owner, low
            self._where.took(indices, chunks, low, high)
            for index, (_, start, n, _) in zip(indices, chunks, strict=True):
                if n == 1:
                    position[at] = start
                    owner[at] = index
                    at += 1
                else:
                    position[at : at + n] = np.arange(start, start + n)
                    owner[at : at + n] = index
                    at += n
            if self._turned is not None:
                self._turned[low:high] = 0
        else:
            self.free.take_cells(cells)
            self._where.took_scattered(indices, cells, int(cells.min()), int(cells.max()) + 1)
            counts = [chunk.n for chunk in chunks]
            begins = np.cumsum([0, *counts[:-1]])
            self.position[cells] = np.repeat([chunk.start for chunk in chunks] - begins, counts) + np.arange(len(cells))
            self.owner[cells] = np.repeat(indices, counts)
            if self._turned is not None:
                self._turned[cells] = 0
        self._know_last(chunks, 1)

    def take_steps(self, cells: Cells, step: Sequence[Chunk], k: int) -> None:
        """The same for ``k`` steps of a token for each sequence, the first of them ``step``, the others a token further
        each: ``k * len(step)`` cells, ascending or descending, step after step."""
        indices = self._sets_with_each(step)
        where: slice | IntArray
        if isinstance(cells, range):
            self.free.take(cells.start, len(cells))
            where = slice(cells.start, cells.stop)
            self._where.took_turns(indices, cells.start, cells.stop)
        else:
            first, last = int(cells[0]), int(cells[-1])
            if first - last == len(cells) - 1:
                self.free.take(last, len(cells))
                where = slice(first, last - 1 if last else None, -1)
                self._where.took_turns(indices, last, first + 1, down=True)
            else:
                self.free.take_cells(cells)
                where = cells
                self._where.forget(indices)
                self._where.widen_all(indices, min(first, last), max(first, last) + 1)
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
        if self._turned is not None:
            self._turned[where] = 0
        self._know_last(step, k)

    def extents_of(self, seq: int) -> Sequence[Extent] | None:
        """All cells of a sequence that shares none, where they are known to lie in few pieces."""
        return self._where.pieces.get(self._alone.get(seq, 0)) if self.is_alone(seq) else None

    def cells_of(self, seq: int) -> tuple[IntArray, IntArray]:
        """Cells of a sequence in order of position, and those positions; both of shape (n,)."""
        cells = self._seen_by(seq)
        positions = self.position[cells]
        if (positions[1:] > positions[:-1]).all():
            return cells, positions
        order = np.argsort(positions, kind="stable")
        return cells[order], positions[order]

    def remove(self, seq: int, start: int = 0, stop: int = FOREVER) -> IntArray:
        """Take positions ``[start, stop)`` from a sequence (every sequence, if negative).

        Returns the cells that are empty now, ascending.
        """
        cells = np.flatnonzero(self.owner[: self.top]) if seq < 0 else self._seen_by(seq)
        whole = start <= 0 and stop == FOREVER
        self._where.forget((self._alone.get(seq, 0),))
        if not whole:
            positions = self.position[cells]
            cells = cells[(positions >= start) & (positions < stop)]
        if seq < 0:
            return self._relabel(cells, lambda _: frozenset())
        if not self.is_alone(seq):
            return self._relabel(cells, lambda seqs: seqs - {seq})
        if whole and seq in self._last:
            self._last[seq] = -1
        elif self._last.get(seq, -1) < stop:
            self._last.pop(seq, None)
        if whole and seq in self._alone:
            self._where.vanish(self._alone[seq])
        self._clear(cells)
        return cells

    def empty(self, seq: int) -> int | None:
        """``remove`` all of a sequence; returns the first of the cells that are empty now, None if there is none."""
        index = self._alone.get(seq)
        pieces = None if index is None or len(self._sets_with[seq]) > 1 else self._where.pieces.pop(index, None)
        if index is None or pieces is None:
            gone = self.remove(seq)
            return int(gone[0]) if len(gone) else None
        if seq in self._last:
            self._last[seq] = -1
        self._where.vanish(index)
        for start, stop, stride in pieces:
            self.position[start:stop:stride] = -1
            self.owner[start:stop:stride] = 0
        self.free.release_pieces(pieces)
        return min(pieces)[0]

    def keep(self, seq: int) -> IntArray:
        """Empty every cell that the sequence does not see, and leave the rest to it alone."""
        gone = self._relabel(np.flatnonzero(self.owner[: self.top]), lambda seqs: seqs & {seq})
        self._forget_sets()
        return gone

    def share(self, src: int, dst: int, start: int = 0, stop: int = FOREVER) -> None:
        """Let ``dst`` see the cells that hold positions ``[start, stop)`` of ``src``: nothing is copied."""
        self._relabel(self._held(src, start, stop), lambda seqs: seqs | {dst})
        self._forget_sets()

    def shift(self, seq: int, start: int, stop: int, delta: int) -> tuple[IntArray, IntArray]:
        """Add ``delta`` to positions ``[start, stop)`` of a sequence; a negative result frees the cell.

        Returns the cells whose position changed and those that are empty now, both ascending.
        """
        changed = self._held(seq, start, stop)
        self.position[changed] += delta
        self._last.clear()
        self._where.pieces.clear()
        self.turn(changed, delta)
        gone = changed[self.position[changed] < 0]
        self._clear(gone)
        return changed, gone

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> IntArray:
        """Divide positions ``[start, stop)`` of a sequence, rounding down; returns the cells, ascending."""
        changed = self._held(seq, start, stop)
        divided = self.position[changed] // divisor
        self.turn(changed, divided - self.position[changed])
        self.position[changed] = divided
        self._last.clear()
        return changed

    def last_position(self, seq: int) -> int:
        """The highest position of a sequence; -1 if it holds none."""
        last = self._last.get(seq)
        if last is None:
            last = self._last[seq] = int(self.position[self._seen_by(seq)].max(initial=-1))
        return last

    def go_on(self, chunks: Iterable[Chunk]) -> bool:
        """Whether each of these is one sequence's alone, and begins where that is known to end: certain if so."""
        last = self._last
        return not any(also or last.get(seq, start) != start - 1 for seq, start, _, also in chunks)

    def first_position(self, seq: int) -> int:
        """The lowest position of a sequence; -1 if it holds none."""
        held = self.position[self._seen_by(seq)]
        return int(held.min()) if len(held) else -1

    def sequences(self) -> list[int]:
        """All sequences that hold cells, ascending."""
        present = np.flatnonzero(np.bincount(self.owner[: self.top], minlength=1))
        return sorted(frozenset().union(*(self.sets[i] for i in present.tolist())))

    def compact(self, plan: Moves) -> None:
        """Move tokens: each run's cells end up where the plan says, and the cells they left are empty."""
        if plan.n_runs == 0:
            return
        reached = max(self.top, int((plan.dst + plan.length).max()))
        carry(plan, ((self.position, -1), (self.owner, 0), (self._turned, 0)))
        self._where.scatter()
        self.free.rebuild(self.owner[:reached] > 0)
        self._owed.append(plan)

    @property
    def owes(self) -> bool:
        """Whether an engine has moves or rotations yet to be told of."""
        return bool(self._owed) or self._turned is not None

    def settle(self) -> tuple[Moves, Shift]:
        """The moves, and then the rotations of keys, that an engine has not been told of yet."""
        shift = NO_SHIFT
        if self._turned is None and not self._owed:
            return NO_MOVES, shift
        if self._turned is not None:
            cells = np.flatnonzero((self._turned != 0) & (self.owner > 0))
            shift, self._turned = Shift(cells, self._turned[cells]), None
        return self.settle_moves(), shift

    def settle_moves(self) -> Moves:
        """The moves alone: rotations may wait until the keys are read."""
        moves, self._owed = Moves.join(self._owed), []
        return moves

    def unsettle(self, settled: Sequence[tuple[Moves, Shift]]) -> None:
        """Owe again what ``settle`` had given out, in that order, since it will not be carried out."""
        later, turned = self._owed, np.zeros(self.size, dtype=np.int64)
        self._owed = []
        for moves, shift in settled:
            moves.carry(turned, 0)
            turned[shift.cells] += shift.deltas
            if moves.n_runs:
                self._owed.append(moves)
        for moves in later:
            moves.carry(turned, 0)
        self._owed += later
        if turned.any():
            self._turned = turned if self._turned is None else self._turned + turned

    def save(self, cells: IntArray) -> Saved:
        """What ``restore`` needs to make ``cells`` what they are now."""
        turned = np.zeros_like(cells) if self._turned is None else self._turned[cells]
        return Saved(cells, self.position[cells], self.owner[cells], turned, self._last.copy())

    def restore(self, saved: Saved) -> None:
        """Make the saved cells what they were."""
        cells, self._last = saved.cells, saved.last
        self._where.pieces.clear()
        now, then = self.owner[cells] > 0, saved.owner > 0
        self.position[cells] = saved.position
        self.owner[cells] = saved.owner
        if self._turned is not None:
            self._turned[cells] = saved.turned
        if then.any():
            low, high = int(cells.min()), int(cells.max()) + 1
            for index in set(saved.owner.tolist()):
                self._where.widen(index, low, high)
        self.free.release(cells[now & ~then])
        self.free.take_cells(cells[then & ~now])

    def vacate(self, cells: IntArray) -> None:
        """Empty ``cells``, all of them used."""
        if len(cells):
            for index in set(self.owner[cells].tolist()):
                self._where.forget((index,))
                for seq in self.sets[index]:
                    self._last.pop(seq, None)
            self._clear(cells)

    def clear(self) -> None:
        """Empty every cell and return the head to the start."""
        self.position[:] = -1
        self.owner[:] = 0
        self.free = FreeExtents(self.size)
        self._begin_sets([frozenset()])
        self.head = 0
        self._turned = None
        self._last.clear()

    def cell_map(self) -> CellMap:
        """A copy of the whole state, cell by cell."""
        return CellMap(self.position.copy(), tuple(self.sets[i] for i in self.owner.tolist()))

    def first_owners(self) -> IntArray:
        """The smallest sequence in each cell, -1 where it holds no token."""
        return np.array([min(owners, default=-1) for owners in self.sets], dtype=np.int64)[self.owner]

    def turn(self, cells: IntArray, deltas: int | IntArray) -> None:
        """Remember that the keys in ``cells`` must be rotated on by ``deltas`` positions."""
        if len(cells):
            if self._turned is None:
                self._turned = np.zeros(self.size, dtype=np.int64)
            self._turned[cells] += deltas

    def _begin_sets(self, sets: Sequence[frozenset[int]]) -> None:
        """Know just these sets, the empty one first, each of them as if its cells could lie anywhere."""
        self.sets: list[frozenset[int]] = []
        self._set_index: dict[frozenset[int], int] = {}
        self._alone: dict[int, int] = {}
        """Of a sequence: the set of it alone."""
        self._sets_with: dict[int, list[int]] = {}
        """Of a sequence: all sets that it is in."""
        self._where = SequenceExtents(self.size)
        for key in sets:
            self._where.widen(self.set_of(key), 0, self.size if key else 0)

    def _forget_sets(self) -> None:
        """Let go of sets that no cell needs, if there are many."""
        if len(self.sets) > _MANY_SETS:
            present = np.union1d([0], self.owner)
            self.owner[:] = np.searchsorted(present, self.owner)
            self._begin_sets([self.sets[index] for index in present.tolist()])

    def _sets_with_each(self, chunks: Sequence[Chunk]) -> list[int]:
        """Of each chunk: the index of the set of sequences that see it."""
        alone, indices = self._alone, []
        for seq, _, _, also in chunks:
            index = None if also else alone.get(seq)
            indices.append(self.set_of((seq, *also)) if index is None else index)
        return indices

    def _know_last(self, chunks: Sequence[Chunk], steps: int) -> None:
        """The highest positions after some chunks, and after the same ones a token further for each further step."""
        last = self._last
        if last:
            for seq, start, n, also in chunks:
                end = start + n + steps - 2
                if seq in last and last[seq] < end:
                    last[seq] = end
                for each in also:
                    if last.get(each, end) < end:
                        last[each] = end

    def _held(self, seq: int, start: int, stop: int) -> IntArray:
        """Cells in which a sequence holds positions ``[start, stop)``, ascending."""
        cells = self._seen_by(seq)
        positions = self.position[cells]
        held: IntArray = cells[(positions >= start) & (positions < stop)]
        return held

    def _seen_by(self, seq: int) -> IntArray:
        """Cells that a sequence sees, ascending."""
        sets = self._sets_with.get(seq, ())
        cells: IntArray
        if len(sets) == 1:
            low = self._where.low[sets[0]]
            cells = (self.owner[low : min(self._where.high[sets[0]], self.top)] == sets[0]).nonzero()[0]
        else:
            low = min((self._where.low[index] for index in sets), default=0)
            high = min(max((self._where.high[index] for index in sets), default=0), self.top)
            sees = np.zeros(len(self.sets), dtype=np.bool_)
            sees[list(sets)] = True
            cells = sees[self.owner[low:high]].nonzero()[0]
        cells += low
        return cells

    def _relabel(self, cells: IntArray, change: Callable[[frozenset[int]], frozenset[int]]) -> IntArray:
        """Give the cells, which ascend, the set that ``change`` makes of theirs; return those left empty."""
        if len(cells) == 0:
            return cells
        self._last.clear()
        self._where.pieces.clear()
        old = self.owner[cells]
        table = np.zeros(len(self.sets), dtype=np.int32)
        low, high = int(cells[0]), int(cells[-1]) + 1
        for index in np.flatnonzero(np.bincount(old)).tolist():
            table[index] = new = self.set_of(change(self.sets[index]))
            self._where.widen(new, low, high)
        now = table[old]
        self.owner[cells] = now
        gone: IntArray = cells[now == 0]
        self._clear(gone)
        return gone

    def _clear(self, cells: IntArray) -> None:
        self.position[cells] = -1
        self.owner[cells] = 0
        self.free.release(cells)
