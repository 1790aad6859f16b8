"""A copy of some cells of an arena, to undo a placement that was only tried."""

from __future__ import annotations

from dataclasses import dataclass

from policies.cells.arena import Arena
from policies.cells.sequence_sets import SetIndices
from policies.vocabulary import IntArray


@dataclass(frozen=True, slots=True)
class SavedCells:
    """What some cells of an arena held when they were saved; arrays of shape (n,)."""

    arena: Arena
    cells: IntArray
    position: IntArray
    owner: SetIndices
    rotations: IntArray
    """By how many positions each cell's key had still to be rotated."""

    @staticmethod
    def of(arena: Arena, cells: IntArray) -> SavedCells:
        """Save ``cells``, which are distinct."""
        rotations = arena.pending.rotations_of(cells)
        return SavedCells(arena, cells, arena.position[cells], arena.owner[cells], rotations)

    def restore(self) -> None:
        """Make the cells what they were; to be called once, in reverse order where several were saved."""
        arena, cells = self.arena, self.cells
        arena.restore(cells, self.position, self.owner)
        if arena.pending.rotations is not None:
            arena.pending.rotations[cells] = self.rotations
