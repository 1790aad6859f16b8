"""Several caches side by side, each divided into streams; with the moves and rotations that an engine still owes.

A *group* is a cache that some of the model's layers use: one, or two for models with a sliding window in some layers
(iSWA). A *stream* is an independent cache within a group: one for all sequences (unified), or one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.arena import FOREVER, Arena
from policies.cells.free_extents import extents_of_cells
from policies.cells.reads import TILE
from policies.cells.tile_counts import TileCounts
from policies.cells.window import WindowCells
from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, IntArray, Moves, Reads, Shift, View


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache group."""

    size: int
    """Cells in each stream."""
    pad: int = 256
    """The span is rounded up to a multiple of this many cells."""
    window: int | None = None
    """Tokens that attention looks back, itself included; cells that fell out of it are used again."""
    share: float = 1.0
    """Share of the model's layers."""


class StreamArenas:
    """An arena for every stream of every group, with the copies and rotations that no micro-batch has reported yet."""

    def __init__(self, specs: Sequence[CacheSpec], n_streams: int, *, tiled: bool = False):
        """``tiled``: whether to count tiles, for the kernel of that name."""
        self.specs = tuple(specs)
        self.n_streams = n_streams
        self.arenas = tuple(tuple(Arena(spec.size) for _ in range(n_streams)) for spec in specs)
        """Indexed by group, then by stream."""
        self.tiles: list[list[TileCounts]] = []
        """The tiles of each arena, likewise; empty where they are not counted."""
        if tiled:
            self.tiles = [[TileCounts(arena) for arena in arenas] for arenas in self.arenas]
        self.windows: list[list[WindowCells] | None] = []
        """What finds cells in each arena of a group with a window, likewise; None for the other groups."""
        for group, spec in enumerate(self.specs):
            found = None
            if spec.window is not None:
                tiles = self.tiles[group] if tiled else [None] * n_streams
                found = [WindowCells(*each, spec.window) for each in zip(self.arenas[group], tiles, strict=True)]
            self.windows.append(found)
        self.changes = 0
        """How often anything was done after which arenas may have other rows, or tiles are forgotten."""
        self.attended: set[int] = set()
        """Spans (llama.cpp's ``n_kv``) of the micro-batches, in all groups, of the last step that was asked for."""
        self.unreported: set[int] = set()
        """Groups with copies or rotations that no micro-batch may have reported yet; the others have none."""
        self._stream_copies: list[list[Moves]] = [[] for _ in specs]
        """Unreported copies between streams, by group."""

    def stream_of(self, seq: int) -> int:
        """The stream that a sequence lies in."""
        return seq if self.n_streams > 1 else 0

    def of(self, seq: int) -> list[tuple[int, Arena]]:
        """A sequence's arena in each group (all arenas, if negative), with the group's number."""
        if seq < 0:
            return [(g, arena) for g, arenas in enumerate(self.arenas) for arena in arenas]
        return [(g, arenas[self.stream_of(seq)]) for g, arenas in enumerate(self.arenas)]

    def cells_of(self, group: int, seq: int) -> tuple[IntArray, IntArray]:
        """A sequence's cells in its stream of a group, in order of position, and those positions; shape (n,) each."""
        return self.arenas[group][self.stream_of(seq)].cells_of(seq)

    def ends(self, seq: int) -> tuple[int, int]:
        """The first and the last position that a sequence has in the last group; -1 if it has none."""
        arena = self.arenas[-1][self.stream_of(seq)]
        return arena.first_position(seq), arena.last_position(seq)

    def tile_reads(self, group: int, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads by tiles for a micro-batch that has been placed, but for what a window hides."""
        maps = self.tiles[group]
        tokens = np.array([chunk.n for chunk in chunks])
        counts = np.array([maps[self.stream_of(chunk.seq)].counts(chunk.seq) for chunk in chunks])
        scanned = TILE * counts[:, 0]
        return Reads(tokens, scanned, counts[:, 1], counts[:, 2], int(scanned.sum()))

    def forget(self, group: int | None = None) -> None:
        """Note that sequences, in one group or in all, may have other cells now."""
        self.changes += 1
        for each in self.tiles if group is None else self.tiles[group : group + 1]:
            for tiles in each:
                tiles.forget()
        for windows in self.windows if group is None else self.windows[group : group + 1]:
            for window in windows or ():
                window.forget()

    def remove(self, seq: int, start: int, stop: int, only: int | None = None) -> None:
        """Take positions ``[start, stop)`` from a sequence (all, if negative); searches begin there next, if lower.

        ``only``: in that group alone.
        """
        if seq < 0:
            self.forget()
        for group, arena in self.of(seq):
            if only is not None and group != only:
                continue
            stream, windows, row = self.stream_of(seq), self.windows[group], arena.rows.rows.get(seq)
            window = windows[stream] if windows is not None and seq >= 0 else None
            if start <= 0 and stop == FOREVER and (window is None or row is not None):
                if window is not None and row is not None:
                    window.clear(arena.rows.cells(row).tolist())
                gone, first = None, arena.empty(seq)
            else:
                gone = arena.remove(seq, start, stop)
                first = int(gone[0]) if len(gone) else None
            if first is not None:
                arena.head = min(arena.head, first)
            if gone is not None and row is not None and arena.rows.rows.get(seq) is row:
                if self.tiles:
                    self.tiles[group][stream].lose(seq, gone)
                if window is not None:
                    window.clear(gone.tolist())
            elif seq >= 0:
                if self.tiles:
                    self.tiles[group][stream].forget(seq)
                if window is not None and gone is not None:
                    window.forget()

    def view(self, group: int, seq: int) -> View:
        """All that a group holds of a sequence; the cells are numbered over all streams."""
        cells, positions = self.cells_of(group, seq)
        return View(cells + self.stream_of(seq) * self.specs[group].size, positions)

    def copy_between_streams(self, group: int, src: int, dst: int) -> None:
        """Copy a whole sequence to the same cells of another stream (``seq_cp`` between streams), which is emptied."""
        source, target = self.arenas[group][self.stream_of(src)], self.arenas[group][self.stream_of(dst)]
        cells, positions = source.cells_of(src)
        target.clear()
        target.free.take_each(cells.tolist())
        for cell, position in zip(cells.tolist(), positions.tolist(), strict=True):
            target.put(np.array([cell]), (dst,), position)
        target.pending.rotate(cells, source.pending.rotations_of(cells))
        target.head = source.head
        starts, ends = extents_of_cells(np.sort(cells))
        size = self.specs[group].size
        offset_from, offset_to = self.stream_of(src) * size, self.stream_of(dst) * size
        self.unreported.add(group)
        self._stream_copies[group].append(Moves(starts + offset_from, starts + offset_to, ends - starts))

    def settle(self, group: int) -> tuple[Moves, Shift]:
        """The unreported copies and rotations of a group, in its own cell numbers; from now on they are reported."""
        if group not in self.unreported:
            return NO_MOVES, NO_SHIFT
        self.unreported.remove(group)
        size = self.specs[group].size
        moves, cells, deltas = [], [], []
        for stream, arena in enumerate(self.arenas[group]):
            own, shift = arena.settle()
            offset = stream * size
            if own.n_runs:
                moves.append(Moves(own.src + offset, own.dst + offset, own.length))
            cells.append(shift.cells + offset)
            deltas.append(shift.deltas)
        copies, self._stream_copies[group] = self._stream_copies[group], []
        return Moves.join([*copies, *moves]), Shift(np.concatenate(cells), np.concatenate(deltas))
