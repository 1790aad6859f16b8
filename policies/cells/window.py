"""Cells of an arena that can be used again because a sliding window has passed their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import FreeCells
from policies.cells.search import cells_array
from policies.cells.sequence_cells import Row
from policies.cells.tile_counts import TileCounts
from policies.compiled import i64, mypyc_attr, vec
from policies.vocabulary import Cells, Chunk, IntArray

AHEAD = 256
"""A search for n cells looks at the next 2 n + ``AHEAD`` cells first: mostly enough of them are usable."""


def last_passed(arena: Arena, window: int) -> IntArray:
    """The highest position that the window has passed, for each set of sequences by its index; shape (len(sets),).

    A cell's token may be overwritten if its position is no higher. Cells that several sequences share are never
    overwritten (-2), empty ones always may be (-1).
    """
    arena.write_rows()
    passed = np.full(len(arena.sets), -2)
    passed[0] = -1
    for seq, index in arena.sets.singletons_in_use():
        passed[index] = arena.last_position(seq) + 1 - window
    return passed


def usable_extents(arena: Arena, window: int) -> FreeCells:
    """Free cells, and cells of a single sequence whose token its next token will not see any more."""
    top = arena.top
    kept = np.zeros(arena.size, dtype=np.bool_)
    np.greater(arena.position[:top], last_passed(arena, window)[arena.owner[:top]], out=kept[:top])
    usable = FreeCells(arena.size)
    usable.rebuild(kept)
    return usable


def find_usable(arena: Arena, window: int, head: int, n: int) -> Cells | None:
    """The first ``n`` cells of ``usable_extents`` going once round from ``head``; None if there are fewer."""
    passed = last_passed(arena, window)
    ahead = slice(head, head + 2 * n + AHEAD)
    cells: IntArray = (arena.position[ahead] <= passed[arena.owner[ahead]]).nonzero()[0]
    if len(cells) >= n:
        cells = cells[:n] + head
    else:
        usable = (arena.position <= passed[arena.owner]).nonzero()[0]
        if len(usable) < n:
            return None
        at = int(usable.searchsorted(head))
        cells = usable[at : at + n]
        if len(cells) < n:
            cells = np.concatenate((cells, usable[: n - len(cells)]))
    first = int(cells[0])
    return range(first, first + n) if int(cells[-1]) - first == n - 1 else cells


def positions_lost(arena: Arena, cells: IntArray) -> dict[int, int]:
    """The last position that each sequence loses if ``cells``, none of them shared, are overwritten."""
    owner, position = arena.owner[cells], arena.position[cells]
    lost = {}
    for index in set(owner.tolist()) - {0}:
        (seq,) = arena.sets[index]
        lost[seq] = int(position[owner == index].max())
    return lost


@mypyc_attr(allow_interpreted_subclasses=True)
class WindowCells:
    """Finds and takes cells of an arena whose sequences see a window.

    Where a token that the window has passed is overwritten, its sequence loses all tokens up to that one.
    """

    def __init__(self, arena: Arena, tiles: TileCounts | None, window: int):
        """``window``: tokens that attention looks back. ``tiles`` are told what is lost."""
        self._arena = arena
        self._window: i64 = window
        self._tiles = tiles
        self._free: FreeCells = arena.free
        self._size: i64 = arena.size
        # By cell, the number of the row whose token it holds, or -1, and the token's position; kept while all sequences
        # have rows.
        self._known = False
        self._rows: vec[i64] = vec[i64]([])
        self._positions: vec[i64] = vec[i64]([])
        self._by_number: list[Row | None] = arena.rows.by_number
        self.lost_beside: list[tuple[int, IntArray]] = []
        """Sequences that lost tokens in other cells than those taken last, and these cells."""

    def forget(self) -> None:
        """Note that the arena was changed in another way than by this object."""
        self._known = False

    # Finding

    def find(self, head: int, n: int) -> Cells | None:
        """The first ``n`` cells, empty or passed, going once round from ``head``; None if there are fewer."""
        if self._arena.free.free_from(head) >= n:
            return range(head, head + n)
        if not self.look():
            return find_usable(self._arena, self._window, head, n)
        cells = self._walk(head, n)
        if not cells:
            return None
        return range(cells[0], cells[0] + n) if cells[-1] - cells[0] == n - 1 else np.array(cells)

    def find_next(self, head: int, n: int) -> list[int] | None:
        """``find``, as a list; None also where a sequence has no row."""
        return (self._walk(head, n) or None) if self.look() else None

    def _walk(self, head: i64, n: i64) -> list[int]:
        """The first ``n`` cells, empty or passed, going once round from ``head``; none if there are fewer."""
        rows, positions, size = self._rows, self._positions, self._size
        held, window, found = self._by_number, self._window, list[int]()
        cell: i64 = head if head < size else 0
        for _ in range(size):
            number = rows[cell]
            row = held[number] if number >= 0 else None
            if row is None or positions[cell] <= row.end - window:
                found.append(cell)
                n -= 1
                if n == 0:
                    return found
            cell += 1
            if cell == size:
                cell = 0
        return []

    def look(self) -> bool:
        """Find out what is in each cell, if that is not known; False where a sequence has no row."""
        if self._known:
            return True
        arena = self._arena
        if self._window < 2:
            return False
        if not arena.has_rows_only():
            for seq in arena.sequences():
                arena.row_of(seq)
            if not arena.has_rows_only():
                return False
        self._rows, self._positions = vec[i64]([-1] * int(self._size)), vec[i64]([0] * int(self._size))
        self._known = True
        for row in arena.rows:
            self.note(row, row.begin, arena.rows.cells(row).tolist())
        return True

    # Taking

    def take(self, cells: Cells) -> None:
        """Take cells that were found: from sequences that hold them, or empty ones."""
        if self._known:
            self.take_each(cells_array(cells).tolist())
            return
        self.lost_beside.clear()
        free = self._arena.free
        if isinstance(cells, range):
            if free.free_from(cells.start) < len(cells):
                self._overwrite(np.arange(cells.start, cells.stop))
            free.take(cells.start, len(cells))
        else:
            self._overwrite(cells)
            free.take_each(cells.tolist())

    def _overwrite(self, cells: IntArray) -> None:
        """Have sequences lose what they hold in ``cells``, and all before that."""
        over = cells[self._arena.owner[cells] > 0]
        if len(over):
            for seq, last in positions_lost(self._arena, over).items():
                self._lose(seq, last, cells)

    def _lose(self, seq: int, last: int, cells: IntArray) -> None:
        """Have a sequence lose its tokens up to position ``last``, so that ``cells`` can be taken."""
        gone = self._arena.remove(seq, 0, last + 1)
        self.lost_beside.append((seq, np.setdiff1d(gone, cells)))
        self.clear(gone.tolist())
        if self._tiles is not None:
            self._tiles.lose(seq, gone)

    def take_one(self, head: i64) -> i64:
        """Find and take one cell, which there must be, where all sequences have rows."""
        cell: i64 = head if head < self._size else 0
        number = self._rows[cell]
        row = None if number < 0 else self._by_number[number]
        if row is None or self._positions[cell] <= row.end - self._window:
            self.take_each([cell])
            return cell
        cells = self._walk(head, 1)
        self.take_each(cells)
        return cells[0]

    def take_each(self, cells: list[int]) -> None:
        """``take``, for a list of cells, where all sequences have rows."""
        arena, tiles, rows, positions = self._arena, self._tiles, self._rows, self._positions
        n: i64 = len(cells)
        at: i64 = 0
        if self.lost_beside:
            self.lost_beside.clear()
        while at < n:
            cell: i64 = cells[at]
            number = rows[cell]
            row = None if number < 0 else self._by_number[number]
            if row is None:
                stop = cell + 1
                at += 1
                while at < n and cells[at] == stop and rows[stop] < 0:
                    stop += 1
                    at += 1
                self._free.take(cell, stop - cell)
                continue
            position = positions[cell]
            if row.written > position:
                arena.unwrite_rows()
            if position > row.begin:
                self._lose(row.seq, position, np.array(cells))
                continue
            # Mostly it is the sequence's first token. The cell goes from one sequence to the other.
            row.begin += 1
            row.written = row.begin
            row.lowest = -1
            rows[cell] = -1
            if tiles is not None:
                tiles.lose_one(row.seq, cell)
            at += 1

    # What the arena is told besides

    def note(self, row: Row, position: i64, cells: list[int]) -> None:
        """Note that the tokens of a row from a position on were put into cells."""
        if self._known:
            rows, positions = self._rows, self._positions
            number: i64 = row.number
            for each in cells:
                cell: i64 = each
                rows[cell] = number
                positions[cell] = position
                position += 1

    def note_one(self, row: Row, position: i64, cell: i64) -> None:
        """Note that a token of a row was put into a cell."""
        if self._known:
            self._rows[cell] = row.number
            self._positions[cell] = position

    def note_chunks(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Note that the tokens of chunks were put into cells, in order."""
        at = 0
        for chunk in chunks:
            row = self._arena.rows.rows.get(chunk.seq)
            if row is None or chunk.also:
                self._known = False
            else:
                self.note(row, chunk.start, cells_array(cells[at : at + chunk.n]).tolist())
            at += chunk.n

    def clear(self, cells: list[int]) -> None:
        """Note that cells are empty now."""
        if self._known:
            rows = self._rows
            for each in cells:
                cell: i64 = each
                rows[cell] = -1
