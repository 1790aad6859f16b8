"""How many cells each sequence of an arena has in each tile of 64 cells: what the kernel ``tiled`` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import TILE
from policies.compiled import i64, mypyc_attr
from policies.vocabulary import Cells, Chunk, IntArray, Reads

_TILE: Final[i64] = 64
_SHIFT: Final[i64] = 6


@mypyc_attr(allow_interpreted_subclasses=True)
class HeldTiles:
    """The tiles of one sequence."""

    def __init__(self, n: int):
        """``n``: tiles of the arena."""
        self.held: list[int] = [0] * (n + 2)
        """Cells in each tile, behind a tile that does not exist; there is another at the end, so that each has two
        neighbours."""
        self.tiles: i64 = 0
        """Tiles with a cell."""
        self.runs: i64 = 0
        """Contiguous pieces that these form."""
        self.cells: i64 = 0
        """Cells in them."""

    def copy(self) -> HeldTiles:
        """Copy it, so that the copy can be changed by itself."""
        other = HeldTiles(0)
        other.held, other.tiles, other.runs, other.cells = self.held.copy(), self.tiles, self.runs, self.cells
        return other

    def add_one(self, cell: i64) -> None:
        """Add a cell."""
        held = self.held
        at = (cell >> _SHIFT) + 1
        before: i64 = held[at]
        held[at] = before + 1
        self.cells += 1
        if before == 0:
            self._enter(at)

    def add_each(self, cells: list[int]) -> None:
        """Add cells."""
        for cell in cells:
            self.add_one(cell)

    def add(self, cells: Cells) -> None:
        """Add cells."""
        if isinstance(cells, range):
            self.add_run(cells.start, len(cells))
        elif len(cells):
            first, counts = _by_tile(cells)
            for i, n in enumerate(counts):
                if n:
                    self.add_to(first + i + 1, n)

    def add_run(self, start: i64, n: i64) -> None:
        """Add ``n`` cells from ``start`` on."""
        stop = start + n
        while start < stop:
            end = min(stop, (start // _TILE + 1) * _TILE)
            self.add_to(start // _TILE + 1, end - start)
            start = end

    def lose_one(self, cell: i64) -> None:
        """Remove a cell."""
        self._lose_from(cell // _TILE + 1, 1)

    def lose(self, cells: IntArray) -> None:
        """Remove cells."""
        if len(cells):
            first, counts = _by_tile(cells)
            for i, n in enumerate(counts):
                if n:
                    self._lose_from(first + i + 1, n)

    def add_to(self, at: i64, n: i64) -> None:
        """Add ``n`` cells to the tile before the ``at``-th."""
        before: i64 = self.held[at]
        self.held[at] = before + n
        self.cells += n
        if before == 0:
            self._enter(at)

    def _lose_from(self, at: i64, n: i64) -> None:
        """Remove ``n`` cells from the ``at``-th entry of ``held``."""
        after: i64 = self.held[at] - n
        self.held[at] = after
        self.cells -= n
        if after == 0:
            self.tiles -= 1
            self.runs -= 1 - self._neighbours(at)

    def _enter(self, at: i64) -> None:
        """Count a tile that had no cell before."""
        self.tiles += 1
        self.runs += 1 - self._neighbours(at)

    def _neighbours(self, at: i64) -> i64:
        """How many of the two tiles beside one have a cell."""
        found: i64 = 0
        if self.held[at - 1] > 0:
            found += 1
        if self.held[at + 1] > 0:
            found += 1
        return found


@mypyc_attr(allow_interpreted_subclasses=True)
class TileCounts:
    """The tiles of sequences, kept from the first question about one until it is forgotten."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._n = -(-arena.size // TILE)
        self._by_seq: dict[int, HeldTiles] = {}

    def of(self, seq: int) -> HeldTiles:
        """The tiles of a sequence, counted if they are not known. The object is that of the sequence until it is
        forgotten."""
        tiles = self._by_seq.get(seq)
        if tiles is None:
            tiles = self._by_seq[seq] = HeldTiles(self._n)
            row = self._arena.rows.rows.get(seq)
            if row is None:
                tiles.add(self._arena.cells_of(seq)[0])
            elif row.end > row.begin:
                tiles.add(self._arena.rows.cells(row))
        return tiles

    def counts(self, seq: int) -> tuple[int, int, int]:
        """Numbers of tiles, cells and runs of tiles of a sequence."""
        tiles = self.of(seq)
        return tiles.tiles, tiles.cells, tiles.runs

    def add(self, seq: int, cells: Cells) -> None:
        """Note that a sequence got cells."""
        tiles = self._by_seq.get(seq)
        if tiles is not None:
            tiles.add(cells)

    def add_one(self, seq: int, cell: int) -> None:
        """Note that a sequence got a cell."""
        tiles = self._by_seq.get(seq)
        if tiles is not None:
            tiles.add_one(cell)

    def add_chunks(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Note that the tokens of chunks were put into ``cells``, in order."""
        at = 0
        for chunk in chunks:
            for seq in chunk.seqs:
                if chunk.n == 1:
                    self.add_one(seq, int(cells[at]))
                else:
                    self.add(seq, cells[at : at + chunk.n])
            at += chunk.n

    def lose_one(self, seq: int, cell: int) -> None:
        """Note that a sequence lost a cell."""
        tiles = self._by_seq.get(seq)
        if tiles is not None:
            tiles.lose_one(cell)

    def lose(self, seq: int, cells: IntArray) -> None:
        """Note that a sequence lost cells."""
        tiles = self._by_seq.get(seq)
        if tiles is not None:
            tiles.lose(cells)

    def forget(self, seq: int = -1) -> None:
        """Note that a sequence gave up cells, or that its cells were moved; negative: any sequence."""
        if seq < 0:
            self._by_seq.clear()
        else:
            self._by_seq.pop(seq, None)

    def reads(self, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads for a micro-batch that has been placed."""
        tokens, tiles, cells, runs = np.array([(chunk.n, *self.counts(chunk.seq)) for chunk in chunks]).T
        scanned = TILE * tiles
        return Reads(tokens, scanned, cells, runs, int(scanned.sum()))


def _by_tile(cells: IntArray) -> tuple[int, list[int]]:
    """The first tile that has one of ``cells``, at least one, and how many are in it and in each one behind it."""
    tiles = cells >> _SHIFT
    first = int(tiles.min())
    counts: list[int] = np.bincount(tiles - first).tolist()
    return first, counts
