"""The order in which runs of cells can be moved so that none overwrites what a later one still reads.

Also the opposite: what a sequence of ordered moves amounts to if all cells move together.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.cells.free_extents import extents_of_cells
from policies.vocabulary import NO_MOVES, IntArray, Moves

_SHORT = 24
"""Runs of up to this many cells, as most are, are handled cell by cell: arrays take longer for so few."""


def in_safe_order(source: IntArray, size: int) -> Moves:
    """Moves that bring cell ``source[i]`` to cell ``i`` for all i, in an order that overwrites nothing still needed.

    No moves where that would need a free cell and all ``size`` cells are used.
    """
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
    """Carry out the moves on several arrays; cells that are left become the value given with each array."""
    net = net_moves(plan)
    for held, empty in arrays:
        if held is None:
            continue
        if net is None:
            plan.carry(held, empty)
        else:
            read, src, dst = net
            moved = held[src]
            held[read] = empty
            held[dst] = moved


def net_moves(plan: Moves) -> tuple[IntArray, IntArray, IntArray] | None:
    """What a plan amounts to if all cells move together: the cells read, and the net sources and targets.

    Three arrays: all cells that are read, and for each token that ends up in a new cell its old cell and its new one.
    None if the plan reads a cell that it has left.
    """
    n, runs = plan.n_cells, plan.n_runs
    run = np.repeat(np.arange(runs), plan.length)
    inside = np.arange(n) - np.repeat(np.cumsum(plan.length) - plan.length, plan.length)
    src, dst = plan.src[run] + inside, plan.dst[run] + inside
    read = np.full(int(max(src.max(), dst.max())) + 1, -1)
    read[src] = run
    if int(np.count_nonzero(read >= 0)) == n and not (read[dst] > run).any():
        return src, src, dst
    # Some tokens are moved twice: their first target is read again later.
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
    """Orders runs: one is ready when no other run has yet to read one of its target cells."""

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
        """``source`` and ``target`` are those of ``moves``, cell by cell.

        ``waits``: targets that another run has yet to read. ``clear``: targets that no run reads. The first ``packed``
        cells are used in the end.
        """
        self._packed = packed
        self._size = size
        self._reader = array("q")
        """For each tracked cell the run that has yet to read it, or -1."""
        self._writer = array("q")
        """For each tracked cell the run that has yet to write it, or -1."""
        lengths = moves.length
        self._runs: list[tuple[int, int, int]] = list(
            zip(moves.src.tolist(), moves.dst.tolist(), lengths.tolist(), strict=True)
        )
        """Source, target and length of each run."""
        of_run = np.repeat(np.arange(len(lengths)), lengths)
        # Cells beyond these are used only if a run is set aside there, which seldom needs more.
        self._track(min(size, max(int(source.max()) + 1, packed) + int(lengths.max())))
        self._readers[source] = of_run
        self._writers[target] = of_run
        self._blocking: list[int] = np.bincount(of_run[waits], minlength=len(lengths)).tolist()
        """For each run the number of its target cells that other runs have yet to read."""
        free = np.bincount(of_run[clear], minlength=len(lengths)).tolist()
        self._splittable = [i for i, blocking in enumerate(self._blocking) if blocking and free[i]]
        """A heap with all runs that can be split, some of whose target cells are clear, and maybe others."""
        self._left = [True] * len(lengths)
        self._n_left = len(lengths)
        self._by_length: list[tuple[int, int]] | None = None
        """A heap with all runs that are left, shortest first, and maybe others; made when it is first needed."""
        self._done: list[tuple[int, int, int]] = []

    def solve(self) -> Moves:
        """Emit ready runs until all are done; where none is ready, split one or set one aside."""
        ready = deque(i for i, blocking in enumerate(self._blocking) if blocking == 0)
        runs, done, left, blocking, splittable = self._runs, self._done, self._left, self._blocking, self._splittable
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
                            heappush(splittable, other)
                else:
                    writers[dst : dst + n] = -1
                    self._read(src, n, i, ready)
            self._n_left -= len(done) - before
            if self._n_left and not self._split(ready):
                if self._packed == self._size:
                    return NO_MOVES  # A full cache in cycles: no cell to set a run aside in, and nothing to gain.
                self._set_aside(ready)
        return Moves.from_runs(done)

    def _track(self, cells: int) -> None:
        """Keep track of the readers and writers of the first ``cells`` cells."""
        more = array("q", (-1,)) * (cells - len(self._reader))
        self._reader, self._writer = self._reader + more, self._writer + more
        # The same memory twice: arrays of the standard library are faster for single cells, NumPy's for many.
        self._readers, self._writers = np.asarray(self._reader), np.asarray(self._writer)

    def _read(self, src: int, n: int, i: int, ready: deque[int]) -> None:
        """Note that run ``i`` has read cells ``[src, src + n)``, and unblock the runs that write them."""
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
            heappush(self._splittable, run)

    def _blocked_cells(self, i: int) -> int:
        _, dst, n = self._runs[i]
        if n <= _SHORT:
            readers = self._reader[dst : dst + n]
            return n - readers.count(-1) - readers.count(i)
        cells = self._readers[dst : dst + n]
        return int(np.count_nonzero((cells >= 0) & (cells != i)))

    def _can_split(self, i: int) -> bool:
        _, dst, n = self._runs[i]
        if n == 1 or self._blocking[i] == 0:
            return False
        if n <= _SHORT:
            return -1 in self._reader[dst : dst + n]
        return bool((self._readers[dst : dst + n] < 0).any())

    def _split(self, ready: deque[int]) -> bool:
        """Cut a run that is partly clear into clear and blocked parts; False if there is none: only cycles are left."""
        splittable, left, runs, blocking, reader = (
            self._splittable,
            self._left,
            self._runs,
            self._blocking,
            self._reader,
        )
        while splittable:
            i = heappop(splittable)
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
        """Cut run ``i`` at ``edges``; the first part keeps its number.

        ``clear``: whether the target of the first part is clear; from there on it alternates.
        """
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
            # Counted when all parts exist: a run does not block itself, but its parts block each other.
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
        """Break a cycle: copy the shortest run, or what fits of it, beyond the packed cells, to be copied back."""
        starts, ends = extents_of_cells(np.flatnonzero(self._readers[self._packed :] < 0) + self._packed)
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
            self._track(aside + part)
        for run in [] if part == n else [self._replace(i, False, (src + part, dst + part, n - part))]:
            self._blocking[run] = self._blocked_cells(run)
            if self._can_split(run):
                heappush(self._splittable, run)
        self._done.append((src, aside, part))
        self._replace(i, True, (aside, dst, part))
        self._blocking[i] = self._blocked_cells(i)
        if self._can_split(i):
            heappush(self._splittable, i)
        self._read(src, part, i, ready)

    def _replace(self, i: int, reuse: bool, run: tuple[int, int, int]) -> int:
        """Make ``run`` number ``i`` (``reuse``) or a new number; returns it. The caller counts what blocks it."""
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
