"""What the cells of an arena hold, and how tokens are written into them.

Sequences that share no cell and have no gap are kept as rows of cells; positions and owners by cell are brought up to
date when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from policies.cells.free_cells import FreeCells
from policies.cells.search import cells_array
from policies.cells.sequence_cells import Row, SequenceCells
from policies.cells.sequence_sets import SequenceSets, SetIndices
from policies.vocabulary import NO_MOVES, NO_SHIFT, CellMap, Cells, Chunk, IntArray, Moves, Shift


class PendingUpdates:
    """Moves and rotations that have not been given out yet; they go out with the next micro-batch."""

    __slots__ = ("_size", "moves", "rotations")

    def __init__(self, size: int):
        self._size = size
        self.moves: list[Moves] = []
        """Copies of cells, in order."""
        self.rotations: IntArray | None = None
        """Shape (size,): by how many positions each cell's key must still be rotated; None: no key must be."""

    @property
    def is_empty(self) -> bool:
        """Whether an engine has nothing to do."""
        return not self.moves and self.rotations is None

    def rotate(self, cells: IntArray, deltas: int | IntArray) -> None:
        """Add rotations of the keys in ``cells`` by ``deltas`` positions."""
        if len(cells):
            if self.rotations is None:
                self.rotations = np.zeros(self._size, dtype=np.int64)
            self.rotations[cells] += deltas

    def rotations_of(self, cells: IntArray) -> IntArray:
        """By how many positions the keys in ``cells`` must still be rotated; the same shape."""
        return np.zeros_like(cells) if self.rotations is None else self.rotations[cells]

    def add_moves(self, plan: Moves) -> None:
        """Add moves, of which ``rotations`` knows already."""
        self.moves.append(plan)

    def settle(self, owner: np.ndarray[tuple[int], np.dtype[np.int32]]) -> tuple[Moves, Shift]:
        """Give out all moves, and then all rotations of keys in used cells, whose entry in ``owner`` is not 0."""
        shift = NO_SHIFT
        if self.rotations is None and not self.moves:
            return NO_MOVES, shift
        if self.rotations is not None:
            cells = np.flatnonzero((self.rotations != 0) & (owner > 0))
            shift, self.rotations = Shift(cells, self.rotations[cells]), None
        return self.settle_moves(), shift

    def settle_moves(self) -> Moves:
        """Give out the moves alone: rotations may wait until the keys are read."""
        moves, self.moves = Moves.join(self.moves), []
        return moves

    def put_back(self, settled: Sequence[tuple[Moves, Shift]]) -> None:
        """Take back what was given out, in that order, since no engine will do it."""
        later, rotations = self.moves, np.zeros(self._size, dtype=np.int64)
        self.moves = []
        for moves, shift in settled:
            moves.carry(rotations, 0)
            rotations[shift.cells] += shift.deltas
            if moves.n_runs:
                self.moves.append(moves)
        for moves in later:
            moves.carry(rotations, 0)
        self.moves += later
        if rotations.any():
            self.rotations = rotations if self.rotations is None else self.rotations + rotations


class CellContents:
    """The position and the set of sequences of each cell's token, as far as they are not kept in rows."""

    def __init__(self, size: int):
        self.position: IntArray = np.full(size, -1, dtype=np.int64)
        """Shape (size,): -1 where the cell is empty."""
        self.owner: SetIndices = np.zeros(size, dtype=np.int32)
        """Shape (size,): index into ``sets``; 0 is the empty set."""
        self.sets = SequenceSets(size)
        self._bounds = self.sets.bounds

    def put(self, cells: IntArray, seqs: Iterable[int], start: int) -> None:
        """Let ``cells`` hold positions ``start, start + 1, ...`` of ``seqs``."""
        index = self.sets.index_of(seqs)
        self.position[cells] = np.arange(start, start + len(cells))
        self.owner[cells] = index
        if len(cells):
            self._bounds.widen(index, int(cells.min()), int(cells.max()) + 1)

    def put_row(self, row: Row, rows: SequenceCells) -> None:
        """Let cells hold what a row has noted since it was put here last."""
        start = max(row.written, row.begin)
        if row.end == start + 1:
            index = self.sets.index_of((row.seq,))
            cell = rows.at(row, start)
            self.position[cell] = start
            self.owner[cell] = index
            self._bounds.widen(index, cell, cell + 1)
        else:
            self.put(rows.cells(row)[start - row.begin :], (row.seq,), start)
        row.written = row.end

    def in_order(self, cells: IntArray) -> IntArray:
        """Cells that ascend, in order of the positions that they hold."""
        positions = self.position[cells]
        ordered: IntArray = cells
        if not (positions[1:] > positions[:-1]).all():
            ordered = cells[np.argsort(positions, kind="stable")]
        return ordered

    def seen_by(self, seq: int) -> IntArray:
        """Cells that a sequence without a row sees, ascending."""
        indices, lows, highs = self.sets.indices_with(seq), self._bounds.low, self._bounds.high
        cells: IntArray
        if len(indices) == 1:
            index = indices[0]
            low = lows[index]
            if low >= highs[index]:
                return np.zeros(0, dtype=np.int64)
            cells = (self.owner[low : highs[index]] == index).nonzero()[0]
        else:
            low = min([lows[index] for index in indices], default=0)
            high = max([highs[index] for index in indices], default=0)
            sees = np.zeros(len(self.sets), dtype=np.bool_)
            sees[list(indices)] = True
            cells = sees[self.owner[low:high]].nonzero()[0]
        cells += low
        return cells


class ArenaCells:
    """``size`` cells, a search position ``head``, and what each cell holds."""

    def __init__(self, size: int):
        self.size = size
        self._contents = CellContents(size)
        self._position, self._owner = self._contents.position, self._contents.owner
        self.sets = self._contents.sets
        self.free = FreeCells(size)
        self.rows = SequenceCells()
        """Sequences that have all of their cells to themselves, and no gap."""
        self.pending = PendingUpdates(size)
        self._irregular: set[int] = set()
        """Sequences that cannot have a row, since the last operation that could have changed that."""
        self._bounds = self.sets.bounds

    @property
    def head(self) -> int:
        """Where the next search for free cells begins."""
        return int(self.free.head)

    @head.setter
    def head(self, cell: int) -> None:
        self.free.head = cell

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
        cells = self._contents.in_order(self._contents.seen_by(seq))
        return cells, self._position[cells]

    def has_rows_only(self) -> bool:
        """Whether all sequences that hold cells have rows."""
        return sum([row.end - row.begin for row in self.rows]) == self.used

    def cells_by_set(self) -> list[IntArray]:
        """The cells that each set of sequences sees, in order of position; sets without cells are left out."""
        if self.has_rows_only():
            rows = sorted(self.rows, key=lambda row: self.sets.singletons[row.seq])
            return [self.rows.cells(row) for row in rows if row.end > row.begin]
        cells = np.flatnonzero(self.owner[: self.top])
        owner = self._owner[cells]
        # 16 bits, where they suffice, are sorted in a fraction of the time.
        order = np.argsort(owner.astype(np.uint16) if len(self.sets) < 2**16 else owner, kind="stable")
        borders = np.flatnonzero(np.diff(owner[order])) + 1
        return [self._contents.in_order(held) for held in np.split(cells[order], borders)]

    def last_position(self, seq: int) -> int:
        """The highest position of a sequence; -1 if it holds none."""
        row = self.row_of(seq)
        if row is None:
            return int(self._position[self._contents.seen_by(seq)].max(initial=-1))
        return row.end - 1 if row.end > row.begin else -1

    def first_position(self, seq: int) -> int:
        """The lowest position of a sequence; -1 if it holds none."""
        row = self.row_of(seq)
        if row is None:
            held = self._position[self._contents.seen_by(seq)]
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
        self._contents.put(cells, seqs, start)
        if self.pending.rotations is not None:
            self.pending.rotations[cells] = 0

    def take(self, cells: Cells, chunks: Sequence[Chunk]) -> None:
        """Take free ``cells`` and write the tokens of ``chunks`` into them, in order."""
        if isinstance(cells, range):
            self.free.take(cells.start, len(cells))
        else:
            self.free.take_each(cells.tolist())
        self.write(cells_array(cells), chunks)

    def write(self, cells: IntArray, chunks: Sequence[Chunk]) -> None:
        """Write the tokens of ``chunks``, in order, into ``cells``, which have been taken from ``free``."""
        found = cells
        if self.pending.rotations is not None:
            self.pending.rotations[found] = 0
        at = 0
        for seq, start, n, also in chunks:
            row = None if also else self.row_of(seq)
            if row is not None and row.end == row.begin != start:
                self.rows.drop(seq)
                row = self._add_row(seq, start)
            if row is None or row.end != start:
                self.put(found[at : at + n], (seq, *also), start)
            elif n == 1:
                self.rows.append_run(row, int(found[at]), 1, 1)
            else:
                self.rows.append(row, found[at : at + n])
            at += n

    def row_of(self, seq: int) -> Row | None:
        """The row of a sequence that may have one, which is made if it is missing; else None."""
        row = self.rows.rows.get(seq)
        if row is not None or seq in self._irregular:
            return row
        cells, positions = self.cells_of(seq)
        n = len(cells)
        if n == 0:
            return self._add_row(seq, 0)
        alone = self.sets.shares_nothing(seq) or (self._owner[cells] == self.sets.singletons.get(seq, -1)).all()
        if not alone or int(positions[-1]) - int(positions[0]) != n - 1 or (positions[1:] == positions[:-1]).any():
            self._irregular.add(seq)
            return None
        return self._add_row(seq, int(positions[0]), cells)

    def _add_row(self, seq: int, begin: int, cells: IntArray | None = None) -> Row:
        """Begin a row, whose set of sequences has an index from now on."""
        self.sets.index_of((seq,))
        return self.rows.add(int(seq), int(begin), cells)

    def write_rows(self) -> None:
        """Bring ``position`` and ``owner`` up to date."""
        for row in self.rows:
            if row.written < row.end:
                self._contents.put_row(row, self.rows)

    def unwrite_rows(self) -> None:
        """Take what rows hold out of ``position`` and ``owner``, until these are asked for; all sequences have rows."""
        if self.rows.forget_written():
            self._position[:] = -1
            self._owner[:] = 0

    def _give_up_row(self, seq: int) -> None:
        """Keep a sequence in ``position`` and ``owner`` alone from now on; all sequences, if negative."""
        for row in list(self.rows) if seq < 0 else [self.rows.rows.get(seq)]:
            if row is not None:
                if row.written < row.end:
                    self._contents.put_row(row, self.rows)
                self.rows.drop(row.seq)
