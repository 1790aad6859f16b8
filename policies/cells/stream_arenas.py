"""Several caches side by side, each divided into streams; with the moves and rotations that an engine still owes.

A *group* is a cache that some of the model's layers use: one, or two for models with a sliding window in some layers
(iSWA). A *stream* is an independent cache within a group: one for all sequences (unified), or one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_extents import extents_of_cells
from policies.vocabulary import NO_MOVES, NO_SHIFT, IntArray, Moves, Shift


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

    def __init__(self, specs: Sequence[CacheSpec], n_streams: int):
        self.specs = tuple(specs)
        self.n_streams = n_streams
        self.arenas = tuple(tuple(Arena(spec.size) for _ in range(n_streams)) for spec in specs)
        """Indexed by group, then by stream."""
        self.attended: set[int] = set()
        """Spans (llama.cpp's ``n_kv``) of the last step's micro-batches in all groups."""
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

    def copy_between_streams(self, group: int, src: int, dst: int) -> None:
        """Copy a whole sequence to the same cells of another stream (``seq_cp`` between streams), which is emptied."""
        source, target = self.arenas[group][self.stream_of(src)], self.arenas[group][self.stream_of(dst)]
        cells, positions = source.cells_of(src)
        target.clear()
        target.free.take_cells(cells)
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
