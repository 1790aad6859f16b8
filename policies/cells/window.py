"""Cells of an arena that a sliding window has left behind, to be used again."""

from __future__ import annotations

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_extents import FreeExtents
from policies.cells.search import Cells
from policies.vocabulary import IntArray

AHEAD = 256
"""Cells that a search looks at first beyond twice as many as it needs: mostly enough are usable."""


def reaches(arena: Arena, window: int) -> IntArray:
    """Of each set: the highest position that a window has left behind where the set is of one sequence alone; a cell's
    token may be overwritten if its position is no higher. The empty set's cells may always."""
    reach = np.full(len(arena.sets), -2)
    reach[0] = -1
    for seq, index in arena.singles:
        reach[index] = arena.last_position(seq) + 1 - window
    return reach


def behind_window(arena: Arena, window: int) -> FreeExtents:
    """Free cells, and those of one sequence alone whose token its next one will not see any more."""
    top = arena.top
    kept = np.zeros(arena.size, dtype=np.bool_)
    np.greater(arena.position[:top], reaches(arena, window)[arena.owner[:top]], out=kept[:top])
    usable = FreeExtents(arena.size)
    usable.rebuild(kept)
    return usable


def find_behind(arena: Arena, window: int, head: int, n: int) -> Cells | None:
    """``find_scattered`` among the cells of ``behind_window``."""
    if arena.free.is_free(head, n):
        return range(head, head + n)
    reach = reaches(arena, window)
    ahead = slice(head, head + 2 * n + AHEAD)
    cells: IntArray = (arena.position[ahead] <= reach[arena.owner[ahead]]).nonzero()[0]
    if len(cells) >= n:
        cells = cells[:n] + head
    else:
        usable = (arena.position <= reach[arena.owner]).nonzero()[0]
        if len(usable) < n:
            return None
        at = int(usable.searchsorted(head))
        cells = usable[at : at + n]
        if len(cells) < n:
            cells = np.concatenate((cells, usable[: n - len(cells)]))
    first = int(cells[0])
    return range(first, first + n) if int(cells[-1]) - first == n - 1 else cells


def losses(arena: Arena, cells: IntArray) -> dict[int, int]:
    """Of the sequences whose tokens are overwritten in these cells, each in no set but its own: the last position that
    goes with them."""
    owner, position = arena.owner[cells], arena.position[cells]
    lost = {}
    for index in set(owner.tolist()) - {0}:
        (seq,) = arena.sets[index]
        lost[seq] = int(position[owner == index].max())
    return lost
