"""The cells that decode steps take in a cache with a sliding window: free ones, and those that it has passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.search import cells_array, start_of_search
from policies.cells.window import AHEAD, last_passed, positions_lost
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.vocabulary import IntArray


class WindowPath(FreeCellPath):
    """Decode steps up the cells that are free or that the window has passed, now or when the steps come there.

    Where a passed cell is overwritten, its sequence loses all tokens up to that position.
    """

    def __init__(self, arena: Arena, seqs: Sequence[int], n: int, pad: int, window: int):
        """``seqs``: the sequences that get a token in each step."""
        self._window = window
        self._seqs = seqs
        super().__init__(arena, len(seqs), n, pad, anywhere=True)

    def _find(self, n: int) -> Cells:
        arena, tokens = self.arena, self.tokens
        head = start_of_search(arena.head, arena.used, tokens)
        self._overwrites = not arena.free.is_free(head, n * tokens)
        if not self._overwrites:
            return range(head, head + n * tokens)
        passed = last_passed(arena, self._window)
        cells: Cells = range(0)
        for stop in (min(head + 2 * n * tokens + AHEAD, arena.size), arena.size):
            if len(cells) < n * tokens:
                cells = self._usable_cells(slice(head, stop), passed, n)
        steps = self._steps_in_order(cells, len(cells) // tokens) if len(cells) >= tokens else 0
        return cells[: steps * tokens]

    def _usable_cells(self, where: slice, passed: IntArray, n: int) -> Cells:
        """The cells in ``where`` that at most ``n`` steps take; ``passed`` as by ``last_passed``.

        A cell that the window has passed stays usable until it is overwritten; with each step the window passes one
        more position of each sequence in the step.
        """
        owner, tokens = self.arena.owner[where], self.tokens
        # After how many steps a cell may be used, if its sequence is in the step.
        wait = self.arena.position[where] - passed[owner]
        singletons = dict(self.arena.sets.singletons_in_use())
        moves_on = np.zeros(len(passed), dtype=np.bool_)
        moves_on[[singletons[seq] for seq in self._seqs if seq in singletons]] = True
        found: IntArray = ((wait <= 0) | ((wait < n) & moves_on[owner])).nonzero()[0]
        waits = wait[found] * tokens
        while True:
            # The steps reach a cell no later than if they took all cells before it. Cells that are not usable even
            # by then are left out, so that the steps reach the others sooner.
            early = waits > np.arange(len(waits))
            early[n * tokens :] = False
            if not early.any():
                break
            found, waits = found[~early], waits[~early]
        found = found[: min(n, len(found) // tokens) * tokens] + where.start
        if len(found) and int(found[-1]) - int(found[0]) == len(found) - 1:
            return range(int(found[0]), int(found[-1]) + 1)
        return found

    def _steps_in_order(self, cells: Cells, steps: int) -> int:
        """How many of the steps search on from where the one before ended, instead of from 0."""
        arena, tokens = self.arena, self.tokens
        cells = cells_array(cells)
        heads, taken = cells[tokens - 1 :: tokens] + 1, tokens * np.arange(1, steps + 1)
        owner = arena.owner[cells]
        gone = np.zeros(steps, dtype=np.int64)
        top = arena.top - 1
        for index in set(owner.tolist()) - {0}:
            (seq,) = arena.sets[index]
            if not arena.sets.shares_nothing(seq):
                return 0
            upto = self._lost_by(index, cells, owner)
            gone += np.searchsorted(arena.cells_of(seq)[1], upto, side="right")
            if top >= cells[0] and arena.owner[top] == index:
                # The highest used cell may be emptied before the steps reach it.
                emptied = int(np.searchsorted(upto, arena.position[top]))
                if emptied < min(steps, int(np.searchsorted(cells, top)) // tokens):
                    steps = emptied
                    heads, taken, gone = heads[:steps], taken[:steps], gone[:steps]
                    cells, owner = cells[: steps * tokens], owner[: steps * tokens]
                    if steps == 0:
                        return 0
        far = heads > arena.used + taken - gone + 2 * tokens
        return min(int(far.argmax()) + 1 if far.any() else steps, steps)

    def _lost_by(self, index: int, cells: IntArray, owner: NDArray[np.signedinteger[Any]]) -> IntArray:
        """The last position that a set's sequence has lost after each step; shape (steps,)."""
        tokens = self.tokens
        at = np.flatnonzero(owner == index)
        upto = np.full(len(cells) // tokens, -1)
        upto[at // tokens] = np.maximum.accumulate(self.arena.position[cells[at]])
        return np.maximum.accumulate(upto)

    def positions_lost(self, steps: int) -> dict[int, IntArray]:
        """The last position that a sequence has lost after each step, shape (steps,), by sequence."""
        if not self._overwrites:
            return {}
        cells = cells_array(self.cells)[: steps * self.tokens]
        owner = self.arena.owner[cells]
        sets = self.arena.sets
        return {next(iter(sets[i])): self._lost_by(i, cells, owner) for i in set(owner.tolist()) - {0}}

    def overwrite(self, k: int) -> None:
        """Take from sequences what they lose when the cells of the first ``k`` steps are overwritten."""
        if self._overwrites:
            cells = cells_array(self.cells[: k * self.tokens])
            for seq, last in positions_lost(self.arena, cells).items():
                self.arena.remove(seq, 0, last + 1)
