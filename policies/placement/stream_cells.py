"""One stream of a cache group, and what rows hold in it: how cells are found, taken and given to rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from policies.cells.arena import Arena
from policies.cells.free_cells import FreeCells
from policies.cells.search import next_runs
from policies.cells.sequence_cells import Row as SequenceRow
from policies.cells.sequence_cells import SequenceCells
from policies.cells.stream_arenas import CacheSpec
from policies.cells.tile_counts import HeldTiles, TileCounts
from policies.cells.window import WindowCells
from policies.compiled import i64, mypyc_attr
from policies.placement.repeats import CellRow
from policies.vocabulary import Chunk

_ENDLESS: Final = 1 << 62


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamCells:
    """One stream of a cache group."""

    def __init__(self, arena: Arena, tiles: TileCounts | None, window: WindowCells | None, spec: CacheSpec):
        """``tiles``: None where they are not counted."""
        self.arena = arena
        self.free: FreeCells = arena.free
        self.sequences: SequenceCells = arena.rows
        self.tiles = tiles
        self.window = window
        self.size: i64 = arena.size
        self.pad = spec.pad
        self.most_seen: i64 = spec.window or _ENDLESS
        """Tokens that attention looks back, itself included."""
        self.used: i64 = 0
        """After ``look``: used cells, free extents, the largest of them, and one past the highest used cell."""
        self.extents: i64 = 1
        self.largest: i64 = self.size
        self.top: i64 = 0
        self._seen: i64 = -1

    def look(self) -> None:
        """Note how full it is."""
        free = self.free
        if self._seen != free.changes:
            self._seen = free.changes
            self.used = self.size - free.total
            self.extents, self.largest, self.top = free.lengths.count, free.largest, free.top

    def start_of_search(self, n: i64) -> i64:
        """Where a search for ``n`` cells begins, as the function of that name has it."""
        head = self.free.head
        return 0 if head > self.size - self.free.total + 2 * n else head

    def has_room(self, n: i64, most: i64) -> bool:
        """Whether ``n`` tokens find room in passes of at most ``most`` tokens: certain if True."""
        if self.window is None:
            return self.free.total >= n
        # No sequence sees more of its tokens than are in the window.
        seen: i64 = len(self.arena.rows.rows) * (self.most_seen - 1)
        return self.window.look() and (self.free.total >= n or self.size - seen >= min(n, most))

    def take_one(self) -> i64:
        """Take the next usable cell, which there must be."""
        window, head = self.window, self.start_of_search(1)
        cell: i64 = self.free.take_run(head, 1) if window is None else window.take_one(head)
        self.free.head = cell + 1
        return cell

    def put(self, group: int, rows: list[StreamRow], chunks: Sequence[Chunk]) -> None:
        """Give rows, and then chunks that continue their sequences, their cells, which are certain to be found."""
        own, tokens = 0, 0
        for row in rows:
            own += row.n
        for chunk in chunks:
            tokens += chunk.n
            if self.tiles is not None:
                self.tiles.of(chunk.seq)
        head, rows_of, window = self.start_of_search(own + tokens), self.sequences.rows, self.window
        if window is None:
            self._put_anywhere(group, rows, chunks, own, own + tokens, head)
            return
        found = window.find_next(head, own + tokens)
        assert found, "there is room"
        window.take_each(found)
        self.clear_rotations(found)
        if own:
            self.give(group, rows, found)
        at = own
        for chunk in chunks:
            part, cell_row = found[at : at + chunk.n], rows_of[chunk.seq]
            window.note(cell_row, cell_row.end, part)
            self.sequences.append_each(cell_row, part)
            if self.tiles is not None:
                self.tiles.of(chunk.seq).add_each(part)
            at += chunk.n
        self.free.head = found[-1] + 1

    def _put_anywhere(
        self, group: int, rows: list[StreamRow], chunks: Sequence[Chunk], own: i64, n: i64, head: i64
    ) -> None:
        """``put`` of ``n`` tokens, ``own`` of them of rows, where any free cells from ``head`` on will do."""
        left, at, mine = own, 0, list[int]()
        """Tokens that rows still lack, and the chunk that gets the next cells."""
        placed: i64 = 0
        rotations = self.arena.pending.rotations
        for each in next_runs(self.free, n, head):
            cell: i64 = each[0]
            stop = cell + each[1]
            self.free.take(cell, stop - cell)
            if rotations is not None:
                rotations[int(cell) : int(stop)] = 0
            while cell < stop:
                if left > 0:
                    mine.append(int(cell))
                    cell, left = cell + 1, left - 1
                    continue
                chunk = chunks[at]
                taken = min(stop - cell, chunk.n - placed)
                self.sequences.append_run(self.sequences.rows[chunk.seq], cell, 1, taken)
                if self.tiles is not None:
                    self.tiles.of(chunk.seq).add_run(cell, taken)
                cell, placed = cell + taken, placed + taken
                if placed == chunk.n:
                    at, placed = at + 1, 0
            self.free.head = stop
        if mine:
            self.give(group, rows, mine)

    def give(self, group: int, rows: list[StreamRow], cells: list[int]) -> None:
        """Give rows their cells in this group's stream, which have been taken, in order."""
        at: i64 = 0
        window = self.window
        for row in rows:
            held = row.held[group]
            own, tiles = held.cells, held.tiles
            for _ in range(row.n):
                cell = cells[at]
                at += 1
                if window is not None:
                    window.note_one(own, own.end, cell)
                self.sequences.append_run(own, cell, 1, 1)
                if tiles is not None:
                    tiles.add_one(cell)

    def clear_rotations(self, cells: list[int]) -> None:
        """Forget by how much keys in cells that were taken had still to be rotated."""
        rotations = self.arena.pending.rotations
        if rotations is not None:
            rotations[cells] = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Held:
    """What a row holds in one cache group."""

    def __init__(self, stream: StreamCells, cells: SequenceRow, tiles: HeldTiles | None):
        """``tiles``: None where they are not counted."""
        self.stream = stream
        self.cells = cells
        self.tiles = tiles


@final
@mypyc_attr(allow_interpreted_subclasses=True)
class StreamRow(CellRow):
    """A row, with what it holds in each cache group; ``cells`` and ``tiles`` are those of the first."""

    def __init__(self, seq: int, held: list[Held]):
        super().__init__(seq, held[0].cells, held[0].tiles)
        self.held = held

    def renew(self, held: list[Held]) -> None:
        """Note what it holds now."""
        self.held, self.cells, self.tiles = held, held[0].cells, held[0].tiles
