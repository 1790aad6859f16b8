"""The order in which runs of cells can be moved so that none overwrites what a later one still reads.

Also the opposite: where the tokens are after a sequence of ordered moves.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from policies.cells.free_extents import extents_of_cells
from policies.vocabulary import NO_MOVES, IntArray, Moves

_FEW_RUNS = 16
"""Up to this many runs are followed one after another."""


def in_safe_order(runs: Moves, packed: int, size: int) -> Moves:
    """The moves that ``runs`` make together, in an order that overwrites nothing still needed.

    ``runs`` share no cell that they read and none that they write, which are all below ``packed``, the number of used
    cells. No moves where the order would need a free cell and all ``size`` cells are used.
    """
    src, dst, length = runs.src, runs.dst, runs.length
    by_source = src.argsort()
    starts, lengths = src[by_source], length[by_source]
    ends = np.concatenate(([0], starts + lengths))
    upto = np.concatenate(([0], lengths.cumsum()))

    def read_below(cells: IntArray) -> IntArray:
        before = starts.searchsorted(cells)
        counts: IntArray = upto[before] - np.maximum(ends[before] - cells, 0)
        return counts

    read = read_below(dst + length) - read_below(dst)
    # A run may read cells that it writes itself.
    blocked = read - np.maximum(length - np.abs(src - dst), 0)
    if not blocked.any():
        return runs
    return _Ordering(runs, packed, size, blocked, (blocked > 0) & (read < length)).solve()


def new_cells(plan: Moves, used: NDArray[np.bool_]) -> IntArray:
    """Where the token in each cell ends up by a plan; ``used``: the cells that hold a token then, both of shape (n,).

    Undefined for cells that hold no token before.
    """
    goes = np.arange(len(used))
    if plan.n_runs > _FEW_RUNS:
        order = plan.src.argsort()
        starts = plan.src[order]
        ends = starts + plan.length[order]
        if _moves_once(plan, order, starts, ends):
            # Between two runs, and before the first and after the last, nothing moves.
            shifts = np.zeros(2 * len(order) + 1, dtype=np.int64)
            shifts[1::2] = (plan.dst - plan.src)[order]
            edges = np.zeros(2 * len(order) + 2, dtype=np.int64)
            edges[1:-1:2], edges[2:-1:2], edges[-1] = starts, ends, len(used)
            goes += np.repeat(shifts, edges[1:] - edges[:-1])
            return goes
    origin = goes.copy()
    plan.apply(origin)
    held = used.nonzero()[0]
    goes[origin[held]] = held
    return goes


def _moves_once(plan: Moves, order: IntArray, starts: IntArray, ends: IntArray) -> bool:
    """Whether no run reads what an earlier one has read or written; ``order`` is that of the cells that they read."""
    if (starts[1:] < ends[:-1]).any():
        return False
    # The runs that read what each run writes.
    first, stop = ends.searchsorted(plan.dst, side="right"), starts.searchsorted(plan.dst + plan.length)
    latest = np.maximum.reduceat(np.append(order, -1), np.stack((first, stop), axis=1).reshape(-1))[::2]
    return not ((latest > np.arange(len(order))) & (first < stop)).any()


class _Ordering:
    """Orders runs: one is ready when no other run has yet to read one of its target cells."""

    def __init__(self, moves: Moves, packed: int, size: int, blocked: IntArray, splittable: NDArray[np.bool_]):
        """``blocked``: target cells of each run that others read. ``splittable``: whether there are others as well."""
        self._packed = packed
        self._size = size
        edges = np.zeros(size + 1, dtype=np.int8)
        edges[moves.src] += 1
        edges[moves.src + moves.length] -= 1
        self._pending = bytearray(edges.cumsum(dtype=np.int8).tobytes())
        """For each cell whether a run has yet to read it, as 1 or 0."""
        firsts = np.zeros(packed, dtype=np.int8)
        firsts[moves.dst] = 1
        self._firsts = bytearray(firsts.tobytes())
        """For each cell whether it is the first target of a run."""
        targets = moves.dst.tolist()
        self._writer = {cell: run for run, cell in enumerate(targets)}
        """The run with that first target."""
        self._runs: list[tuple[int, int, int]] = list(
            zip(moves.src.tolist(), targets, moves.length.tolist(), strict=True)
        )
        """Source, target and length of each run."""
        self._blocking: list[int] = blocked.tolist()
        """For each run the number of its target cells that other runs have yet to read; 0 when it is done."""
        self._splittable: list[int] = splittable.nonzero()[0].tolist()
        """A heap with all runs that can be split, some of whose target cells are clear, and maybe others."""
        self._ready = deque([run for run, cells in enumerate(self._blocking) if not cells])
        self._n_left = len(targets)
        self._by_length: list[tuple[int, int]] | None = None
        """A heap with all runs that are left, shortest first, and maybe others; made when it is first needed."""
        self._done: list[tuple[int, int, int]] = []

    def solve(self) -> Moves:
        """Emit ready runs until all are done; where none is, set a whole one aside, split one, or set a part aside.

        Splitting comes second: what a few clear cells let go leaves as few, so that a cache nearly full is soon moved
        cell by cell.
        """
        while True:
            self._emit()
            if not self._n_left:
                return Moves.from_runs(self._done)
            if not self._set_aside(whole=True) and not self._split() and not self._set_aside(whole=False):
                return NO_MOVES  # A full cache in cycles: no cell to set a run aside in, and nothing to gain.

    def _emit(self) -> None:
        """Emit the runs that are ready, and those that become so by that."""
        ready, runs, done, blocking = self._ready, self._runs, self._done, self._blocking
        pending, firsts, writer, packed = self._pending, self._firsts, self._writer, self._packed
        splittable, before = self._splittable, len(done)
        while ready:
            i = ready.popleft()
            src, _, n = run = runs[i]
            done.append(run)
            if n > 1:
                self._read(src, n, i)
                continue
            # Most runs have a single cell: what _read does of several.
            pending[src] = 0
            first = firsts.rfind(1, 0, src + 1) if src < packed else -1
            if first >= 0:
                other = writer[first]
                cells = runs[other][2]
                if first + cells > src:
                    blocking[other] = blocked = blocking[other] - 1
                    if not blocked:
                        ready.append(other)
                    elif cells > 1:
                        heappush(splittable, other)
        self._n_left -= len(done) - before

    def _read(self, src: int, n: int, i: int) -> None:
        """Note that run ``i`` has read cells ``[src, src + n)``, and unblock the runs that write them, in order."""
        runs, firsts, stop = self._runs, self._firsts, src + n
        self._pending[src:stop] = bytes(n)
        if src >= self._packed:
            return
        found = list[tuple[int, int]]()
        at = firsts.rfind(1, 0, src + 1)
        if at < 0:
            at = firsts.find(1, src, stop)
        while at >= 0:
            other = self._writer[at]
            end = at + runs[other][2]
            if end > src and other != i:
                found.append((other, min(end, stop) - max(at, src)))
            at = firsts.find(1, max(end, src), stop)
        if len(found) > 1:
            found.sort()
        for other, cells in found:
            self._unblock(other, cells)

    def _unblock(self, run: int, cells: int) -> None:
        blocking = self._blocking[run] = self._blocking[run] - cells
        if blocking == 0:
            self._ready.append(run)
        elif self._runs[run][2] > 1:
            heappush(self._splittable, run)

    def _split(self) -> bool:
        """Cut a run that is partly clear into clear and blocked parts; False if there is none: only cycles are left."""
        splittable, runs, blocking, find = self._splittable, self._runs, self._blocking, self._pending.find
        while splittable:
            i = heappop(splittable)
            if not blocking[i]:
                continue
            _, dst, n = runs[i]
            stop = dst + n
            at = find(0, dst, stop)
            if at < 0:
                continue
            clear, edges, sought = at == dst, [dst] if at == dst else [dst, at], 1
            while (at := find(sought, at, stop)) >= 0:
                edges.append(at)
                sought = 1 - sought
            edges.append(stop)
            self._cut(i, edges, clear)
            return True
        return False

    def _cut(self, i: int, edges: list[int], clear: bool) -> None:
        """Cut run ``i`` at targets ``edges``; the first part keeps its number.

        ``clear``: whether the target of the first part is clear; from there on it alternates.
        """
        runs, blocking = self._runs, self._blocking
        src, dst, _ = runs[i]
        shift = src - dst
        distance = abs(shift)
        part = i
        for start, stop in pairwise(edges):
            n = stop - start
            # What a part reads itself does not block it.
            blocked = 0 if clear else min(n, distance)
            if part == i:
                runs[i] = (src, dst, n)
                blocking[i] = blocked
            else:
                runs.append((start + shift, start, n))
                blocking.append(blocked)
                self._firsts[start] = 1
                self._writer[start] = part
            if clear:
                self._ready.append(part)
            if self._by_length is not None:
                heappush(self._by_length, (n, part))
            part = len(runs)
            clear = not clear
        self._n_left += len(edges) - 2

    def _set_aside(self, whole: bool) -> bool:
        """Copy the shortest run, or what fits of it, beyond the packed cells, to be copied back; False if it cannot be.

        ``whole``: only a run that fits and has not been copied there before.
        """
        if self._packed == self._size:
            return False
        runs, blocking = self._runs, self._blocking
        beyond = np.frombuffer(self._pending, dtype=np.uint8)[self._packed : self._size]
        starts, ends = extents_of_cells((beyond == 0).nonzero()[0] + self._packed)
        if not len(starts):
            return False
        widest = int((ends - starts).argmax())
        aside, room = int(starts[widest]), int(ends[widest] - starts[widest])
        if self._by_length is None:
            self._by_length = [(run[2], i) for i, run in enumerate(runs) if blocking[i]]
            heapify(self._by_length)
        while True:  # What blocks others is not beyond the packed cells, so that there is such a run.
            length, i = self._by_length[0]
            src, dst, n = runs[i]
            if blocking[i] and n == length and src < self._packed:
                break
            heappop(self._by_length)
        if whole and n > room:
            return False
        part = min(n, room)
        if part < n:
            rest = len(runs)
            runs.append((src + part, dst + part, n - part))
            blocking.append(self._blocked_cells(dst + part, n - part, src + part))
            self._firsts[dst + part] = 1
            self._writer[dst + part] = rest
            self._n_left += 1
            self._note_left(rest)
        self._done.append((src, aside, part))
        blocking[i] = self._blocked_cells(dst, part, src)
        runs[i] = (aside, dst, part)
        self._pending[aside : aside + part] = b"\1" * part
        self._note_left(i)
        self._read(src, part, i)
        return True

    def _blocked_cells(self, dst: int, n: int, src: int) -> int:
        """How many of ``n`` target cells are yet to be read by others than the run that reads ``n`` from ``src`` on."""
        return self._pending.count(1, dst, dst + n) - max(n - abs(src - dst), 0)

    def _note_left(self, run: int) -> None:
        """Put a new run, or a changed one, where runs to split and runs to set aside are looked for."""
        _, dst, n = self._runs[run]
        if self._by_length is not None:
            heappush(self._by_length, (n, run))
        if n > 1 and self._blocking[run] and self._pending.find(0, dst, dst + n) >= 0:
            heappush(self._splittable, run)
