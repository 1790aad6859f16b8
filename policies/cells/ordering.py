"""In which order runs of cells can be moved, so that none overwrites what another has yet to read; and what moves in an
order come to."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.cells.free_extents import runs_of
from policies.vocabulary import NO_MOVES, IntArray, Moves

_SHORT = 24
"""Runs up to this many cells are looked at cell by cell: most are, and arrays take longer for so few."""


def in_safe_order(source: IntArray, size: int) -> Moves:
    """Moves that bring cell ``source[i]`` to ``i`` for all i, in an order that overwrites nothing still needed."""
    target = (source != np.arange(len(source))).nonzero()[0]
    if len(target) == 0:
        return NO_MOVES
    packed, source = len(source), source[target]
    breaks = ((source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)).nonzero()[0] + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(starts, append=len(source))
    moves = Moves(source[starts], target[starts], lengths)
    of_run = np.arange(len(lengths)).repeat(lengths)
    reader = np.full(max(int(source.max()) + 1, packed), -1)
    reader[source] = of_run
    readers = reader[target]
    waits = (readers >= 0) & (readers != of_run)
    if not waits.any():
        return moves
    return _Ordering(moves, source, target, packed, size, waits, readers < 0).solve()


def carry(plan: Moves, arrays: Iterable[tuple[NDArray[Any] | None, int]]) -> None:
    """Carry out the moves on each of some arrays; what is left behind becomes the value beside it."""
    at_once = together(plan)
    for held, empty in arrays:
        if held is None:
            continue
        if at_once is None:
            plan.carry(held, empty)
        else:
            read, src, dst = at_once
            moved = held[src]
            held[read] = empty
            held[dst] = moved


def together(plan: Moves) -> tuple[IntArray, IntArray, IntArray] | None:
    """What a plan comes to when all is moved together: the cells that are read, and where the tokens that stay where
    they were moved to came from, and lie now. None where it reads what it has left behind."""
    n, runs = plan.n_cells, plan.n_runs
    run = np.repeat(np.arange(runs), plan.length)
    inside = np.arange(n) - np.repeat(np.cumsum(plan.length) - plan.length, plan.length)
    src, dst = plan.src[run] + inside, plan.dst[run] + inside
    read = np.full(int(max(src.max(), dst.max())) + 1, -1)
    read[src] = run
    if int(np.count_nonzero(read >= 0)) == n and not (read[dst] > run).any():
        return src, src, dst
    # Some are moved twice: by way of a cell that is written, and then read.
    written = dst * runs + run
    order = np.argsort(written)
    written = written[order]
    before = np.searchsorted(written, src * runs + run) - 1
    via = order[before]
    again = (before >= 0) & (dst[via] == src)
    origin = src.copy()
    for _ in range(runs):
        came = np.where(again, origin[via], src)
        if (came == origin).all():
            break
        origin = came
    last = np.append(dst[order][1:] != dst[order][:-1], True)
    stays = order[last]
    stays = stays[run[stays] >= read[dst[stays]]]
    if len(np.unique(origin[stays])) < len(stays):
        return None
    return src, origin[stays], dst[stays]


class _Ordering:
    """Runs become ready when none of their target cells is still to be read by another run."""

    def __init__(
        self,
        moves: Moves,
        source: IntArray,
        target: IntArray,
        packed: int,
        size: int,
        waits: NDArray[np.bool_],
        clear: NDArray[np.bool_],
    ):
        """``source`` and ``target``: those of all ``moves``, cell by cell; ``waits``: which targets another run has yet
        to read; ``clear``: which nobody has to. The first ``packed`` cells are used in the end."""
        self._packed = packed
        self._size = size
        self._reader = array("q")
        """Of each cell, as far as they are known: the run that has yet to read it, or -1."""
        self._writer = array("q")
        """The same: the run that has yet to write it, or -1."""
        lengths = moves.length
        self._runs: list[tuple[int, int, int]] = list(
            zip(moves.src.tolist(), moves.dst.tolist(), lengths.tolist(), strict=True)
        )
        """Source, target and length of each."""
        of_run = np.repeat(np.arange(len(lengths)), lengths)
        # Cells beyond these nobody reads or writes, unless a run is set aside there, which seldom needs more.
        self._know(min(size, max(int(source.max()) + 1, packed) + int(lengths.max())))
        self._readers[source] = of_run
        self._writers[target] = of_run
        self._blocking: list[int] = np.bincount(of_run[waits], minlength=len(lengths)).tolist()
        """Of each run: target cells that others have yet to read."""
        free = np.bincount(of_run[clear], minlength=len(lengths)).tolist()
        self._partly = [i for i, blocking in enumerate(self._blocking) if blocking and free[i]]
        """A heap of at least all runs that can be split: some of their target cells are clear, others are not."""
        self._left = [True] * len(lengths)
        self._n_left = len(lengths)
        self._by_length: list[tuple[int, int]] | None = None
        """A heap of at least all runs that are left, by their length; made when it is first needed."""
        self._done: list[tuple[int, int, int]] = []

    def solve(self) -> Moves:
        """Emit ready runs until all are done; where none is ready, split one or set one aside."""
        ready = deque(i for i, blocking in enumerate(self._blocking) if blocking == 0)
        runs, done, left, blocking, partly = self._runs, self._done, self._left, self._blocking, self._partly
        while self._n_left:
            reader, writer, writers = self._reader, self._writer, self._writers
            before = len(done)
            while ready:
                i = ready.popleft()
                src, dst, n = run = runs[i]
                done.append(run)
                left[i] = False
                if n == 1:
                    writer[dst] = reader[src] = -1
                    other = writer[src]
                    if other >= 0:
                        blocking[other] = blocked = blocking[other] - 1
                        if blocked == 0:
                            ready.append(other)
                        elif runs[other][2] > 1:
                            heappush(partly, other)
                else:
                    writers[dst : dst + n] = -1
                    self._read(src, n, i, ready)
            self._n_left -= len(done) - before
            if self._n_left and not self._split(ready):
                if self._packed == self._size:
                    return NO_MOVES  # A full cache in cycles: no cell to turn round in, and no space to win.
                self._set_aside(ready)
        return Moves.from_runs(done)

    def _know(self, cells: int) -> None:
        """Keep readers and writers of the first so many cells."""
        more = array("q", (-1,)) * (cells - len(self._reader))
        self._reader, self._writer = self._reader + more, self._writer + more
        # The same memory: single cells are looked at through the arrays of the standard library, many through NumPy.
        self._readers, self._writers = np.asarray(self._reader), np.asarray(self._writer)

    def _read(self, src: int, n: int, i: int, ready: deque[int]) -> None:
        """Run ``i`` has read these cells: whoever waits to write them is blocked by fewer."""
        if n == 1:
            self._reader[src] = -1
            other = self._writer[src]
            if other >= 0 and other != i:
                self._unblock(other, 1, ready)
            return
        self._readers[src : src + n] = -1
        if n <= _SHORT:
            counts: dict[int, int] = {}
            for other in self._writer[src : src + n]:
                counts[other] = counts.get(other, 0) + 1
            found = sorted(counts.items()) if len(counts) > 1 else list(counts.items())
        else:
            waiting = np.sort(self._writers[src : src + n])
            first = np.concatenate(([0], np.flatnonzero(waiting[1:] != waiting[:-1]) + 1))
            found = list(zip(waiting[first].tolist(), np.diff(first, append=n).tolist(), strict=True))
        for other, cells in found:
            if other >= 0 and other != i:
                self._unblock(other, cells, ready)

    def _unblock(self, run: int, cells: int, ready: deque[int]) -> None:
        blocking = self._blocking[run] = self._blocking[run] - cells
        if blocking == 0:
            ready.append(run)
        elif self._runs[run][2] > 1:
            heappush(self._partly, run)

    def _blocked_cells(self, i: int) -> int:
        _, dst, n = self._runs[i]
        if n <= _SHORT:
            readers = self._reader[dst : dst + n]
            return n - readers.count(-1) - readers.count(i)
        cells = self._readers[dst : dst + n]
        return int(np.count_nonzero((cells >= 0) & (cells != i)))

    def _partly_clear(self, i: int) -> bool:
        _, dst, n = self._runs[i]
        if n == 1 or self._blocking[i] == 0:
            return False
        if n <= _SHORT:
            return -1 in self._reader[dst : dst + n]
        return bool((self._readers[dst : dst + n] < 0).any())

    def _split(self, ready: deque[int]) -> bool:
        """Cut some run where part of its target is clear; False if there is none: only cycles are left."""
        partly, left, runs, blocking, reader = self._partly, self._left, self._runs, self._blocking, self._reader
        while partly:
            i = heappop(partly)
            if not left[i] or not blocking[i]:
                continue
            _, dst, n = runs[i]
            if n == 1:
                continue
            if n <= _SHORT:
                readers = reader[dst : dst + n]
                if -1 not in readers:
                    continue
                before = readers[0]
                edges = [0]
                for k, now in enumerate(readers):
                    if now != before:
                        if (now < 0) != (before < 0):
                            edges.append(k)
                        before = now
            else:
                clear = self._readers[dst : dst + n] < 0
                if not clear.any():
                    continue
                edges = [0, *((clear[1:] != clear[:-1]).nonzero()[0] + 1).tolist()]
            edges.append(n)
            self._cut(i, edges, reader[dst] < 0, ready)
            return True
        return False

    def _cut(self, i: int, edges: list[int], clear: bool, ready: deque[int]) -> None:
        """Make run ``i`` several, one between each two edges, the first of which keeps its number; ``clear``: whether
        the target of the first is, and thus of every other one."""
        runs, reader, writer, blocking = self._runs, self._reader, self._writer, self._blocking
        src, dst, _ = runs[i]
        more = len(edges) - 2
        first = len(runs) - 1
        runs[i] = (src, dst, edges[1])
        for a, b in pairwise(edges[1:]):
            part = len(runs)
            runs.append((src + a, dst + a, b - a))
            if b - a == 1:
                reader[src + a] = writer[dst + a] = part
            else:
                self._readers[src + a : src + b] = part
                self._writers[dst + a : dst + b] = part
        blocking += [0] * more
        self._left += [True] * more
        self._n_left += more
        if self._by_length is not None:
            for part in (i, *range(first + 1, len(runs))):
                heappush(self._by_length, (runs[part][2], part))
        for k in range(more + 1):
            # Counted only when all are known: a run does not block itself, but its parts one another.
            part = first + k if k else i
            if clear:
                blocked = 0
            else:
                _, to, n = runs[part]
                if n == 1:
                    blocked = int(reader[to] != part)
                elif n <= _SHORT:
                    blocked = n - reader[to : to + n].count(part)
                else:
                    blocked = int(np.count_nonzero(self._readers[to : to + n] != part))
            blocking[part] = blocked
            if blocked == 0:
                ready.append(part)
            clear = not clear

    def _set_aside(self, ready: deque[int]) -> None:
        """Break a cycle: copy the shortest run (or as much as fits) beyond the packed cells, to be brought back."""
        starts, ends = runs_of(np.flatnonzero(self._readers[self._packed :] < 0) + self._packed)
        known = len(self._reader)
        if len(ends) and ends[-1] == known:
            ends[-1] = self._size
        elif known < self._size:
            starts, ends = np.append(starts, known), np.append(ends, self._size)
        widest = int((ends - starts).argmax())
        aside, room = int(starts[widest]), int(ends[widest] - starts[widest])
        if self._by_length is None:
            self._by_length = [(run[2], i) for i, run in enumerate(self._runs) if self._left[i]]
            heapify(self._by_length)
        while not self._left[(shortest := self._by_length[0])[1]] or self._runs[shortest[1]][2] != shortest[0]:
            heappop(self._by_length)
        i = shortest[1]
        src, dst, n = self._runs[i]
        part = min(n, room)
        if aside + part > known:
            self._know(aside + part)
        for run in [] if part == n else [self._replace(i, False, (src + part, dst + part, n - part))]:
            self._blocking[run] = self._blocked_cells(run)
            if self._partly_clear(run):
                heappush(self._partly, run)
        self._done.append((src, aside, part))
        self._replace(i, True, (aside, dst, part))
        self._blocking[i] = self._blocked_cells(i)
        if self._partly_clear(i):
            heappush(self._partly, i)
        self._read(src, part, i, ready)

    def _replace(self, i: int, reuse: bool, run: tuple[int, int, int]) -> int:
        """Run ``i``, or a new one, becomes ``run``; its number. What blocks it is for the caller to count."""
        if reuse:
            self._runs[i] = run
        else:
            i = len(self._runs)
            self._runs.append(run)
            self._blocking.append(0)
            self._left.append(True)
            self._n_left += 1
        src, dst, n = run
        if n == 1:
            self._reader[src] = self._writer[dst] = i
        else:
            self._readers[src : src + n] = i
            self._writers[dst : dst + n] = i
        if self._by_length is not None:
            heappush(self._by_length, (n, i))
        return i
