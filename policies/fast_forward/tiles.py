"""Which tiles of an arena hold cells of each sequence: what the kernel ``tiled`` reads, updated as cells are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import TILE
from policies.fast_forward.forecast import StepReads
from policies.vocabulary import Chunk, IntArray, Reads

_FEW = 64
"""Up to this many entries into tiles are handled one by one, more as arrays."""


class SequenceTiles:
    """The tiles of one sequence, and how many cells, tiles and runs of tiles it has."""

    __slots__ = ("cells", "holds", "runs", "tiles")

    def __init__(self, n_tiles: int):
        # One more tile at either end, so that every tile has two neighbours.
        self.holds = bytearray(n_tiles + 2)
        self.cells = self.tiles = self.runs = 0

    def add(self, cells: Cells) -> None:
        """Add cells that it has been given."""
        self.cells += len(cells)
        holds = self.holds
        if isinstance(cells, range):
            first, stop = cells.start // TILE + 1, (cells.stop - 1) // TILE + 2
            holds[first:stop] = b"\1" * (stop - first)
        else:
            np.frombuffer(holds, dtype=np.uint8)[cells // TILE + 1] = 1
        self.tiles = holds.count(1)
        self.runs = holds.count(b"\0\1")

    def add_one(self, cell: int) -> None:
        """Add a cell that it has been given."""
        self.cells += 1
        self.enter(cell // TILE + 1)

    def enter(self, tile: int) -> None:
        """Note that it has a cell in a tile, which is counted from 1."""
        holds = self.holds
        if not holds[tile]:
            self.runs += 1 - holds[tile - 1] - holds[tile + 1]
            self.tiles += 1
            holds[tile] = 1


class TileMap:
    """The tiles of sequences, kept from the first question about one until it gives up cells."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._known: dict[int, SequenceTiles] = {}

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

    def add_step(self, seqs: Sequence[int], cells: Cells) -> None:
        """Note that sequences got a cell each, in turn."""
        known = self._known
        for seq, cell in zip(seqs, cells if isinstance(cells, range) else cells.tolist(), strict=True):
            if seq in known:
                known[seq].add_one(cell)

    def reads(self, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads for a micro-batch that has been placed."""
        tokens, tiles, cells, runs = np.array([(chunk.n, *self.counts(chunk.seq)) for chunk in chunks]).T
        scanned = TILE * tiles
        return Reads(tokens, scanned, cells, runs, int(scanned.sum()))

    def counts(self, seq: int) -> tuple[int, int, int]:
        """Numbers of tiles, cells and runs of tiles of a sequence."""
        known = self.of(seq)
        return known.tiles, known.cells, known.runs

    def plan_steps(self, seqs: Sequence[int], cells: IntArray) -> StepReads:
        """What attention reads in decode steps whose tokens go into ``cells``.

        Shape (steps, sequences); each column ascends or descends.
        """
        known = [self.of(seq) for seq in seqs]
        steps, n = cells.shape
        at = cells // TILE + 1
        enters = np.ones(cells.shape, dtype=np.bool_)
        np.not_equal(at[1:], at[:-1], out=enters[1:])
        entries = enters.ravel().nonzero()[0]
        if len(entries) <= _FEW:
            return self._one_by_one(known, at, entries)
        held = sum([each.cells for each in known])
        useful = np.arange(held + n, held + n * steps + 1, n)
        in_steps, in_turn = np.divmod(entries, n)
        tile = at.ravel()[entries]
        holds = np.frombuffer(b"".join([each.holds for each in known]), dtype=np.uint8)
        base = in_turn * len(known[0].holds)
        new = (holds[base + tile] == 0).nonzero()[0]
        in_steps, in_turn, tile, base = in_steps[new], in_turn[new], tile[new], base[new]
        # The tile of the step before counts as a neighbour even if it was new then.
        before = at.ravel()[np.maximum((in_steps - 1) * n + in_turn, 0)]
        joins = (in_steps > 0) & (np.abs(before - tile) == 1) & (holds[base + before] == 0)
        meets = holds[base + tile - 1] + holds[base + tile + 1] + joins
        more = np.bincount(in_steps, minlength=steps)
        tiles = sum([each.tiles for each in known]) + np.cumsum(more)
        runs = sum([each.runs for each in known]) + np.cumsum(
            more - np.bincount(in_steps, weights=meets, minlength=steps).astype(np.int64)
        )
        scanned = TILE * tiles
        entered = np.zeros(cells.shape, dtype=np.int64)
        entered[in_steps, in_turn] = TILE
        entered[0] += [TILE * each.tiles for each in known]
        return StepReads(scanned, useful, runs, scanned, np.cumsum(entered, axis=0).max(axis=1))

    @staticmethod
    def _one_by_one(known: Sequence[SequenceTiles], at: IntArray, entries: IntArray) -> StepReads:
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
                runs += 1 - holds[tile - 1] - holds[tile + 1] - (abs(before - tile) == 1)
                total += 1
                tiles[seq] += 1
                longest = max(longest, tiles[seq])
                came[seq] = tile
                rows.append((step, total, runs, longest))
        table = np.array(rows)
        lasts = np.empty(len(rows), dtype=np.int64)
        np.subtract(table[1:, 0], table[:-1, 0], out=lasts[:-1])
        lasts[-1] = n - rows[-1][0]
        scanned, in_runs, most = table[:, 1:].repeat(lasts, axis=0).T
        now = sum([each.cells for each in known])
        useful = np.arange(now + apart, now + apart * n + 1, apart)
        scanned = scanned * TILE
        return StepReads(scanned, useful, in_runs, scanned, most * TILE)

    def add_steps(self, seqs: Sequence[int], cells: IntArray) -> None:
        """Note that the tokens of decode steps were put into ``cells``; shape (steps, sequences)."""
        known = [self._known.get(seq) for seq in seqs]
        at = cells // TILE + 1
        enters = np.ones(cells.shape, dtype=np.bool_)
        np.not_equal(at[1:], at[:-1], out=enters[1:])
        steps, in_turn = enters.nonzero()
        for i, tile in zip(in_turn.tolist(), at[steps, in_turn].tolist(), strict=True):
            each = known[i]
            if each is not None and not each.holds[tile]:
                each.enter(tile)
        for each in known:
            if each is not None:
                each.cells += len(cells)

    def of(self, seq: int) -> SequenceTiles:
        """The tiles of a sequence."""
        known = self._known.get(seq)
        if known is None:
            known = self._known[seq] = SequenceTiles(-(-self._arena.size // TILE))
            row = self._arena.row_of(seq)
            known.add(self._arena.cells_of(seq)[0] if row is None else self._arena.rows.cells(row))
        return known
