"""What rules of single cells share: rows, and steps that change nothing but the number of cells that rows see."""

from __future__ import annotations

from policies.cells.free_cells import FreeCells
from policies.cells.sequence_cells import Row as SequenceRow
from policies.cells.sequence_cells import SequenceCells
from policies.cells.tile_counts import HeldTiles
from policies.compiled import i64, mypyc_attr
from policies.placement.rule import PlacementRule, Row

_TILE_SHIFT = 6


@mypyc_attr(allow_interpreted_subclasses=True)
class CellRow(Row):
    """A row, and where its tokens are noted."""

    def __init__(self, seq: int, cells: SequenceRow, tiles: HeldTiles | None):
        """``tiles``: None where the kernel has none."""
        super().__init__(seq, cells.end)
        self.cells = cells
        self.tiles = tiles


@mypyc_attr(allow_interpreted_subclasses=True)
class CellStepRule(PlacementRule):
    """Repeats steps that take the next of consecutive cells: cells are taken at once, rows told of theirs later."""

    def __init__(self, max_pass_tokens: int, groups: int, free: FreeCells, sequences: SequenceCells):
        """``free``, ``sequences``: those of the arena that steps to be repeated are placed in."""
        super().__init__(max_pass_tokens, groups)
        self.cell_rows: list[CellRow] = []
        """The rows, by their own type."""
        self.free = free
        self.sequences = sequences
        self._first: i64 = 0
        """The cell of the first row in the step that is repeated."""
        self._done: i64 = 0
        """Repeats since that step."""
        self._possible: i64 = 0
        """The most repeats that change nothing else."""
        self._until_end: i64 = 0
        """Repeats after which some row has had its last token."""

    def _changed(self) -> None:
        rows = list[CellRow]()
        for row in self.rows:
            assert isinstance(row, CellRow)
            rows.append(row)
        self.cell_rows = rows

    def begin_repeats(self, first: i64, limit: i64, least_left: i64) -> None:
        """Note a step that has given each row one cell, from ``first`` on.

        ``limit``: the cell from which on a step changes more. ``least_left``: the fewest tokens that a row lacks.
        """
        free, n = self.free, len(self.cell_rows)
        behind = first + n
        possible = min((limit - first) // n - 1, free.free_from(behind) // n, least_left)
        # As ``start_of_search`` has it: from then on both sides grow alike.
        self._possible = 0 if behind > free.size - free.total + 2 * n else possible
        self._first, self._until_end = first, least_left

    def repeat_step(self) -> bool:
        """Take the cells behind those of a step that took consecutive ones."""
        if self._done >= self._possible:
            return False
        n = len(self.cell_rows)
        self._done += 1
        self.free.take(self._first + self._done * n, n)
        group = self.passes[0].groups[0]
        group.single_useful += n
        group.single_most_useful += 1
        self.ended = self._done == self._until_end
        return True

    def settle(self) -> None:
        """Let rows have the cells of repeated steps."""
        done, n = self._done, len(self.cell_rows)
        self._done = self._possible = 0
        if done == 0:
            return
        first = self._first
        for row in self.cell_rows:
            self.sequences.append_run(row.cells, first + n, n, done)
            row.length += done
            row.left -= done
            if row.tiles is not None:
                row.tiles.add_to((first >> _TILE_SHIFT) + 1, done)
            first += 1
        self.go_on_behind(self._first + (done + 1) * n)

    def go_on_behind(self, end: i64) -> None:
        """Let the next search begin at ``end``, where a step's cells have ended."""
        self.free.head = end
