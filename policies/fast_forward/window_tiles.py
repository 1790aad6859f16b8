"""Which tiles hold cells of each sequence in a cache with a sliding window, where sequences lose their first cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import TILE
from policies.cells.search import cells_array
from policies.fast_forward.forecast import StepReads
from policies.fast_forward.tiles import TileMap
from policies.fast_forward.window_path import WindowPath
from policies.vocabulary import IntArray


class WindowTileMap(TileMap):
    """A map of tiles that also has how many cells are in each, so that it can be told of those that are lost."""

    def __init__(self, arena: Arena):
        super().__init__(arena)
        self.held: IntArray = np.zeros(0, dtype=np.int64)
        """Cells that a sequence has in each tile; as ``flat``."""

    def lose(self, seq: int, cells: IntArray) -> None:
        """Note that a sequence lost ``cells``."""
        row = self._rows.get(seq)
        if row is not None and len(cells):
            at = cells // TILE + (row * self.width + 1)
            np.subtract.at(self.held, at, 1)
            self.flat[at] = self.held[at] > 0
            self.cells[row] -= len(cells)
            self.count(row)

    def _add(self, row: int, cells: Cells) -> None:
        np.add.at(self.held, cells_array(cells) // TILE + (row * self.width + 1), 1)
        super()._add(row, cells)

    def _add_one(self, row: int, cell: int) -> None:
        self.held[row * self.width + cell // TILE + 1] += 1
        super()._add_one(row, cell)

    def _clear(self, row: int) -> None:
        super()._clear(row)
        self.held[row * self.width : (row + 1) * self.width] = 0

    def _grow(self) -> None:
        super()._grow()
        self.held = np.concatenate((self.held, np.zeros(len(self.flat) - len(self.held), dtype=np.int64)))


class WindowTileSteps:
    """The tiles that decode steps of some sequences enter and leave; none of the steps is taken yet."""

    def __init__(self, tile_map: WindowTileMap, path: WindowPath, seqs: Sequence[int], steps: int, window: int):
        self._map = tile_map
        self._rows = tile_map.rows_of(seqs)
        self._window = window
        self._steps = steps
        firsts = np.array(self._rows) * tile_map.width + 1
        self._taken: IntArray = path.table(steps) // TILE + firsts
        """The tile in which each sequence takes a cell in each step, as an index into ``flat``; (steps, sequences)."""
        lost = path.positions_lost(steps)
        self._others = [seq for seq in lost if seq not in seqs]
        """Sequences that lose cells and take none."""
        turns, when, where = (list[IntArray]() for _ in range(3))
        for i, seq in enumerate(seqs):
            if seq in lost:
                cells, positions = path.arena.cells_of(seq)
                gone = int(positions.searchsorted(lost[seq][-1], side="right"))
                where.append(cells[:gone] // TILE + firsts[i])
                when.append(lost[seq].searchsorted(positions[:gone]))
                turns.append(np.full(gone, i))
        nothing = np.zeros(0, dtype=np.int64)
        self._left: IntArray = np.concatenate([nothing, *where])
        """The tile of each cell that is lost, likewise."""
        self._when: IntArray = np.concatenate([nothing, *when])
        """The step in which it is lost."""
        self._turns: IntArray = np.concatenate([nothing, *turns])
        """Which of the sequences loses it."""

    def reads(self) -> StepReads:
        """What attention reads in these steps."""
        tile_map, n, steps = self._map, len(self._rows), self._steps
        where, step, sign = self._tile_changes()
        tiles, runs, _ = tile_map.totals(self._rows)
        more = self._summed_up(step, sign)
        # There are as many pieces as tiles less pairs of adjacent ones.
        flat = tile_map.flat
        _, pair_step, pair_sign = _crossings(
            np.concatenate((where, where - 1)),
            np.concatenate((step, step)),
            np.concatenate((sign, sign)),
            steps,
            lambda at: flat[at].astype(np.int64) + flat[at + 1],
            2,
        )
        scanned = TILE * (tiles + more)
        turn_of = np.zeros(len(tile_map.tiles), dtype=np.int64)
        turn_of[self._rows] = np.arange(n)
        own = self._by_turn(turn_of[where // tile_map.width], step, sign)
        own += np.array([tile_map.tiles[row] for row in self._rows])[:, None]
        held = np.arange(1, steps + 1) - self._by_turn(self._turns, self._when, np.ones_like(self._turns))
        held += np.array([tile_map.cells[row] for row in self._rows])[:, None]
        useful = np.minimum(held, self._window).sum(axis=0)
        pieces = runs + more - self._summed_up(pair_step, pair_sign)
        return StepReads(scanned, useful, pieces, scanned, TILE * own.max(axis=0))

    def take(self, k: int) -> None:
        """Note that the first ``k`` steps were taken."""
        tile_map, flat, held = self._map, self._map.flat, self._map.held
        entered, gone = self._taken[:k].reshape(-1), self._when < k
        left = self._left[gone]
        np.add.at(held, entered, 1)
        np.subtract.at(held, left, 1)
        for touched in (entered, left):
            flat[touched] = held[touched] > 0
        lost = np.bincount(self._turns[gone], minlength=len(self._rows)).tolist()
        for row, cells in zip(self._rows, lost, strict=True):
            tile_map.cells[row] += k - cells
            tile_map.count(row)
        for seq in self._others:
            tile_map.forget(seq)

    def _tile_changes(self) -> tuple[IntArray, IntArray, IntArray]:
        """Tiles that a sequence enters or leaves, the steps, and 1 or -1."""
        n, held = len(self._rows), self._map.held
        return _crossings(
            np.concatenate((self._taken.reshape(-1), self._left)),
            np.concatenate((np.repeat(np.arange(self._steps), n), self._when)),
            np.repeat([1, -1], [n * self._steps, len(self._left)]),
            self._steps,
            lambda at: held[at],
            1,
        )

    def _summed_up(self, step: IntArray, change: IntArray) -> IntArray:
        """All changes up to each step; shape (steps,)."""
        sums: IntArray = np.bincount(step, weights=change, minlength=self._steps).astype(np.int64).cumsum()
        return sums

    def _by_turn(self, turn: IntArray, step: IntArray, change: IntArray) -> IntArray:
        """The changes of each sequence up to each step; shape (sequences, steps)."""
        n = len(self._rows)
        table = np.bincount(turn * self._steps + step, weights=change, minlength=n * self._steps)
        sums: IntArray = table.astype(np.int64).reshape(n, self._steps).cumsum(axis=1)
        return sums


def _crossings(
    where: IntArray,
    step: IntArray,
    change: IntArray,
    steps: int,
    before: Callable[[IntArray], IntArray],
    least: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """Where a count reaches ``least`` (1) or no longer does (-1), in which step, and which of these.

    ``change``: changes of the counts at ``where`` in ``step``, in any order. ``before``: the counts before them all.
    """
    code = where * steps + step
    order = code.argsort(kind="stable")
    code, total = code[order], change[order].cumsum()
    last = np.append(code[1:] != code[:-1], np.ones(min(len(code), 1), dtype=np.bool_)).nonzero()[0]
    code, total = code[last], total[last]
    at = code // steps
    is_first = np.append(np.ones(min(len(at), 1), dtype=np.bool_), at[1:] != at[:-1])
    first = is_first.nonzero()[0]
    earlier = np.append([0], total)[first]
    count = before(at)
    reaches = count + total - np.repeat(earlier, np.diff(first, append=len(at))) >= least
    reached = np.append([False], reaches)[:-1]
    reached[first] = count[first] >= least
    crossed = (reaches != reached).nonzero()[0]
    return at[crossed], code[crossed] % steps, np.where(reaches[crossed], 1, -1)
