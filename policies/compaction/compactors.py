"""Compactors: which moves tidy an arena. A compactor plans; ``Arena.apply`` and the engine carry the moves out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.ordering import in_safe_order
from policies.vocabulary import NO_MOVES, Chunk, IntArray, Moves

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
    if len(moving) == 0:
        return NO_MOVES
    starts, ends = arena.free.arrays()
    below = int(np.searchsorted(starts, used))
    lengths = np.minimum(ends[:below], used) - starts[:below]
    upto = np.cumsum(lengths)
    # Of each hole, cell by cell: what fills it, counted from the end of what is moved.
    inside = np.arange(len(moving)) - np.repeat(upto - lengths, lengths)
    source = moving[np.repeat(len(moving) - upto, lengths) + inside]
    target = np.repeat(starts[:below], lengths) + inside
    first = np.concatenate(([0], np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1))
    runs = np.diff(first, append=len(source))[:most_runs]
    first = first[:most_runs]
    return Moves(source[first], target[first], runs)


def is_packed(arena: Arena) -> bool:
    """Whether there is no hole below the highest used cell, and each sequence is in one piece, in order of position."""
    top = arena.top
    if arena.used < top or top == 0:
        return top == 0
    owner, position = arena.owner[:top], arena.position[:top]
    changes = owner[1:] != owner[:-1]
    borders = changes.nonzero()[0]
    if len(borders) >= len(arena.sets):
        return False
    first = {int(owner[0]) if top else 0, *owner[borders + 1].tolist()}
    return len(first) == len(borders) + 1 and not ((position[1:] < position[:-1]) > changes).any()


def stays_tidy(compactor: Compactor, arena: Arena, step: Sequence[Chunk]) -> bool:
    """Whether it would certainly find nothing to move now, and after each of some steps (a token for each sequence)
    that go on at the top of the arena."""
    if compactor is pack:
        return len(step) == 1 and arena.ends_with(step[0].seq) and not step[0].also and is_packed(arena)
    return getattr(compactor, "func", None) is fill_holes and arena.used == arena.top


def pack(arena: Arena) -> Moves:
    """Everything at the low end, each sequence contiguous and in order of position.

    The layout that llama.cpp issue 13497 asks for. Cells that several sequences share are packed once, as a
    sequence of their own. Of the orders in which the sequences could lie, those by first cell, by middle cell, by the
    offset that would leave most of them in place, and the first with gaps filled by sequences from the end are tried,
    and the one that moves fewest cells is taken;
    every cell is moved once at most, but for cycles, of which one run is moved aside first.
    """
    if is_packed(arena):
        return NO_MOVES
    cells = np.flatnonzero(arena.owner[: arena.top])
    owner = arena.owner[cells]
    # Sorted as 16 bits where they are enough: that takes a fraction of the time.
    order = np.argsort(owner.astype(np.uint16) if len(arena.sets) < 2**16 else owner, kind="stable")
    bounds = np.flatnonzero(np.diff(owner[order])) + 1
    sequences = [_by_position(arena, sequence) for sequence in np.split(cells[order], bounds)]
    if len(sequences) == 1:
        return in_safe_order(sequences[0], arena.size)
    best: IntArray | None = None
    fewest = len(cells) + 1
    there = np.arange(len(cells))
    orders = [sorted(sequences, key=rank) for rank in (_first_cell, _middle_cell, _best_offset)]
    orders.append(_filling_gaps(orders[0]))
    # Where they are few, several orders mostly come to the same.
    for ordered in {tuple(map(id, ordered)): ordered for ordered in orders}.values():
        source = np.concatenate(ordered)
        moved = int(np.count_nonzero(source != there))
        if moved < fewest:
            best, fewest = source, moved
    assert best is not None
    return in_safe_order(best, arena.size)


def _by_position(arena: Arena, cells: IntArray) -> IntArray:
    positions = arena.position[cells]
    if (positions[1:] > positions[:-1]).all():
        return cells
    ordered: IntArray = cells[np.argsort(positions, kind="stable")]
    return ordered


def _ascending(sequence: IntArray) -> IntArray:
    return sequence if (sequence[1:] > sequence[:-1]).all() else np.sort(sequence)


def _first_cell(sequence: IntArray) -> float:
    return float(sequence.min())


def _middle_cell(sequence: IntArray) -> float:
    cells, half = _ascending(sequence), len(sequence) // 2
    return float(cells[half] if len(cells) % 2 else (cells[half - 1] + cells[half]) / 2)


def _best_offset(sequence: IntArray) -> float:
    """The commonest distance between where a token lies and how many of its sequence come before it; of several, the
    smallest."""
    offsets = sequence - np.arange(len(sequence))
    if (offsets[1:] < offsets[:-1]).any():
        offsets.sort()
    first = np.concatenate(([0], np.flatnonzero(offsets[1:] != offsets[:-1]) + 1))
    counts = np.diff(first, append=len(offsets))
    return float(offsets[first[counts.argmax()]])


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
