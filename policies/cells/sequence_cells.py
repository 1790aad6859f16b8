"""The cells of each sequence by position: what an arena keeps of sequences that only grow, and are given up whole."""

from __future__ import annotations

from collections.abc import Iterator

from policies.cells.free_cells import FreeCells
from policies.compiled import as_array, i64, mypyc_attr, vec
from policies.vocabulary import IntArray

_FIRST_TOKENS = 1024
"""Positions for which the table has room at first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Row:
    """A sequence that shares no cell and has no gap: it holds positions ``[begin, end)``."""

    def __init__(self, seq: int, number: int, begin: int):
        self.seq = seq
        self.number = number
        """Its row in the table."""
        self.base: i64 = begin
        """The position of the row's first column."""
        self.begin: i64 = begin
        self.end: i64 = begin
        self.written: i64 = begin
        """The positions from here on are not in the arrays of the arena yet."""
        self.lowest: i64 = 1 << 60
        """Its lowest cell; negative where that must be looked up."""
        self.dropped = False
        """Whether this has ended: who keeps it must look up whether the sequence has another row."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SequenceCells:
    """A table of cells: a row for each sequence, a column for each position from a row's ``base`` on."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        """The rows by sequence."""
        self.by_number: list[Row | None] = [None]
        """The rows by their number in the table."""
        self._columns: i64 = _FIRST_TOKENS
        self._numbers = vec[i64]([0] * _FIRST_TOKENS)
        """The table, row after row; undefined outside of ``[begin, end)``."""
        self.table: IntArray = as_array(self._numbers).reshape(1, -1)
        """The same numbers; shape (rows, columns)."""
        self._spare = [0]
        """Rows of the table that no sequence has."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def cells(self, row: Row) -> IntArray:
        """The cells of a sequence in order of position; shape (end - begin,), valid until something changes."""
        found: IntArray = self.table[row.number, row.begin - row.base : row.end - row.base]
        return found

    def lowest(self, row: Row) -> i64:
        """The lowest cell of a sequence, which must have one."""
        if row.lowest < 0:
            row.lowest = int(self.cells(row).min())
        return row.lowest

    def at(self, row: Row, position: i64) -> i64:
        """The cell of a position that a row holds."""
        return self._numbers[row.number * self._columns + position - row.base]

    def add(self, seq: int, begin: int, cells: IntArray | None = None) -> Row:
        """Begin a row for a sequence that has none, with the cells that it holds from position ``begin`` on."""
        if not self._spare:
            n = len(self.by_number)
            self._make_table(2 * n, self._columns)
            self.by_number += [None] * n
            self._spare = list(range(2 * n - 1, n - 1, -1))
        row = self.rows[seq] = Row(int(seq), self._spare.pop(), int(begin))
        self.by_number[row.number] = row
        if cells is not None:
            self.append(row, cells)
            row.written = row.end
        return row

    def append(self, row: Row, cells: IntArray) -> None:
        """Note the cells of a sequence's next tokens."""
        start, n = row.end - row.base, len(cells)
        self._make_room(start + n)
        self.table[row.number, start : start + n] = cells
        row.end += n
        row.lowest = -1

    def append_run(self, row: Row, cell: i64, step: i64, n: i64) -> None:
        """Note the cells of a sequence's next ``n`` tokens: ``cell``, and each other so many behind the one before."""
        if cell < row.lowest:
            row.lowest = cell
        start = row.end - row.base
        if start + n > self._columns:
            self._make_room(start + n)
        start += row.number * self._columns
        numbers = self._numbers
        for at in range(start, start + n):
            numbers[at] = cell
            cell += step
        row.end += n

    def append_each(self, row: Row, cells: list[int]) -> None:
        """Note the cells of a sequence's next tokens."""
        start, n = row.end - row.base, len(cells)
        self._make_room(start + n)
        start += row.number * self._columns
        numbers, lowest = self._numbers, row.lowest
        for each in cells:
            cell: i64 = each
            numbers[start] = cell
            start += 1
            if cell < lowest:
                lowest = cell
        row.lowest = lowest
        row.end += n

    def give_back(self, row: Row, free: FreeCells) -> None:
        """Give all cells of a sequence back to the free ones."""
        start = row.number * self._columns - row.base
        free.release_part(self._numbers, start + row.begin, start + row.end)

    def move(self, goes: IntArray) -> None:
        """Note that tokens were moved; ``goes``: the cell that each used cell's token is in now."""
        for row in self:
            cells = self.cells(row)
            cells[:] = goes[cells]
            row.lowest = -1

    def forget_written(self) -> bool:
        """Note that the arrays of the arena have none of the positions any more; whether they had any."""
        had = False
        for row in self:
            had = had or row.written > row.begin
            row.written = row.begin
        return had

    def drop(self, seq: int) -> Row | None:
        """End the row of a sequence, if it has one."""
        row = self.rows.pop(seq, None)
        if row is not None:
            self._spare.append(row.number)
            self.by_number[row.number] = None
            row.dropped = True
        return row

    def drop_all(self) -> None:
        """End all rows."""
        for seq in list(self.rows):
            self.drop(seq)

    def _make_room(self, columns: i64) -> None:
        """Let the table have at least that many columns."""
        if columns > self._columns:
            self._make_table(len(self.by_number), max(2 * self._columns, columns))

    def _make_table(self, rows: i64, columns: i64) -> None:
        """Copy the table into a larger one."""
        before = self.table
        self._numbers = vec[i64]([0] * int(rows * columns))
        self.table = as_array(self._numbers).reshape(int(rows), int(columns))
        self.table[: before.shape[0], : before.shape[1]] = before
        self._columns = columns
