"""Decode steps along the cells that a sliding window has left behind, or will have when the steps come there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.search import Cells, cells_array, start_of_search
from policies.cells.window import AHEAD, losses, reaches
from policies.fast_forward.forecast import MAX_STEPS
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.vocabulary import Chunk, IntArray


class WindowPath(FreeCellPath):
    """Steps up the cells that are free or behind the window, or will be when the steps come there. Where one of the
    latter is overwritten, all that its sequence holds up to that position goes too."""

    def __init__(self, arena: Arena, step: Sequence[Chunk], n: int, pad: int, window: int):
        self.arena = arena
        self.step = step
        self._pad = pad
        self._anywhere = True
        tokens = len(step)
        head = start_of_search(arena.head, arena.used, tokens)
        n = min(n, MAX_STEPS)
        self._overwrites = not arena.free.is_free(head, n * tokens)
        if not self._overwrites:
            self.steps, self.cells = n, range(head, head + n * tokens)
            return
        reach = reaches(arena, window)
        cells: Cells = range(0)
        for stop in (min(head + 2 * n * tokens + AHEAD, arena.size), arena.size):
            if len(cells) < n * tokens:
                cells = self._find(slice(head, stop), reach, n)
        self.steps = self._as_far(cells, len(cells) // tokens) if len(cells) >= tokens else 0
        self.cells = cells[: self.steps * tokens]

    def _find(self, where: slice, reach: IntArray, n: int) -> Cells:
        """The cells that at most ``n`` steps find there. What is behind the window stays there until it is overwritten;
        a sequence that is stepped leaves a position more behind with each step."""
        owner, tokens = self.arena.owner[where], len(self.step)
        # How many steps later a cell may be used, if its sequence is stepped.
        wait = self.arena.position[where] - reach[owner]
        alone = dict(self.arena.singles)
        moves_on = np.zeros(len(reach), dtype=np.bool_)
        moves_on[[alone[chunk.seq] for chunk in self.step if chunk.seq in alone]] = True
        found: IntArray = ((wait <= 0) | ((wait < n) & moves_on[owner])).nonzero()[0]
        waits = wait[found] * tokens
        while True:
            # The steps come to a cell no later than if all before it are taken: those that would still be too early
            # for that are passed by, and the others come the earlier.
            early = waits > np.arange(len(waits))
            early[n * tokens :] = False
            if not early.any():
                break
            found, waits = found[~early], waits[~early]
        found = found[: min(n, len(found) // tokens) * tokens] + where.start
        if len(found) and int(found[-1]) - int(found[0]) == len(found) - 1:
            return range(int(found[0]), int(found[-1]) + 1)
        return found

    def _as_far(self, cells: Cells, steps: int) -> int:
        """How many of the steps go on where the one before ended, below what is the highest used cell now or is taken
        by then."""
        arena, tokens = self.arena, len(self.step)
        cells = cells_array(cells)
        heads, taken = cells[tokens - 1 :: tokens] + 1, tokens * np.arange(1, steps + 1)
        owner = arena.owner[cells]
        gone = np.zeros(steps, dtype=np.int64)
        top = arena.top - 1
        for index in set(owner.tolist()) - {0}:
            (seq,) = arena.sets[index]
            if not arena.is_alone(seq):
                return 0
            at = np.flatnonzero(owner == index)
            upto = np.full(steps, -1)
            upto[at // tokens] = np.maximum.accumulate(arena.position[cells[at]])
            upto = np.maximum.accumulate(upto)
            gone += np.searchsorted(arena.cells_of(seq)[1], upto, side="right")
            if top >= cells[0] and arena.owner[top] == index:
                # The highest cell may be emptied before it is reached.
                emptied = int(np.searchsorted(upto, arena.position[top]))
                if emptied < min(steps, int(np.searchsorted(cells, top)) // tokens):
                    steps = emptied
                    heads, taken, gone = heads[:steps], taken[:steps], gone[:steps]
                    cells, owner = cells[: steps * tokens], owner[: steps * tokens]
                    if steps == 0:
                        return 0
        far = heads > arena.used + taken - gone + 2 * tokens
        return min(int(far.argmax()) + 1 if far.any() else steps, steps)

    def take(self, k: int, *, look: bool) -> None:
        """Overwrite them; how full a window is nobody asks."""
        if self._overwrites:
            cells = cells_array(self.cells[: k * len(self.step)])
            for seq, last in losses(self.arena, cells).items():
                self.arena.remove(seq, 0, last + 1)
        super().take(k, look=False)
