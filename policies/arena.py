"""An arena: one array of cells, each with a position and the set of sequences that see it.

The bookkeeping of llama.cpp's unified cache (``llama-kv-cache.cpp``), shared by every layout that places single
cells. Sets of sequences are interned, so that removing, sharing or keeping a sequence is one table look-up
over the whole array, however many cells are shared. What an engine must still do, copies and rotations of keys, is
kept until somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from policies.free_runs import FreeRuns
from policies.vocabulary import NO_SHIFT, CellMap, IntArray, Moves, Shift

FOREVER = np.iinfo(np.int64).max
"""A position after every other: the end of an open range."""


class Saved(NamedTuple):
    """Some cells and what they held; arrays of shape (n,)."""

    cells: IntArray
    position: IntArray
    owner: IntArray
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
        self.owner: IntArray = np.zeros(size, dtype=np.int64)
        """Shape (size,): index into ``sets`` of the sequences that see the cell; 0 is the empty set."""
        self.sets: list[frozenset[int]] = [frozenset()]
        self._set_index: dict[frozenset[int], int] = {frozenset(): 0}
        self.free = FreeRuns(size)
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

    @property
    def above(self) -> int:
        """Used cells at or above the ``used``-th: the fewest that packing must move."""
        used = self.used
        return int(np.count_nonzero(self.owner[used : self.top]))

    def set_of(self, seqs: Iterable[int]) -> int:
        """The index of a set of sequences, new if it has not been seen before."""
        key = frozenset(seqs)
        index = self._set_index.get(key)
        if index is None:
            index = self._set_index[key] = len(self.sets)
            self.sets.append(key)
        return index

    def put(self, cells: IntArray, seqs: Iterable[int], start: int) -> None:
        """Write positions ``start, start + 1, ...`` of ``seqs`` into ``cells``, which are free."""
        seqs = tuple(seqs)
        self.position[cells] = np.arange(start, start + len(cells))
        self.owner[cells] = self.set_of(seqs)
        for seq in seqs:
            if seq in self._last:
                self._last[seq] = max(self._last[seq], start + len(cells) - 1)
        if self._turned is not None:
            self._turned[cells] = 0

    def cells_of(self, seq: int) -> tuple[IntArray, IntArray]:
        """Cells of a sequence in order of position, and those positions; both of shape (n,)."""
        cells = np.flatnonzero(self._seen_by(seq))
        positions = self.position[cells]
        order = np.argsort(positions, kind="stable")
        return cells[order], positions[order]

    def remove(self, seq: int, start: int = 0, stop: int = FOREVER) -> IntArray:
        """Take positions ``[start, stop)`` from a sequence (every sequence, if negative).

        Returns the cells that are empty now, ascending.
        """
        inside = self._between(start, stop)
        if seq < 0:
            inside &= self.owner[: self.top] > 0
            return self._relabel(inside, lambda _: frozenset())
        return self._relabel(inside & self._seen_by(seq), lambda seqs: seqs - {seq})

    def keep(self, seq: int) -> IntArray:
        """Empty every cell that the sequence does not see, and leave the rest to it alone."""
        return self._relabel(self.owner[: self.top] > 0, lambda seqs: seqs & {seq})

    def share(self, src: int, dst: int, start: int = 0, stop: int = FOREVER) -> None:
        """Let ``dst`` see the cells that hold positions ``[start, stop)`` of ``src``: nothing is copied."""
        self._relabel(self._between(start, stop) & self._seen_by(src), lambda seqs: seqs | {dst})

    def shift(self, seq: int, start: int, stop: int, delta: int) -> tuple[IntArray, IntArray]:
        """Add ``delta`` to positions ``[start, stop)`` of a sequence; a negative result frees the cell.

        Returns the cells whose position changed and those that are empty now, both ascending.
        """
        changed = np.flatnonzero(self._between(start, stop) & self._seen_by(seq))
        self.position[changed] += delta
        self._last.clear()
        self.turn(changed, delta)
        gone = changed[self.position[changed] < 0]
        self._clear(gone)
        return changed, gone

    def divide(self, seq: int, start: int, stop: int, divisor: int) -> IntArray:
        """Divide positions ``[start, stop)`` of a sequence, rounding down; returns the cells, ascending."""
        changed = np.flatnonzero(self._between(start, stop) & self._seen_by(seq))
        divided = self.position[changed] // divisor
        self.turn(changed, divided - self.position[changed])
        self.position[changed] = divided
        self._last.clear()
        return changed

    def last_position(self, seq: int) -> int:
        """The highest position of a sequence; -1 if it holds none."""
        if seq not in self._last:
            self._last[seq] = int(self.position[: self.top][self._seen_by(seq)].max(initial=-1))
        return self._last[seq]

    def first_position(self, seq: int) -> int:
        """The lowest position of a sequence; -1 if it holds none."""
        held = self.position[: self.top][self._seen_by(seq)]
        return int(held.min()) if len(held) else -1

    def sequences(self) -> list[int]:
        """All sequences that hold cells, ascending."""
        present = np.unique(self.owner[: self.top])
        return sorted(frozenset().union(*(self.sets[i] for i in present.tolist())))

    def compact(self, plan: Moves) -> None:
        """Move tokens: each run's cells end up where the plan says, and the cells they left are empty."""
        if plan.n_runs == 0:
            return
        plan.carry(self.position, -1)
        plan.carry(self.owner, 0)
        if self._turned is not None:
            plan.carry(self._turned, 0)
        self.free.rebuild(self.owner > 0)
        self._owed.append(plan)

    @property
    def owes(self) -> bool:
        """Whether an engine has moves or rotations yet to be told of."""
        return bool(self._owed) or self._turned is not None

    def settle(self) -> tuple[Moves, Shift]:
        """The moves, and then the rotations of keys, that an engine has not been told of yet."""
        shift = NO_SHIFT
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
        now, then = self.owner[cells] > 0, saved.owner > 0
        self.position[cells] = saved.position
        self.owner[cells] = saved.owner
        if self._turned is not None:
            self._turned[cells] = saved.turned
        self.free.release(cells[now & ~then])
        self.free.take_cells(cells[then & ~now])

    def vacate(self, cells: IntArray) -> None:
        """Empty ``cells``, all of them used."""
        if len(cells):
            self._last.clear()
            self._clear(cells)

    def clear(self) -> None:
        """Empty every cell and return the head to the start."""
        self.position[:] = -1
        self.owner[:] = 0
        self.free = FreeRuns(self.size)
        self.head = 0
        self._turned = None
        self._last.clear()

    def cell_map(self) -> CellMap:
        """A copy of the whole state, cell by cell."""
        return CellMap(self.position.copy(), tuple(self.sets[i] for i in self.owner.tolist()))

    def turn(self, cells: IntArray, deltas: int | IntArray) -> None:
        """Remember that the keys in ``cells`` must be rotated on by ``deltas`` positions."""
        if len(cells):
            if self._turned is None:
                self._turned = np.zeros(self.size, dtype=np.int64)
            self._turned[cells] += deltas

    def _between(self, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        position = self.position[: self.top]
        return (position >= start) & (position < stop)

    def _seen_by(self, seq: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        sees = np.fromiter((seq in s for s in self.sets), dtype=bool, count=len(self.sets))
        return np.asarray(sees[self.owner[: self.top]])

    def _relabel(
        self,
        which: np.ndarray[tuple[int], np.dtype[np.bool_]],
        change: Callable[[frozenset[int]], frozenset[int]],
    ) -> IntArray:
        """Give the cells in ``which`` (a mask) the set that ``change`` makes of theirs; return those left empty."""
        cells = np.flatnonzero(which)
        if len(cells) == 0:
            return cells
        self._last.clear()
        old = self.owner[cells]
        table = np.zeros(len(self.sets), dtype=np.int64)
        for index in np.unique(old).tolist():
            table[index] = self.set_of(change(self.sets[index]))
        new = table[old]
        self.owner[cells] = new
        gone: IntArray = cells[new == 0]
        self._clear(gone)
        return gone

    def _clear(self, cells: IntArray) -> None:
        self.position[cells] = -1
        self.owner[cells] = 0
        self.free.release(cells)
