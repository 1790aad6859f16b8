"""Which tiles of an arena hold something of a sequence: what the kernel ``tiled`` reads, kept up as cells are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import TILE
from policies.cells.search import Cells
from policies.fast_forward.forecast import StepReads
from policies.vocabulary import Chunk, IntArray, Reads

_FEW = 48
"""So many tiles are entered one by one; more are looked at as arrays."""


class _Tiles:
    """Of one sequence."""

    __slots__ = ("cells", "holds", "runs", "tiles")

    def __init__(self, cells: Sequence[Cells], n_tiles: int):
        # One more at either end, so that every tile has two neighbours.
        self.holds = np.zeros(n_tiles + 2, dtype=np.int8)
        self.cells = self.tiles = self.runs = 0
        for some in cells:
            self.add(some)

    def add(self, cells: Cells) -> None:
        """A range leaves out less than a tile at a time."""
        self.cells += len(cells)
        if isinstance(cells, range):
            first, last = cells.start // TILE, (cells.stop - 1) // TILE
            if last - first < _FEW // 2:
                for tile in range(first + 1, last + 2):
                    self._enter(tile)
                return
            self.holds[first + 1 : last + 2] = 1
        else:
            self.holds[cells // TILE + 1] = 1
        self.tiles = int(np.count_nonzero(self.holds))
        self.runs = int(np.count_nonzero(self.holds[1:] > self.holds[:-1]))

    def add_one(self, cell: int) -> None:
        self.cells += 1
        self._enter(cell // TILE + 1)

    def _enter(self, tile: int) -> None:
        holds = self.holds
        if not holds[tile]:
            self.runs += 1 - int(holds[tile - 1]) - int(holds[tile + 1])
            self.tiles += 1
            holds[tile] = 1


class TileMap:
    """The tiles of the sequences that have been asked for and have only grown since."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._known: dict[int, _Tiles] = {}

    def forget(self, seq: int | None = None) -> None:
        """A sequence gave up cells, or its cells were moved; or any sequence's."""
        if seq is None or seq < 0:
            self._known.clear()
        else:
            self._known.pop(seq, None)

    def took(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Each chunk's tokens were put into cells, in order."""
        at = 0
        for chunk in chunks:
            for seq in chunk.seqs:
                known = self._known.get(seq)
                if known is not None:
                    if chunk.n == 1:
                        known.add_one(int(cells[at]))
                    else:
                        known.add(cells[at : at + chunk.n])
            at += chunk.n

    def reads(self, chunks: Sequence[Chunk]) -> Reads:
        """What a micro-batch reads that has been placed."""
        known = [self._of(chunk.seq) for chunk in chunks]
        tokens, tiles, cells, runs = np.array(
            [(c.n, t.tiles, t.cells, t.runs) for c, t in zip(chunks, known, strict=True)]
        ).T
        scanned = TILE * tiles
        return Reads(tokens, scanned, cells, runs, int(scanned.sum()))

    def plan_steps(self, step: Sequence[Chunk], cells: IntArray) -> StepReads:
        """What steps will read whose tokens go into ``cells``; shape (steps, n_chunks), each column rising or
        falling."""
        known = [self._of(chunk.seq) for chunk in step]
        at = cells // TILE + 1
        enters = np.ones(cells.shape, dtype=np.bool_)
        np.not_equal(at[1:], at[:-1], out=enters[1:])
        entries = enters.ravel().nonzero()[0]
        if len(entries) <= _FEW:
            return self._one_by_one(known, at, entries)
        steps, seqs = np.divmod(entries, len(step))
        tile = at[steps, seqs]
        holds = np.stack([each.holds for each in known])
        new = holds[seqs, tile] == 0
        steps, seqs, tile = steps[new], seqs[new], tile[new]
        # The tile before counts as a neighbour although it is new itself, but only where there is one.
        before = at[steps - 1, seqs]
        joins = (steps > 0) & (np.abs(before - tile) == 1) & (holds[seqs, before] == 0)
        meets = holds[seqs, tile - 1].astype(np.int64) + holds[seqs, tile + 1] + joins
        scanned = np.zeros(cells.shape, dtype=np.int64)
        scanned[steps, seqs] = TILE
        scanned[0] += [TILE * each.tiles for each in known]
        scanned = np.cumsum(scanned, axis=0)
        total = scanned.sum(axis=1)
        runs = sum(each.runs for each in known) + np.cumsum(
            np.bincount(steps, weights=1 - meets, minlength=len(cells))
        ).astype(np.int64)
        useful = sum(each.cells for each in known) + len(step) * np.arange(1, len(cells) + 1)
        return StepReads(total, useful, runs, total, scanned.max(axis=1))

    @staticmethod
    def _one_by_one(known: Sequence[_Tiles], at: IntArray, entries: IntArray) -> StepReads:
        """``foresee``, one after another of few ``entries``: where in ``at``, counted row by row, a tile is entered."""
        n, apart = at.shape
        tiles = [each.tiles for each in known]
        total, runs, longest = sum(tiles), sum([each.runs for each in known]), max(tiles)
        rows = [(0, total, runs, longest)]
        came = [-1] * apart
        """Of each sequence: the tile that it is in, if that was new; else one that no other is beside."""
        for entry, tile in zip(entries.tolist(), at.ravel()[entries].tolist(), strict=True):
            step, seq = divmod(entry, apart)
            holds, before, came[seq] = known[seq].holds, came[seq], -1
            if not holds[tile]:
                runs += 1 - int(holds[tile - 1]) - int(holds[tile + 1]) - (abs(before - tile) == 1)
                total += 1
                tiles[seq] += 1
                longest = max(longest, tiles[seq])
                came[seq] = tile
                rows.append((step, total, runs, longest))
        table = np.array(rows)
        lasts = np.diff(table[:, 0], append=n)
        scanned, in_runs, most = (table[:, column].repeat(lasts) for column in (1, 2, 3))
        now = sum([each.cells for each in known])
        useful = np.arange(now + apart, now + apart * n + 1, apart)
        scanned *= TILE
        return StepReads(scanned, useful, in_runs, scanned, most * TILE)

    def took_steps(self, step: Sequence[Chunk], cells: IntArray) -> None:
        """The tokens of steps were put into cells; shape (steps, n_chunks)."""
        in_a_row = len(step) <= TILE and _in_a_row(cells)
        for chunk, column in zip(step, cells.T, strict=True):
            took: Cells = column
            if in_a_row:
                low, high = sorted((int(column[0]), int(column[-1])))
                took = range(low, high + 1, len(step))
            for seq in chunk.seqs:
                if seq in self._known:
                    self._known[seq].add(took)

    def _of(self, seq: int) -> _Tiles:
        known = self._known.get(seq)
        if known is None:
            pieces = self._arena.extents_of(seq)
            cells = [range(*piece) for piece in pieces] if pieces else [self._arena.cells_of(seq)[0]]
            known = self._known[seq] = _Tiles(cells, -(-self._arena.size // TILE))
        return known


def _in_a_row(cells: IntArray) -> bool:
    """Whether cells that rise or fall, step after step, leave none out."""
    return abs(int(cells[0, 0]) - int(cells[-1, -1])) == cells.size - 1
