"""Compactors: which moves tidy an arena. A compactor plans; ``Arena.apply`` and the engine carry the moves out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from policies.arena import Arena
from policies.free_runs import runs_of
from policies.vocabulary import NO_MOVES, IntArray, Moves

Compactor = Callable[[Arena], Moves]
"""Plans moves; leaves the arena as it is."""


def fill_holes(arena: Arena, most_runs: int) -> Moves:
    """llama.cpp's defragmentation: cells from the end fill the holes below, as they come.

    ``llama_kv_cache_defrag_internal`` / ``build_defrag`` (b1618 to b6244). Each hole below the ``used``-th cell is
    filled by the last cells that have not been moved, in order; the pass ends when ``most_runs`` runs have been
    moved. Nothing is sorted: sequences end up scattered.
    """
    used = arena.used
    moving = np.flatnonzero(arena.owner[used : arena.top]) + used
    end, moves = len(moving), list[tuple[int, int, int]]()
    for start, stop in arena.free:
        hole = min(stop, used) - start
        if hole <= 0 or len(moves) == most_runs:
            break
        starts, ends = runs_of(moving[end - hole : end])
        for src, src_end in zip(starts.tolist(), ends.tolist(), strict=True):
            if len(moves) == most_runs:
                break
            moves.append((src, start, src_end - src))
            start += src_end - src
        end -= hole
    return Moves.from_runs(moves) if moves else NO_MOVES


def pack(arena: Arena) -> Moves:
    """Everything at the low end, each sequence contiguous and in order of position.

    The layout that llama.cpp issue 13497 asks for. Cells that several sequences share are packed once, as a
    sequence of their own. Of the orders in which the sequences could lie, those by first cell, by middle cell, by the
    offset that would leave most of them in place, and the first with gaps filled by sequences from the end are tried,
    and the one that moves fewest cells is taken;
    every cell is moved once at most, but for cycles, of which one run is moved aside first.
    """
    top = arena.top
    cells = np.flatnonzero(arena.owner[:top])
    if len(cells) == 0:
        return NO_MOVES
    owner, position = arena.owner[cells], arena.position[cells]
    order = np.lexsort((position, owner))
    bounds = np.flatnonzero(np.diff(owner[order])) + 1
    sequences = np.split(cells[order], bounds)
    best: IntArray | None = None
    fewest = len(cells) + 1
    orders = [sorted(sequences, key=rank) for rank in (_first_cell, _middle_cell, _best_offset)]
    for ordered in (*orders, _filling_gaps(orders[0])):
        source = np.concatenate(ordered)
        moved = int(np.count_nonzero(source != np.arange(len(source))))
        if moved < fewest:
            best, fewest = source, moved
    assert best is not None
    return _order(best, arena.size) if fewest else NO_MOVES


def _first_cell(sequence: IntArray) -> float:
    return float(sequence.min())


def _middle_cell(sequence: IntArray) -> float:
    return float(np.median(sequence))


def _best_offset(sequence: IntArray) -> float:
    offsets, counts = np.unique(sequence - np.arange(len(sequence)), return_counts=True)
    return float(offsets[counts.argmax()])


def _filling_gaps(sequences: Sequence[IntArray]) -> list[IntArray]:
    """By first cell, but where there is a gap before the next sequence, the last that fits goes there first."""
    left, ordered, at = deque(sequences), list[IntArray](), 0
    while left:
        gap = int(left[0].min()) - at
        fits = next((i for i in range(len(left) - 1, 0, -1) if len(left[i]) <= gap), 0)
        ordered.append(left[fits])
        del left[fits]
        at += len(ordered[-1])
    return ordered


def _order(source: IntArray, size: int) -> Moves:
    """Moves that bring cell ``source[i]`` to ``i`` for all i, in an order that overwrites nothing still needed."""
    target = np.arange(len(source))
    wrong = source != target
    return _Ordering(_runs(source[wrong], target[wrong]), len(source), size).solve()


class _Ordering:
    """Runs become ready when none of their target cells is still to be read by another run."""

    def __init__(self, runs: list[tuple[int, int, int]], packed: int, size: int):
        self._runs = runs
        self._packed = packed
        self._size = size
        self._reader: IntArray = np.full(size, -1, dtype=np.int64)
        """Of each cell: the run that has yet to read it."""
        self._writer: IntArray = np.full(size, -1, dtype=np.int64)
        """Of each cell: the run that has yet to write it."""
        for i, (src, dst, n) in enumerate(runs):
            self._reader[src : src + n] = i
            self._writer[dst : dst + n] = i
        self._blocking = [self._blocked_cells(i) for i in range(len(runs))]
        self._left = set(range(len(runs)))
        self._partly = [i for i in range(len(runs)) if self._partly_clear(i)]
        """A heap of at least all runs that can be split: some of their target cells are clear, others are not."""
        self._by_length = [(n, i) for i, (_, _, n) in enumerate(runs)]
        """A heap of at least all runs that are left, by their length."""
        heapify(self._by_length)
        self._done: list[tuple[int, int, int]] = []

    def solve(self) -> Moves:
        """Emit ready runs until all are done; where none is ready, split one or set one aside."""
        ready = deque(i for i, blocking in enumerate(self._blocking) if blocking == 0)
        while self._left:
            while ready:
                self._emit(ready.popleft(), ready)
            if self._left and not self._split(ready):
                if self._packed == self._size:
                    return NO_MOVES  # A full cache in cycles: no cell to turn round in, and no space to win.
                self._set_aside(ready)
        return Moves.from_runs(self._done)

    def _blocked_cells(self, i: int) -> int:
        _, dst, n = self._runs[i]
        readers = self._reader[dst : dst + n]
        return int(np.count_nonzero((readers >= 0) & (readers != i)))

    def _emit(self, i: int, ready: deque[int]) -> None:
        src, dst, n = self._runs[i]
        self._done.append((src, dst, n))
        self._left.remove(i)
        self._writer[dst : dst + n] = -1
        self._read(src, n, i, ready)

    def _read(self, src: int, n: int, i: int, ready: deque[int]) -> None:
        """Run ``i`` has read these cells: whoever waits to write them is blocked by fewer."""
        self._reader[src : src + n] = -1
        waiting = self._writer[src : src + n]
        for other, cells in zip(*np.unique(waiting[waiting >= 0], return_counts=True), strict=True):
            if other != i:
                self._blocking[other] -= int(cells)
                if self._blocking[other] == 0:
                    ready.append(int(other))
                elif self._runs[other][2] > 1:
                    heappush(self._partly, int(other))

    def _partly_clear(self, i: int) -> bool:
        _, dst, n = self._runs[i]
        return n > 1 and self._blocking[i] > 0 and bool((self._reader[dst : dst + n] < 0).any())

    def _split(self, ready: deque[int]) -> bool:
        """Cut some run where part of its target is clear; False if there is none: only cycles are left."""
        while self._partly:
            i = heappop(self._partly)
            if i not in self._left or not self._partly_clear(i):
                continue
            src, dst, n = self._runs[i]
            clear = self._reader[dst : dst + n] < 0
            edges = [0, *(np.flatnonzero(np.diff(clear)) + 1).tolist(), n]
            parts = [self._replace(i, k == 0, (src + a, dst + a, b - a)) for k, (a, b) in enumerate(pairwise(edges))]
            for part in parts:
                # Counted again now that all are known: a run does not block itself, but its parts one another.
                self._blocking[part] = self._blocked_cells(part)
                if self._blocking[part] == 0:
                    ready.append(part)
                elif self._partly_clear(part):
                    heappush(self._partly, part)
            return True
        return False

    def _set_aside(self, ready: deque[int]) -> None:
        """Break a cycle: copy the shortest run (or as much as fits) beyond the packed cells, to be brought back."""
        starts, ends = runs_of(np.flatnonzero(self._reader[self._packed :] < 0) + self._packed)
        widest = int((ends - starts).argmax())
        aside, room = int(starts[widest]), int(ends[widest] - starts[widest])
        while (shortest := self._by_length[0])[1] not in self._left or self._runs[shortest[1]][2] != shortest[0]:
            heappop(self._by_length)
        i = shortest[1]
        src, dst, n = self._runs[i]
        part = min(n, room)
        if part < n:
            self._replace(i, False, (src + part, dst + part, n - part))
        self._done.append((src, aside, part))
        self._replace(i, True, (aside, dst, part))
        self._read(src, part, i, ready)

    def _replace(self, i: int, reuse: bool, run: tuple[int, int, int]) -> int:
        """Run ``i``, or a new one, becomes ``run``; its number."""
        if reuse:
            self._runs[i] = run
        else:
            i = len(self._runs)
            self._runs.append(run)
            self._blocking.append(0)
            self._left.add(i)
        src, dst, n = run
        self._reader[src : src + n] = i
        self._writer[dst : dst + n] = i
        self._blocking[i] = self._blocked_cells(i)
        heappush(self._by_length, (n, i))
        if self._partly_clear(i):
            heappush(self._partly, i)
        return i


def _runs(source: IntArray, target: IntArray) -> list[tuple[int, int, int]]:
    """Pairs of cells as runs in which both rise by one."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    return list(zip(source[starts].tolist(), target[starts].tolist(), lengths.tolist(), strict=True))
