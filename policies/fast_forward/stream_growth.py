"""A sequence alone in a stream that takes the next cell in every step: what it holds follows from the steps."""

from __future__ import annotations

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import TILE
from policies.cells.search import start_of_search
from policies.cells.sequence_cells import Row
from policies.fast_forward.lockstep import LockstepSequence
from policies.fast_forward.tile_growth import TileGrowth
from policies.fast_forward.tiles import TileMap
from policies.vocabulary import Chunk

ENDLESS = 1 << 62
"""More steps than a run can have."""


class StreamGrowth:
    """The way of one sequence through its stream of one cache group.

    Either it takes free cells in a row, or it has all cells of a window's stream, in a ring, and overwrites its first.
    What is taken is written to the arena when that is asked for.
    """

    __slots__ = ("_arena", "_window", "first", "phase", "row", "runs", "tile_map", "tiles")

    def __init__(self, arena: Arena, row: Row, window: int | None, tile_map: TileMap):
        """``window``: tokens that attention looks back. ``tile_map``: that of the stream."""
        self._arena = arena
        self._window = window
        self.row = row
        self.tile_map = tile_map
        self.first = 0
        """The cell that it takes next, as the arena has it."""
        self.phase: int | None = None
        """As in ``TileGrowth``: it grows; None in a ring."""
        self.tiles = 0
        """Tiles that it holds, as the arena has it."""
        self.runs = 0
        """Contiguous pieces that they form."""

    def look(self, steps: int) -> int:
        """Look where it goes on from after ``steps`` steps, up to date with the arena; return for how many steps."""
        arena, window = self._arena, self._window
        row = arena.row_of(self.row.seq)
        self.phase = None
        if row is None:
            return 0
        self.row = row
        self.tiles, self.runs = self.tile_counts()
        free = arena.free
        if free.total == 0:
            return ENDLESS if window is not None and self._is_ring() else 0
        used = arena.used
        first = start_of_search(arena.head, used, 1)
        if window is None:
            first = free.first_cell(first)
            if first == arena.size:
                first = free.first_cell(0)
        elif first == arena.size or not free.is_free(first, 1):
            return 0
        # The next search must go on from there.
        if first > used + 2 or free.start_of_run(first) != first:
            return 0
        room = self._room(first, free.end_of_run(first))
        self.first = first
        if room:
            self.phase = TILE * self.tiles + TILE - 1 - -first % TILE - steps
        return room

    def tile_counts(self) -> tuple[int, int]:
        """Tiles that it holds in the arena now, and the contiguous pieces that they form."""
        tiles, _, runs = self.tile_map.counts(self.row.seq)
        return tiles, runs

    def count_in(self, sums: TileGrowth, times: int = 1) -> None:
        """Count its tiles in, or out again with ``times`` -1."""
        sums.add(self.phase, self.tiles, self.runs, times)

    def tiles_after(self, steps: int) -> int:
        """Tiles that it holds after that many steps in all."""
        return self.tiles if self.phase is None else (steps + self.phase) // TILE

    @property
    def held_now(self) -> int:
        """Cells that it holds in the arena now."""
        return len(self._arena.cells_of(self.row.seq)[0])

    def held_after(self, k: int) -> int:
        """Cells that it holds ``k`` steps after the arena was brought up to date."""
        held = self.row.end - self.row.begin
        return held if self.phase is None else held + k

    def take(self, k: int) -> None:
        """Bring the arena up to date: ``k`` steps have been taken."""
        if self.phase is not None:
            cells, chunk = range(self.first, self.first + k), Chunk(self.row.seq, self.row.end, k)
            self._arena.take_rows(cells, (self.row,))
            self.tile_map.add((chunk,), cells)
            self._arena.head = self.first = cells.stop
            return
        self.tile_map.forget(self.row.seq)
        size = self._arena.size
        while k > 0:
            # Not all at once: a sequence that holds nothing would begin anew.
            n = min(k, size // 2)
            ring = (self._arena.head + np.arange(n)) % size
            self._arena.remove(self.row.seq, 0, self.row.begin + n)
            self._arena.take_rows(ring, (self.row,))
            self._arena.head = int(ring[-1]) + 1
            k -= n

    def _is_ring(self) -> bool:
        """Whether its cells follow each other round the stream, and the next to be used again is the first."""
        arena = self._arena
        cells = arena.rows.cells(self.row)
        start = arena.head % arena.size
        return bool((cells == (start + np.arange(arena.size)) % arena.size).all())

    def _room(self, first: int, end: int) -> int:
        """Steps along free cells ``[first, end)`` in which each new tile prolongs the piece before it, and no other."""
        free, tile = self._arena.free, first // TILE * TILE
        # The cell before, or one in the same tile, is held.
        if first == tile:
            if first == 0 or free.is_free(first - TILE, TILE):
                return 0
        elif free.is_free(tile, min(TILE, self._arena.size - tile)):
            return 0
        if end == self._arena.size:
            return end - first
        # Tiles before the one that has the next used cell, and that is beside it.
        stop = max(first, TILE * (end // TILE - 1))
        if first > tile:
            stop = max(stop, min(end, tile + TILE))
        return stop - first


class StreamMember(LockstepSequence):
    """A member: its streams in all groups."""

    __slots__ = ("groups", "seq", "since", "until")

    def __init__(self, seq: int, groups: tuple[StreamGrowth, ...]):
        super().__init__()
        self.seq = seq
        self.groups = groups
        self._length = groups[0].row.end
        self.since = 0
        """The step count when its arenas were up to date."""
        self.until = 0
        """The step count up to which it goes on as it does."""

    def look(self, steps: int) -> None:
        """Look where it goes on from; its arenas are up to date."""
        self.since = steps
        self.until = steps + min([group.look(steps) for group in self.groups])

    def write(self, steps: int) -> None:
        """Bring its arenas up to date."""
        if steps > self.since:
            for group in self.groups:
                group.take(steps - self.since)
            self.since = steps
