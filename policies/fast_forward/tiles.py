"""Which tiles of an arena hold cells of each sequence: what the kernel ``tiled`` reads, updated as cells are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import TILE
from policies.fast_forward.forecast import StepReads
from policies.vocabulary import Chunk, IntArray, Reads


class TileSteps:
    """The tiles that decode steps of some sequences enter; none of the steps is taken yet."""

    __slots__ = ("_entered", "_gained", "_map", "_rows", "_where", "reads")

    def __init__(self, tile_map: TileMap, seqs: Sequence[int], cells: IntArray):
        """``cells``: shape (steps, sequences); each column ascends or descends."""
        self._map = tile_map
        rows = self._rows = [tile_map.row_of(seq) for seq in seqs]
        steps, n = cells.shape
        at = cells // TILE
        where = self._where = at + (np.array(rows) * tile_map.width + 1)
        flat = tile_map.flat
        empty = flat[where] == 0
        entered = self._entered = empty.copy()
        entered[1:] &= at[1:] != at[:-1]
        tiles, runs, held = tile_map.totals(rows)
        gained = self._gained = entered.astype(np.int64)
        new = where[entered]
        if len(new):
            gained[entered] -= flat[new - 1]
            gained[entered] -= flat[new + 1]
            # The tile of the step before counts as a neighbour even if it was new then.
            beside = np.abs(at[1:] - at[:-1]) == 1
            beside &= empty[:-1]
            beside &= entered[1:]
            gained[1:] -= beside
        scanned = TILE * (tiles + np.add.accumulate(entered.sum(axis=1)))
        useful = np.arange(held + n, held + n * steps + 1, n)
        most = entered.cumsum(axis=0)
        most += [tile_map.tiles[row] for row in rows]
        self.reads = StepReads(
            scanned, useful, runs + np.add.accumulate(gained.sum(axis=1)), scanned, TILE * most.max(axis=1)
        )
        """What attention reads in these steps."""

    def take(self, k: int) -> None:
        """Note that the first ``k`` steps were taken."""
        tile_map = self._map
        tile_map.flat[self._where[:k]] = 1
        more, gained = self._entered[:k].sum(axis=0).tolist(), self._gained[:k].sum(axis=0).tolist()
        for row, tiles, runs in zip(self._rows, more, gained, strict=True):
            tile_map.cells[row] += k
            tile_map.tiles[row] += tiles
            tile_map.runs[row] += runs


class TileMap:
    """The tiles of sequences, kept from the first question about one until it gives up cells."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self.width = -(-arena.size // TILE) + 2
        """Bytes of a row: one for each tile, and one at either end, so that every tile has two neighbours."""
        self._bytes = bytearray()
        self.flat: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """Row by row, whether a sequence has a cell in each tile; shares its memory with ``_bytes``."""
        self.tiles: list[int] = []
        """Number of tiles, by row."""
        self.runs: list[int] = []
        """Number of contiguous pieces that they form, by row."""
        self.cells: list[int] = []
        """Number of cells, by row."""
        self._rows: dict[int, int] = {}
        """The rows by sequence."""
        self._spare: list[int] = []

    def __reduce__(self) -> tuple[object, tuple[Arena]]:
        """A copy knows no sequence yet."""
        return TileMap, (self._arena,)

    def forget(self, seq: int | None = None) -> None:
        """Note that a sequence gave up cells, or that its cells were moved; None or negative: any sequence."""
        if seq is None or seq < 0:
            self._spare += self._rows.values()
            self._rows.clear()
        elif seq in self._rows:
            self._spare.append(self._rows.pop(seq))

    def add(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Note that the tokens of chunks were put into ``cells``, in order."""
        at = 0
        for chunk in chunks:
            for seq in chunk.seqs:
                row = self._rows.get(seq)
                if row is not None:
                    if chunk.n == 1:
                        self._add_one(row, int(cells[at]))
                    else:
                        self._add(row, cells[at : at + chunk.n])
            at += chunk.n

    def add_step(self, seqs: Sequence[int], cells: Cells) -> None:
        """Note that sequences got a cell each, in turn."""
        rows = self._rows
        for seq, cell in zip(seqs, cells if isinstance(cells, range) else cells.tolist(), strict=True):
            if seq in rows:
                self._add_one(rows[seq], cell)

    def reads(self, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads for a micro-batch that has been placed."""
        tokens, tiles, cells, runs = np.array([(chunk.n, *self.counts(chunk.seq)) for chunk in chunks]).T
        scanned = TILE * tiles
        return Reads(tokens, scanned, cells, runs, int(scanned.sum()))

    def counts(self, seq: int) -> tuple[int, int, int]:
        """Numbers of tiles, cells and runs of tiles of a sequence."""
        row = self.row_of(seq)
        return self.tiles[row], self.cells[row], self.runs[row]

    def totals(self, rows: Sequence[int]) -> tuple[int, int, int]:
        """Numbers of tiles, of runs of tiles and of cells in all of some rows."""
        all_tiles, all_runs, all_cells = self.tiles, self.runs, self.cells
        tiles = runs = cells = 0
        for row in rows:
            tiles += all_tiles[row]
            runs += all_runs[row]
            cells += all_cells[row]
        return tiles, runs, cells

    def sums(self, seqs: Sequence[int]) -> tuple[int, int, int]:
        """Of several sequences that read a token each: cells scanned, runs of tiles, and most cells scanned by one."""
        rows = [self.row_of(seq) for seq in seqs]
        tiles, runs, _ = self.totals(rows)
        return TILE * tiles, runs, TILE * max([self.tiles[row] for row in rows], default=0)

    def row_of(self, seq: int) -> int:
        """The row of a sequence, which is filled in if it is not known."""
        row = self._rows.get(seq)
        if row is None:
            if not self._spare:
                self._grow()
            row = self._rows[seq] = self._spare.pop()
            start = row * self.width
            self._bytes[start : start + self.width] = bytes(self.width)
            self.cells[row] = 0
            held = self._arena.row_of(seq)
            self._add(row, self._arena.cells_of(seq)[0] if held is None else self._arena.rows.cells(held))
        return row

    def _add(self, row: int, cells: Cells) -> None:
        """Add cells to a row."""
        start = row * self.width
        if isinstance(cells, range):
            first, stop = start + cells.start // TILE + 1, start + (cells.stop - 1) // TILE + 2
            self._bytes[first:stop] = b"\1" * (stop - first)
        else:
            self.flat[cells // TILE + (start + 1)] = 1
        holds = self._bytes[start : start + self.width]
        self.cells[row] += len(cells)
        self.tiles[row] = holds.count(1)
        self.runs[row] = holds.count(b"\0\1")

    def _add_one(self, row: int, cell: int) -> None:
        """Add a cell to a row."""
        self.cells[row] += 1
        at, holds = row * self.width + cell // TILE + 1, self._bytes
        if not holds[at]:
            self.runs[row] += 1 - holds[at - 1] - holds[at + 1]
            self.tiles[row] += 1
            holds[at] = 1

    def _grow(self) -> None:
        """Add rows."""
        have = len(self.tiles)
        more = max(have, 4)
        self._bytes = self._bytes + bytearray(more * self.width)
        self.flat = np.frombuffer(self._bytes, dtype=np.uint8)
        for counts in (self.tiles, self.runs, self.cells):
            counts += [0] * more
        self._spare = list(range(have + more - 1, have - 1, -1))
