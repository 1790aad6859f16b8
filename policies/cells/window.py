"""Cells of an arena that can be used again because a sliding window has passed their tokens."""

from __future__ import annotations

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells, FreeCells
from policies.vocabulary import IntArray

AHEAD = 256
"""A search for n cells looks at the next 2 n + ``AHEAD`` cells first: mostly enough of them are usable."""


def last_passed(arena: Arena, window: int) -> IntArray:
    """The highest position that the window has passed, for each set of sequences by its index; shape (len(sets),).

    A cell's token may be overwritten if its position is no higher. Cells that several sequences share are never
    overwritten (-2), empty ones always may be (-1).
    """
    arena.write_rows()
    passed = np.full(len(arena.sets), -2)
    passed[0] = -1
    for seq, index in arena.sets.singletons_in_use():
        passed[index] = arena.last_position(seq) + 1 - window
    return passed


def usable_extents(arena: Arena, window: int) -> FreeCells:
    """Free cells, and cells of a single sequence whose token its next token will not see any more."""
    top = arena.top
    kept = np.zeros(arena.size, dtype=np.bool_)
    np.greater(arena.position[:top], last_passed(arena, window)[arena.owner[:top]], out=kept[:top])
    usable = FreeCells(arena.size)
    usable.rebuild(kept)
    return usable


def find_usable(arena: Arena, window: int, head: int, n: int) -> Cells | None:
    """The first ``n`` cells of ``usable_extents`` going once round from ``head``; None if there are fewer."""
    if arena.free.is_free(head, n):
        return range(head, head + n)
    passed = last_passed(arena, window)
    ahead = slice(head, head + 2 * n + AHEAD)
    cells: IntArray = (arena.position[ahead] <= passed[arena.owner[ahead]]).nonzero()[0]
    if len(cells) >= n:
        cells = cells[:n] + head
    else:
        usable = (arena.position <= passed[arena.owner]).nonzero()[0]
        if len(usable) < n:
            return None
        at = int(usable.searchsorted(head))
        cells = usable[at : at + n]
        if len(cells) < n:
            cells = np.concatenate((cells, usable[: n - len(cells)]))
    first = int(cells[0])
    return range(first, first + n) if int(cells[-1]) - first == n - 1 else cells


def positions_lost(arena: Arena, cells: IntArray) -> dict[int, int]:
    """The last position that each sequence loses if ``cells``, none of them shared, are overwritten."""
    owner, position = arena.owner[cells], arena.position[cells]
    lost = {}
    for index in set(owner.tolist()) - {0}:
        (seq,) = arena.sets[index]
        lost[seq] = int(position[owner == index].max())
    return lost
