"""A copy of some cells of an arena, to undo a placement that was only tried."""

from __future__ import annotations

from dataclasses import dataclass

from policies.cells.arena import Arena
from policies.cells.last_positions import LastPositions
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
    last_positions: LastPositions
    """Of all sequences, not only of those in the cells."""

    @staticmethod
    def of(arena: Arena, cells: IntArray) -> SavedCells:
        """Save ``cells``, which are distinct."""
        rotations = arena.pending.rotations_of(cells)
        last_positions = LastPositions(arena.last_positions)
        return SavedCells(arena, cells, arena.position[cells], arena.owner[cells], rotations, last_positions)

    def restore(self) -> None:
        """Make the cells what they were; to be called once, in reverse order where several were saved."""
        arena, cells, extents = self.arena, self.cells, self.arena.sets.extents
        arena.last_positions = self.last_positions
        extents.known.clear()
        used_now, used_before = arena.owner[cells] > 0, self.owner > 0
        arena.position[cells] = self.position
        arena.owner[cells] = self.owner
        if arena.pending.rotations is not None:
            arena.pending.rotations[cells] = self.rotations
        if used_before.any():
            low, high = int(cells.min()), int(cells.max()) + 1
            for index in set(self.owner.tolist()):
                extents.widen(index, low, high)
        arena.free.release(cells[used_now & ~used_before])
        arena.free.take_cells(cells[used_before & ~used_now])
