"""Compactors: which moves tidy an arena. A compactor plans; ``Arena.apply`` and the engine carry the moves out."""

from __future__ import annotations

from collections.abc import Callable

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
    sequence of their own. Of the orders in which the sequences could lie, those by first cell, by middle cell and
    by the offset that would leave most of them in place are tried, and the one that moves fewest cells is taken;
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
    for rank in (_first_cell, _middle_cell, _best_offset):
        source = np.concatenate(sorted(sequences, key=rank))
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


def _order(source: IntArray, size: int) -> Moves:
    """Moves that bring cell ``source[i]`` to ``i`` for all i, in an order that overwrites nothing still needed."""
    target = np.arange(len(source))
    wrong = source != target
    pending = _runs(source[wrong], target[wrong])
    needed = np.zeros(size, dtype=bool)
    needed[source[wrong]] = True
    done: list[tuple[int, int, int]] = []
    while pending:
        blocked: list[tuple[int, int, int]] = []
        for src, dst, n in pending:
            needed[src : src + n] = False
            if needed[dst : dst + n].any():
                needed[src : src + n] = True
                blocked.append((src, dst, n))
            else:
                done.append((src, dst, n))
        if len(blocked) == len(pending):
            blocked, progress = _split(blocked, needed, done)
            if not progress:
                if len(source) == size:
                    return NO_MOVES  # A full cache in cycles: no cell to turn round in, and no space to win.
                _set_aside(blocked, needed, done, len(source), size)
        pending = blocked
    return Moves.from_runs(done)


def _split(
    blocked: list[tuple[int, int, int]],
    needed: np.ndarray[tuple[int], np.dtype[np.bool_]],
    done: list[tuple[int, int, int]],
) -> tuple[list[tuple[int, int, int]], bool]:
    """Move those parts of blocked runs whose target is free now; what is left, and whether there was any."""
    left: list[tuple[int, int, int]] = []
    progress = False
    for src, dst, n in blocked:
        clear = ~needed[dst : dst + n]
        edges = np.flatnonzero(np.diff(clear)) + 1
        for a, b in zip([0, *edges.tolist()], [*edges.tolist(), n], strict=True):
            part = (src + a, dst + a, b - a)
            # An earlier part of this pass may have freed the target, but never taken it.
            if clear[a]:
                done.append(part)
                needed[src + a : src + b] = False
                progress = True
            else:
                left.append(part)
    return left, progress


def _set_aside(
    blocked: list[tuple[int, int, int]],
    needed: np.ndarray[tuple[int], np.dtype[np.bool_]],
    done: list[tuple[int, int, int]],
    packed: int,
    size: int,
) -> None:
    """Break a cycle: copy the shortest run (or as much as fits) beyond the packed cells, to be brought back."""
    free_starts, free_ends = runs_of(np.flatnonzero(~needed[packed:size]) + packed)
    widest = int((free_ends - free_starts).argmax())
    aside, room = int(free_starts[widest]), int(free_ends[widest] - free_starts[widest])
    index = min(range(len(blocked)), key=lambda i: blocked[i][2])
    src, dst, n = blocked.pop(index)
    part = min(n, room)
    done.append((src, aside, part))
    needed[src : src + part] = False
    needed[aside : aside + part] = True
    blocked.append((aside, dst, part))
    if part < n:
        blocked.append((src + part, dst + part, n - part))


def _runs(source: IntArray, target: IntArray) -> list[tuple[int, int, int]]:
    """Pairs of cells as runs in which both rise by one."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    return list(zip(source[starts].tolist(), target[starts].tolist(), lengths.tolist(), strict=True))
