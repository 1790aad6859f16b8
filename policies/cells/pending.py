"""What an engine must still do before its next pass: moves of cells and rotations of keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.vocabulary import NO_MOVES, NO_SHIFT, IntArray, Moves, Shift


class PendingUpdates:
    """Moves and rotations that have not been given out yet; they go out with the next micro-batch."""

    __slots__ = ("_size", "moves", "rotations")

    def __init__(self, size: int):
        self._size = size
        self.moves: list[Moves] = []
        """Copies of cells, in order."""
        self.rotations: IntArray | None = None
        """Shape (size,): by how many positions each cell's key must still be rotated; None: no key must be."""

    @property
    def is_empty(self) -> bool:
        """Whether an engine has nothing to do."""
        return not self.moves and self.rotations is None

    def rotate(self, cells: IntArray, deltas: int | IntArray) -> None:
        """Add rotations of the keys in ``cells`` by ``deltas`` positions."""
        if len(cells):
            if self.rotations is None:
                self.rotations = np.zeros(self._size, dtype=np.int64)
            self.rotations[cells] += deltas

    def rotations_of(self, cells: IntArray) -> IntArray:
        """By how many positions the keys in ``cells`` must still be rotated; the same shape."""
        return np.zeros_like(cells) if self.rotations is None else self.rotations[cells]

    def add_moves(self, plan: Moves) -> None:
        """Add moves, of which ``rotations`` knows already."""
        self.moves.append(plan)

    def settle(self, owner: np.ndarray[tuple[int], np.dtype[np.int32]]) -> tuple[Moves, Shift]:
        """Give out all moves, and then all rotations of keys in used cells, whose entry in ``owner`` is not 0."""
        shift = NO_SHIFT
        if self.rotations is None and not self.moves:
            return NO_MOVES, shift
        if self.rotations is not None:
            cells = np.flatnonzero((self.rotations != 0) & (owner > 0))
            shift, self.rotations = Shift(cells, self.rotations[cells]), None
        return self.settle_moves(), shift

    def settle_moves(self) -> Moves:
        """Give out the moves alone: rotations may wait until the keys are read."""
        moves, self.moves = Moves.join(self.moves), []
        return moves

    def put_back(self, settled: Sequence[tuple[Moves, Shift]]) -> None:
        """Take back what was given out, in that order, since no engine will do it."""
        later, rotations = self.moves, np.zeros(self._size, dtype=np.int64)
        self.moves = []
        for moves, shift in settled:
            moves.carry(rotations, 0)
            rotations[shift.cells] += shift.deltas
            if moves.n_runs:
                self.moves.append(moves)
        for moves in later:
            moves.carry(rotations, 0)
        self.moves += later
        if rotations.any():
            self.rotations = rotations if self.rotations is None else self.rotations + rotations
