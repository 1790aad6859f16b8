"""Cells of an arena that a sliding window has left behind, and decode steps that use them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.arena import Arena
from policies.free_runs import FreeRuns
from policies.leap import MOST
from policies.search import cells_array, start_of_search
from policies.stretch import Stretch
from policies.vocabulary import Chunk, IntArray


def behind_window(arena: Arena, window: int) -> FreeRuns:
    """Free cells, and those of one sequence alone whose token its next one will not see any more."""
    reach = np.full(len(arena.sets), -2)
    reach[0] = -1
    for seq, index in arena.singles:
        reach[index] = max(arena.last_position(seq) + 1 - window, -2)
    top = arena.top
    kept = np.zeros(arena.size, dtype=np.bool_)
    np.greater(arena.position[:top], reach[arena.owner[:top]], out=kept[:top])
    usable = FreeRuns(arena.size)
    usable.rebuild(kept)
    return usable


def losses(arena: Arena, cells: IntArray) -> dict[int, int]:
    """Of the sequences whose tokens are overwritten in these cells, each in no set but its own: the last position that
    goes with them."""
    owner, position = arena.owner[cells], arena.position[cells]
    lost = {}
    for index in set(owner.tolist()) - {0}:
        (seq,) = arena.sets[index]
        lost[seq] = int(position[owner == index].max())
    return lost


class WindowStretch(Stretch):
    """Steps along one run of cells that are free or behind the window. Where one of the latter is overwritten, all that
    its sequence holds up to that position goes too."""

    def __init__(self, arena: Arena, step: Sequence[Chunk], n: int, pad: int, window: int):
        self.arena = arena
        self.step = step
        self._pad = pad
        self._anywhere = True
        tokens = len(step)
        usable = behind_window(arena, window)
        head = start_of_search(arena.head, arena.used, tokens)
        at = usable.index_after(head)
        self.steps, self.cells = 0, range(0)
        if at < len(usable):
            first = max(usable.starts[at], head)
            # What is behind the window stays there, so that this run is used cell after cell whatever else comes to
            # lie behind it.
            steps = min(n, MOST, (usable.ends[at] - first) // tokens)
            self.steps = self._as_far(first, steps) if steps > 0 else 0
            self.cells = range(first, first + self.steps * tokens)

    def _as_far(self, first: int, steps: int) -> int:
        """How many of the steps go on where the one before ended, below what is the highest used cell now or is taken
        by then."""
        arena, tokens = self.arena, len(self.step)
        taken = tokens * np.arange(1, steps + 1)
        owner = arena.owner[first : first + steps * tokens]
        gone = np.zeros(steps, dtype=np.int64)
        top = arena.top - 1
        for index in set(owner.tolist()) - {0}:
            (seq,) = arena.sets[index]
            if not arena.is_alone(seq):
                return 0
            at = np.flatnonzero(owner == index)
            upto = np.full(steps, -1)
            upto[at // tokens] = np.maximum.accumulate(arena.position[first + at])
            upto = np.maximum.accumulate(upto)
            gone += np.searchsorted(arena.cells_of(seq)[1], upto, side="right")
            if top >= first and arena.owner[top] == index:
                # The highest cell may be emptied before it is reached.
                emptied = int(np.searchsorted(upto, arena.position[top]))
                if emptied < min(steps, (top - first) // tokens):
                    steps = emptied
                    taken, gone, owner = taken[:steps], gone[:steps], owner[: steps * tokens]
                    if steps == 0:
                        return 0
        far = first + taken > arena.used + taken - gone + 2 * tokens
        return min(int(far.argmax()) + 1 if far.any() else steps, steps)

    def take(self, k: int, *, look: bool) -> None:
        """Overwrite them; how full a window is nobody asks."""
        cells = cells_array(self.cells[: k * len(self.step)])
        for seq, last in losses(self.arena, cells).items():
            self.arena.remove(seq, 0, last + 1)
        super().take(k, look=False)
