"""The cells of each sequence by position: what an arena keeps of sequences that only grow, and are given up whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from policies.compiled import i64, mypyc_attr
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
        self.tail: list[int] = []
        """The cells of its last tokens, which are not in the table yet. It is given one more token, in a cell that has
        been taken from the free ones, by ``tail.append(cell)`` and ``end += 1``: nothing is quicker."""
        self.dropped = False
        """Whether this has ended: who keeps it must look up whether the sequence has another row."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SequenceCells:
    """A table of cells: a row for each sequence, a column for each position from a row's ``base`` on."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        """The rows by sequence."""
        self.table: IntArray = np.zeros((1, _FIRST_TOKENS), dtype=np.int64)
        """Shape (rows, columns): the cell of each token; undefined outside ``[begin, end)``."""
        self._spare = [0]
        """Rows of the table that no sequence has."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def cells(self, row: Row) -> IntArray:
        """The cells of a sequence in order of position; shape (end - begin,), valid until something changes."""
        self.settle(row)
        found: IntArray = self.table[row.number, row.begin - row.base : row.end - row.base]
        return found

    def last_cell(self, row: Row) -> int:
        """The cell of a sequence's last token."""
        return row.tail[-1] if row.tail else int(self.table[row.number, row.end - row.base - 1])

    def settle(self, row: Row) -> None:
        """Bring the table up to date."""
        tail = row.tail
        if tail:
            stop = row.end - row.base
            self.make_room(stop)
            self.table[row.number, stop - len(tail) : stop] = array("q", tail)
            row.tail = []

    def add(self, seq: int, begin: int, cells: IntArray | None = None) -> Row:
        """Begin a row for a sequence that has none, with the cells that it holds from position ``begin`` on."""
        if not self._spare:
            n = len(self.table)
            self.table = np.concatenate((self.table, np.zeros_like(self.table)))
            self._spare = list(range(2 * n - 1, n - 1, -1))
        row = self.rows[seq] = Row(seq, self._spare.pop(), begin)
        if cells is not None:
            self.append(row, cells)
            row.written = row.end
        return row

    def append(self, row: Row, cells: IntArray) -> None:
        """Note the cells of a sequence's next tokens."""
        self.settle(row)
        start, n = row.end - row.base, len(cells)
        self.make_room(start + n)
        self.table[row.number, start : start + n] = cells
        row.end += n

    def move(self, goes: IntArray) -> None:
        """Note that tokens were moved; ``goes``: the cell that each used cell's token is in now."""
        for row in self:
            cells = self.cells(row)
            cells[:] = goes[cells]

    def forget_written(self) -> bool:
        """Note that the arrays of the arena have none of the positions any more; whether they had any."""
        had = False
        for row in self:
            had = had or row.written > row.begin
            row.written = row.begin
        return had

    def make_room(self, columns: int) -> None:
        """Let the table have at least that many columns."""
        have = self.table.shape[1]
        if columns > have:
            grown = np.zeros((len(self.table), max(2 * have, columns)), dtype=np.int64)
            grown[:, :have] = self.table
            self.table = grown

    def drop(self, seq: int) -> Row | None:
        """End the row of a sequence, if it has one."""
        row = self.rows.pop(seq, None)
        if row is not None:
            self._spare.append(row.number)
            row.dropped = True
        return row

    def drop_all(self) -> None:
        """End all rows."""
        for seq in list(self.rows):
            self.drop(seq)
