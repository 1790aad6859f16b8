"""Which tiles of an arena hold cells of each sequence: what the kernel ``tiled`` reads, updated as cells are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import TILE
from policies.cells.search import Cells
from policies.fast_forward.forecast import StepReads
from policies.vocabulary import Chunk, IntArray, Reads

_FEW = 48
"""Up to this many tiles are handled one by one, more as arrays."""


class _SequenceTiles:
    """The tiles of one sequence, and how many cells, tiles and runs of tiles it has."""

    __slots__ = ("cells", "holds", "runs", "tiles")

    def __init__(self, cells: Sequence[Cells], n_tiles: int):
        # One more tile at either end, so that every tile has two neighbours.
        self.holds = np.zeros(n_tiles + 2, dtype=np.int8)
        self.cells = self.tiles = self.runs = 0
        for some in cells:
            self.add(some)

    def add(self, cells: Cells) -> None:
        """Add cells that it has been given. A range may have gaps, but none as long as a tile."""
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
        """Add a cell that it has been given."""
        self.cells += 1
        self._enter(cell // TILE + 1)

    def _enter(self, tile: int) -> None:
        holds = self.holds
        if not holds[tile]:
            self.runs += 1 - int(holds[tile - 1]) - int(holds[tile + 1])
            self.tiles += 1
            holds[tile] = 1


class TileMap:
    """The tiles of sequences, kept from the first question about one until it gives up cells."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._known: dict[int, _SequenceTiles] = {}

    def forget(self, seq: int | None = None) -> None:
        """Note that a sequence gave up cells, or that its cells were moved; None or negative: any sequence."""
        if seq is None or seq < 0:
            self._known.clear()
        else:
            self._known.pop(seq, None)

    def add(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Note that the tokens of chunks were put into ``cells``, in order."""
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
        """What attention reads for a micro-batch that has been placed."""
        tokens, tiles, cells, runs = np.array([(chunk.n, *self.counts(chunk.seq)) for chunk in chunks]).T
        scanned = TILE * tiles
        return Reads(tokens, scanned, cells, runs, int(scanned.sum()))

    def counts(self, seq: int) -> tuple[int, int, int]:
        """Numbers of tiles, cells and runs of tiles of a sequence."""
        known = self._of(seq)
        return known.tiles, known.cells, known.runs

    def plan_steps(self, step: Sequence[Chunk], cells: IntArray) -> StepReads:
        """What attention reads in decode steps whose tokens go into ``cells``.

        Shape (steps, n_chunks); each column ascends or descends.
        """
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
        # The tile of the step before counts as a neighbour even if it was new then.
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
    def _one_by_one(known: Sequence[_SequenceTiles], at: IntArray, entries: IntArray) -> StepReads:
        """``plan_steps`` for few ``entries``: indices into ``at``, row by row, where a sequence enters another tile."""
        n, apart = at.shape
        tiles = [each.tiles for each in known]
        total, runs, longest = sum(tiles), sum([each.runs for each in known]), max(tiles)
        rows = [(0, total, runs, longest)]
        came = [-1] * apart
        """For each sequence the tile that it is in, if that was new; else one that is beside no other."""
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

    def add_steps(self, step: Sequence[Chunk], cells: IntArray) -> None:
        """Note that the tokens of decode steps were put into ``cells``; shape (steps, n_chunks)."""
        consecutive = len(step) <= TILE and _are_consecutive(cells)
        for chunk, column in zip(step, cells.T, strict=True):
            took: Cells = column
            if consecutive:
                low, high = sorted((int(column[0]), int(column[-1])))
                took = range(low, high + 1, len(step))
            for seq in chunk.seqs:
                if seq in self._known:
                    self._known[seq].add(took)

    def _of(self, seq: int) -> _SequenceTiles:
        known = self._known.get(seq)
        if known is None:
            extents = self._arena.sets.extents_of(seq)
            cells = [range(*extent) for extent in extents] if extents else [self._arena.cells_of(seq)[0]]
            known = self._known[seq] = _SequenceTiles(cells, -(-self._arena.size // TILE))
        return known


def _are_consecutive(cells: IntArray) -> bool:
    """Whether cells that ascend or descend, step after step, leave none out."""
    return abs(int(cells[0, 0]) - int(cells[-1, -1])) == cells.size - 1
