"""Which tiles of an arena hold cells of each sequence: what the kernel ``tiled`` reads, updated as cells are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import TILE, repeated
from policies.fast_forward.forecast import StepReads
from policies.vocabulary import Chunk, IntArray, Reads

_FEW_TILES = 4
"""Up to so many tiles of a single sequence are looked at one after the other, more as arrays."""


class TileSteps:
    """The tiles that decode steps of some sequences enter; none of the steps is taken yet."""

    def __init__(self, tile_map: TileMap, seqs: Sequence[int], cells: Cells):
        """``cells``: a cell for each sequence in turn, step after step; each sequence's ascend or descend."""
        self._map = tile_map
        self._rows = tile_map.rows_of(seqs)
        n = len(self._rows)
        self.steps = len(cells) // n
        self._tiles, self._runs, self.held = tile_map.totals(self._rows)
        nothing = repeated(0, 0)
        self._turn: IntArray = nothing
        """For each tile that a sequence enters for the first time, the place of the sequence in a step."""
        self._step: IntArray = nothing
        """The step in which it does."""
        self._where: IntArray = nothing
        """The tile, as an index into ``TileMap.flat``."""
        self._gained: IntArray = nothing
        """By how many each adds to the contiguous pieces."""
        if n == 1 and isinstance(cells, range) and (cells.stop - 1) // TILE - cells.start // TILE < _FEW_TILES:
            self._enter_alone(cells)
        else:
            self._enter(cells, n)

    def _enter_alone(self, cells: range) -> None:
        """Find the tiles that a single sequence enters along few consecutive cells."""
        holds, first, found = self._map.flat, self._rows[0] * self._map.width + 1, list[tuple[int, int, int]]()
        came = -1
        for tile in range(cells.start // TILE, (cells.stop - 1) // TILE + 1):
            at = first + tile
            if not holds[at]:
                gained = 1 - int(holds[at - 1]) - int(holds[at + 1]) - (came == at - 1)
                found.append((max(TILE * tile - cells.start, 0), at, gained))
                came = at
        if found:
            self._step, self._where, self._gained = np.array(found).T
            self._turn = repeated(0, len(found))

    def _enter(self, cells: Cells, n: int) -> None:
        """Find the tiles that ``n`` sequences enter."""
        tile_map = self._map
        first_tiles = np.array(self._rows) * tile_map.width + 1
        if isinstance(cells, range):
            # A row for each tile; the steps in which the sequences come there.
            start = cells.start
            at = np.arange(start // TILE, (cells.stop - 1) // TILE + 1)[:, None]
            firsts = start + np.arange(n)
            after = np.maximum((TILE * at - firsts + (n - 1)) // n, 0)
            where = at + first_tiles
            entered = tile_map.flat[where] == 0
            entered &= (after < self.steps) & ((firsts + n * after) // TILE == at)
            # The tile before counts as a neighbour even if it was new then.
            beside = entered[:-1]
        else:
            # A row for each step.
            at = (cells // TILE).reshape(-1, n)
            after = np.broadcast_to(np.arange(len(at))[:, None], at.shape)
            where = at + first_tiles
            empty = tile_map.flat[where] == 0
            entered = empty.copy()
            entered[1:] &= at[1:] != at[:-1]
            beside = (np.abs(at[1:] - at[:-1]) == 1) & empty[:-1]
        new = entered.nonzero()
        self._turn, self._step, self._where = new[1], after[new], where[new]
        flat = tile_map.flat
        gained = 1 - flat[self._where - 1].astype(np.int64)
        gained -= flat[self._where + 1]
        later = (new[0] > 0).nonzero()[0]
        if len(later):
            gained[later] -= beside[new[0][later] - 1, new[1][later]]
        self._gained = gained

    @property
    def scanned(self) -> IntArray:
        """Scores computed in each step; shape (steps,)."""
        if not len(self._step):
            return np.full(self.steps, TILE * self._tiles)
        tiles = np.add.accumulate(np.bincount(self._step, minlength=self.steps))
        tiles += self._tiles
        tiles *= TILE
        return tiles

    @property
    def runs(self) -> IntArray:
        """Contiguous pieces that the scanned tiles form in each step; shape (steps,)."""
        if not len(self._step):
            return np.full(self.steps, self._runs)
        runs = np.bincount(self._step, weights=self._gained, minlength=self.steps).astype(np.int64)
        runs[0] += self._runs
        return np.add.accumulate(runs)

    def most_after(self, k: int) -> int:
        """The most cells that one token is scored against in the ``k``-th step."""
        more = np.bincount(self._turn[self._step < k], minlength=len(self._rows)).tolist()
        tiles = self._map.tiles
        most: int = max([tiles[row] + n for row, n in zip(self._rows, more, strict=True)])
        return TILE * most

    def reads(self) -> StepReads:
        """What attention reads in these steps."""
        n, steps, scanned = len(self._rows), self.steps, self.scanned
        useful = np.arange(self.held + n, self.held + n * steps + 1, n)
        if n == 1 or not len(self._step):
            most = scanned if n == 1 else np.full(steps, self.most_after(steps))
            return StepReads(scanned, useful, self.runs, scanned, most)
        tiles = np.zeros((steps, n), dtype=np.int64)
        np.add.at(tiles, (self._step, self._turn), 1)
        tiles[0] += [self._map.tiles[row] for row in self._rows]
        most = TILE * tiles.cumsum(axis=0).max(axis=1)
        return StepReads(scanned, useful, self.runs, scanned, most)

    def take(self, k: int) -> None:
        """Note that the first ``k`` steps were taken."""
        tile_map, n = self._map, len(self._rows)
        cells, tiles, runs = tile_map.cells, tile_map.tiles, tile_map.runs
        for row in self._rows:
            cells[row] += k
        taken = (self._step < k).nonzero()[0]
        if len(taken):
            tile_map.flat[self._where[taken]] = 1
            turn = self._turn[taken]
            more = np.bincount(turn, minlength=n).tolist()
            gained = np.bincount(turn, weights=self._gained[taken], minlength=n).tolist()
            for row, entered, pieces in zip(self._rows, more, gained, strict=True):
                tiles[row] += entered
                runs[row] += int(pieces)


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
        return type(self), (self._arena,)

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
        """Cells scanned for a token of each of several sequences, runs of tiles, and the most cells scanned for one."""
        rows = self.rows_of(seqs)
        tiles, runs, _ = self.totals(rows)
        return TILE * tiles, runs, TILE * max([self.tiles[row] for row in rows], default=0)

    def rows_of(self, seqs: Sequence[int]) -> list[int]:
        """The rows of some sequences."""
        rows = self._rows
        try:
            return [rows[seq] for seq in seqs]
        except KeyError:
            return [self.row_of(seq) for seq in seqs]

    def row_of(self, seq: int) -> int:
        """The row of a sequence, which is filled in if it is not known."""
        row = self._rows.get(seq)
        if row is None:
            if not self._spare:
                self._grow()
            row = self._rows[seq] = self._spare.pop()
            self._clear(row)
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
        self.cells[row] += len(cells)
        self.count(row)

    def count(self, row: int) -> None:
        """Count a row's tiles, and the pieces that they form, anew."""
        start = row * self.width
        holds = self._bytes[start : start + self.width]
        self.tiles[row] = holds.count(1)
        self.runs[row] = holds.count(b"\0\1")

    def _clear(self, row: int) -> None:
        """Let a row have no cells."""
        start = row * self.width
        self._bytes[start : start + self.width] = bytes(self.width)
        self.cells[row] = 0

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
