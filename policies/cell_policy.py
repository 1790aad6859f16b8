"""Policies that place single cells in one arena, as llama.cpp does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.arena import FOREVER, Arena
from policies.contiguous import find_run
from policies.free_runs import runs_of
from policies.policy import CacheConfig, Kernel, Policy
from policies.reads import gather_reads, masked_reads, padded_span
from policies.vocabulary import CellMap, Chunk, IntArray, MicroBatch, NoSlot, Reads, Usage, View, split


class CellPolicy(Policy):
    """One arena; each micro-batch takes a contiguous run of cells; nothing is ever moved."""

    def __init__(self, name: str, config: CacheConfig, kernel: Kernel):
        self.name = name
        self.capacity = self.arena_cells = config.cells
        self.kernel = config.kernel or kernel
        self.arena = Arena(config.cells)
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step micro-batch by micro-batch; if one finds no slot, take all of them back."""
        arena = self.arena
        head = arena.head
        done: list[MicroBatch] = []
        for chunks in split(step, self._n_ubatch):
            n = sum(chunk.n for chunk in chunks)
            first = find_run(arena, n)
            if first is None:
                self._take_back(done, head)
                raise NoSlot(f"no run of {n} free cells among {arena.free.total} free of {arena.size}")
            cells = np.arange(first, first + n)
            self._take(chunks, cells)
            reads = self._reads(chunks)
            done.append(MicroBatch(chunks, cells, reads, views=self._views(chunks) if views else ()))
        return tuple(done)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells; the next search begins at the first of them if that lies lower."""
        gone = self.arena.remove(seq, start, FOREVER if stop is None else stop)
        if len(gone):
            self.arena.head = min(self.arena.head, int(gone[0]))

    def usage(self) -> Usage:
        """Read off the free runs."""
        arena, free = self.arena, self.arena.free
        largest = free.largest
        return Usage(arena.size, arena.used, arena.used, largest, len(free), largest, arena.top)

    def occupancy(self) -> CellMap:
        """Read off the arena."""
        return self.arena.cell_map()

    def _take(self, chunks: Sequence[Chunk], cells: IntArray) -> None:
        first, n = int(cells[0]), len(cells)
        self.arena.free.take(first, n)
        at = 0
        for chunk in chunks:
            self.arena.put(cells[at : at + chunk.n], (chunk.seq,), chunk.start)
            at += chunk.n
        self.arena.head = first + n if first + n < self.arena.size else 0

    def _take_back(self, done: Sequence[MicroBatch], head: int) -> None:
        for batch in done:
            for chunk in batch.chunks:
                self.arena.remove(chunk.seq, chunk.start, chunk.start + chunk.n)
        self.arena.head = head

    def _reads(self, chunks: Sequence[Chunk]) -> Reads:
        if self.kernel == "masked":
            return masked_reads(chunks, padded_span(self.arena.top, self._pad, self.arena.size))
        pieces = [len(runs_of(np.sort(self.arena.cells_of(chunk.seq)[0]))[0]) for chunk in chunks]
        return gather_reads(chunks, np.array(pieces, dtype=np.int64))

    def _views(self, chunks: Sequence[Chunk]) -> tuple[View, ...]:
        return tuple(View(*self.arena.cells_of(chunk.seq)) for chunk in chunks)
