"""Steps that take the next of consecutive cells, and change nothing but the number of cells that rows see."""

from __future__ import annotations

from policies.cells.free_cells import FreeCells
from policies.cells.sequence_cells import Row as CellRow
from policies.cells.sequence_cells import SequenceCells
from policies.cells.tile_counts import HeldTiles
from policies.compiled import i64, mypyc_attr
from policies.placement.rule import PassReads, Row

_TILE_SHIFT = 6


@mypyc_attr(allow_interpreted_subclasses=True)
class CellRepeats:
    """Takes cells at once, and says later which row has which: each row gets one in every step, in order."""

    def __init__(self, free: FreeCells, sequences: SequenceCells):
        """``free``, ``sequences``: those of the arena that the rows are in."""
        self._free = free
        self._sequences = sequences
        self._first: i64 = 0
        """The cell of the first row in the step that is repeated."""
        self._n: i64 = 0
        """Rows."""
        self._possible: i64 = 0
        self._until_end: i64 = 0
        """Repeats after which some row has had its last token."""
        self.done: i64 = 0
        """Repeats since the step that is repeated."""

    def begin(self, first: i64, n: i64, limit: i64, least_left: i64) -> None:
        """Note a step that has given ``n`` rows the cells from ``first`` on.

        ``limit``: the cell from which on a step changes more. ``least_left``: the fewest tokens that a row lacks.
        """
        free, behind = self._free, first + n
        possible = min((limit - first) // n - 1, free.free_from(behind) // n, least_left)
        # As ``start_of_search`` has it: from then on both sides grow alike.
        self._possible = 0 if behind > free.size - free.total + 2 * n else possible
        self._first, self._n, self._until_end = first, n, least_left

    def stop(self) -> None:
        """Note a step that cannot be repeated."""
        self._possible = 0

    def take(self, passes: list[PassReads]) -> bool:
        """Take the cells of another step, and count what it reads; False, without effect, where it is not alike.

        ``passes``: those of the step that is repeated; it has one.
        """
        if self.done >= self._possible:
            return False
        self.done += 1
        n = self._n
        self._free.take(self._first + self.done * n, n)
        group = passes[0].groups[0]
        group.single_useful += n
        group.single_most_useful += 1
        return True

    def is_end(self) -> bool:
        """Whether a row had its last token in the step taken last."""
        return self.done == self._until_end

    def give(self, at: i64, row: Row, cells: CellRow, tiles: HeldTiles | None) -> None:
        """Let the ``at``-th row have its tokens of all repeats."""
        first, n, done = self._first + at, self._n, self.done
        self._sequences.append_run(cells, first + n, n, done)
        row.length += done
        row.left -= done
        if tiles is not None:
            tiles.add_to((first >> _TILE_SHIFT) + 1, done)

    def settled(self) -> i64:
        """Note that all rows have theirs; returns the cell behind them."""
        end = self._first + (self.done + 1) * self._n
        self.done = self._possible = 0
        return end
