"""One arena for all sequences, contiguous slots from a moving head: the cache of llama.cpp until mid-2025."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from policies.arena import FOREVER, Arena
from policies.compactors import Compactor
from policies.leap import Leap, Usages
from policies.policy import CacheConfig, Kernel, Policy
from policies.reads import padded_span, reads_of
from policies.search import find_run, start_of_search
from policies.stretch import Stretch
from policies.triggers import Facts, Trigger
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    Usage,
    View,
    split,
)

Find = Callable[[Arena, Sequence[Chunk]], IntArray | None]
"""Cells for the tokens of a micro-batch, shape (n_tokens,), or None; may move the arena's head."""

_IDLE_RUNS = 8
"""Runs moved in one slice of idle compaction."""


def contiguous(arena: Arena, chunks: Sequence[Chunk]) -> IntArray | None:
    """One run of cells for the whole micro-batch; a search that fails leaves the head where it stopped."""
    n = sum(chunk.n for chunk in chunks)
    first, arena.head = find_run(arena.free, start_of_search(arena.head, arena.used, n), n)
    return None if first is None else np.arange(first, first + n)


class _Asked(Exception):
    """The trigger wants to see a plan: what follows is a decision."""


def _quiet(trigger: Trigger, facts: Sequence[Facts], steps: int) -> int:
    """For how many steps the trigger stays quiet, asked before each and after it; ``facts`` are those now, and after
    each step. Without facts it is not asked."""

    def plan() -> Moves:
        raise _Asked

    for i, (before, after) in enumerate(pairwise(facts[: steps + 1])):
        try:
            if trigger.before(before, plan) or trigger.after(after):
                return i
        except _Asked:
            return i
    return steps


class UnifiedPolicy(Policy):
    """An arena, a search, and a compactor with its trigger. The bookkeeping is that of llama.cpp b4666 to b4880.

    ``anywhere``: the search takes any free cells, so that all of them can be had at once.
    ``keeps_partial``: when a later micro-batch of a step finds no room, keep what earlier ones took, as llama.cpp
    did; otherwise take it all back.
    """

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        *,
        find: Find = contiguous,
        anywhere: bool = False,
        compactor: Compactor | None = None,
        trigger: Trigger | None = None,
        kernel: Kernel = "masked",
        keeps_partial: bool = False,
    ):
        self.name = name
        self.capacity = config.cells
        self.groups = (Group(config.cells),)
        self.kernel = config.kernel or kernel
        self.arena = Arena(config.cells)
        self.trigger = trigger or Trigger()
        self.wants_compaction = False
        """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
        self.attended = 0
        """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
        self._compactor = compactor
        self._find = find
        self._anywhere = anywhere
        self._keeps_partial = keeps_partial
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._planned: list[tuple[int, int, int]] = []
        """What is left of a plan for idle compaction; empty when the state has changed since."""

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step micro-batch by micro-batch, compacting where the trigger says so."""
        arena, head = self.arena, self.arena.head
        self._planned = []
        tokens = sum(chunk.n for chunk in step)
        if self._compactor is not None and self.trigger.before(self._facts(tokens), self._plan):
            self.wants_compaction = True
        done: list[MicroBatch] = []
        for chunks in split(step, self._n_ubatch):
            self.update()
            cells = self._find(arena, chunks)
            if cells is None and self.trigger.on_failure and self.compact().n_runs:
                cells = self._find(arena, chunks)
            if cells is None:
                n = sum(chunk.n for chunk in chunks)
                reason = f"no room for {n} tokens: {arena.free.total} of {arena.size} cells are free"
                if not self._keeps_partial and done:
                    self._take_back(done)
                    arena.head, done = head, []
                raise NoSlot(reason, done)
            self._take(chunks, cells)
            done.append(self._micro_batch(chunks, cells, views))
        if self._compactor is not None and self.trigger.after(self._facts(tokens)):
            self.wants_compaction = True
        return tuple(done)

    def extend(self, step: Sequence[Chunk], n: int) -> Leap | None:
        """Along the free run that the next search begins in, as long as the trigger stays quiet."""
        arena = self.arena
        if self._find is not contiguous or self.kernel != "masked" or self.wants_compaction or arena.owes:
            return None
        stretch = Stretch(arena, step, n if len(step) <= self._n_ubatch else 0, self._pad)
        facts = stretch.facts() if self._compactor is not None else []

        def take(k: int, look: bool) -> Usages | None:
            _quiet(self.trigger, facts, k)
            usages = stretch.take(k, anywhere=self._anywhere, look=look)
            stop = stretch.first + k * len(step)
            arena.head = stop if stop < arena.size else 0
            self.attended, self._planned = int(stretch.spans[k]), []
            return usages

        return stretch.leap(_quiet(copy.copy(self.trigger), facts, stretch.steps), take)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells; the next search begins at the first of them if that lies lower."""
        gone = self.arena.remove(seq, start, FOREVER if stop is None else stop)
        self._lower_head(gone)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the cells; the next search begins at 0."""
        self._planned = []
        self.arena.share(src, dst, start, FOREVER if stop is None else stop)
        self.arena.head = 0

    def keep(self, seq: int) -> None:
        """Empty all other cells; the next search begins at the first empty one if that lies lower."""
        self.arena.keep(seq)
        first = self.arena.free.starts[:1]
        self._lower_head(np.array(first, dtype=np.int64))

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions and remember to rotate the keys."""
        stop = FOREVER if stop is None else stop
        if start == stop:
            return
        _, gone = self.arena.shift(seq, start, stop, delta)
        self._planned = []
        self.arena.head = int(gone[0]) if len(gone) else 0

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide positions ``[start, stop)`` (llama.cpp's ``seq_div``, for self-extend)."""
        stop = FOREVER if stop is None else stop
        if start == stop or divisor == 1:
            return
        self.arena.divide(seq, start, stop, divisor)

    def clear(self) -> None:
        """Empty everything."""
        self.arena.clear()
        self._planned = []

    def update(self) -> None:
        """Compact if that is due (llama.cpp's ``llama_kv_self_update``, whose rotations the arena keeps)."""
        if self.wants_compaction:
            self.wants_compaction = False
            self.compact()

    def compact(self) -> Moves:
        """Carry out the compactor's plan at once."""
        self._planned = []
        moves = self._plan()
        if moves.n_runs:
            self.arena.compact(moves)
            self.arena.head = self.arena.used
        return moves

    def idle(self) -> Moves:
        """The next few runs of a plan; planned anew only when the state has changed."""
        if self._compactor is None or not self.trigger.when_idle:
            return NO_MOVES
        if not self._planned:
            plan = self._plan()
            self._planned = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True))
        now, self._planned = self._planned[:_IDLE_RUNS], self._planned[_IDLE_RUNS:]
        moves = Moves.from_runs(now) if now else NO_MOVES
        if moves.n_runs:
            self.arena.compact(moves)
            self.arena.head = min(self.arena.head, self.arena.free.starts[0])
        return self.arena.settle_moves()

    def keeps(self, seq: int, n: int) -> int:
        """Any beginning of a sequence can be kept."""
        return n

    def sequences(self) -> list[int]:
        """Read off the arena."""
        return self.arena.sequences()

    def usage(self) -> Usage:
        """Read off the free runs."""
        arena, free = self.arena, self.arena.free
        largest = free.largest
        placeable = free.total if self._anywhere else largest
        return Usage(arena.size, arena.used, arena.used, placeable, len(free), largest, arena.top)

    def occupancy(self, group: int = 0) -> CellMap:
        """Read off the arena."""
        return self.arena.cell_map()

    def _facts(self, tokens: int) -> Facts:
        arena = self.arena
        span = padded_span(arena.top, self._pad, arena.size)
        return Facts(arena.used, arena.top, span, self._pad, tokens, arena.above)

    def _plan(self) -> Moves:
        return NO_MOVES if self._compactor is None else self._compactor(self.arena)

    def _take(self, chunks: Sequence[Chunk], cells: IntArray) -> None:
        arena = self.arena
        arena.free.take_cells(cells)
        at = 0
        for chunk in chunks:
            arena.put(cells[at : at + chunk.n], chunk.seqs, chunk.start)
            at += chunk.n
        end = int(cells[-1]) + 1
        arena.head = end if end < arena.size else 0

    def _take_back(self, done: Sequence[MicroBatch]) -> None:
        for batch in done:
            for chunk in batch.chunks:
                for seq in chunk.seqs:
                    self.arena.remove(seq, chunk.start, chunk.start + chunk.n)
        self.arena.unsettle([(batch.places[0].moves, batch.places[0].shift) for batch in done])

    def _micro_batch(self, chunks: tuple[Chunk, ...], cells: IntArray, views: bool) -> MicroBatch:
        arena = self.arena
        moves, shift = arena.settle()
        self.attended = padded_span(arena.top, self._pad, arena.size)
        reads = reads_of(self.kernel, chunks, lambda seq: arena.cells_of(seq)[0], self.attended)
        seen = tuple(View(*arena.cells_of(chunk.seq)) for chunk in chunks) if views else ()
        return MicroBatch(chunks, (Place(cells, reads, moves, shift, seen),))

    def _lower_head(self, freed: Iterable[int]) -> None:
        self._planned = []
        for cell in freed:
            self.arena.head = min(self.arena.head, int(cell))
            return
