"""Copies of shared blocks that an engine has yet to make."""

from __future__ import annotations

from collections.abc import Iterable

from policies.vocabulary import NO_MOVES, Moves


class PendingCopies:
    """Copies on write that are due before the next forward pass.

    Until then a copy's source counts as held, so that no other tokens are written there.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self.runs: list[tuple[int, int, int]] = []
        """In order: first cell read, first cell written, cells."""

    def add(self, source: int, target: int, tokens: int) -> None:
        """Note that the first ``tokens`` cells of one block must be copied to another."""
        self.runs.append((source * self._block_size, target * self._block_size, tokens))

    def from_block(self, block: int) -> int:
        """Number of copies whose source is this block."""
        cell = block * self._block_size
        return sum(source == cell for source, _, _ in self.runs)

    def origin(self, block: int) -> int:
        """The block that holds the tokens now: the start of a chain of copies that ends in ``block``."""
        sources = {target: source for source, target, _ in self.runs}
        cell = block * self._block_size
        while cell in sources:
            cell = sources[cell]
        return cell // self._block_size

    def cancel(self, targets: Iterable[int]) -> list[int]:
        """Drop the copies into these blocks, which are no longer held; returns the blocks that they would read."""
        cells = {block * self._block_size for block in targets}
        sources = [source // self._block_size for source, target, _ in self.runs if target in cells]
        self.runs = [run for run in self.runs if run[1] not in cells]
        return sources

    def settle(self) -> tuple[Moves, list[int]]:
        """Hand over all copies, which are then no longer due; and the blocks they read, one for each copy."""
        runs, self.runs = self.runs, []
        moves = Moves.from_runs(runs) if runs else NO_MOVES
        return moves, [source // self._block_size for source, _, _ in runs]
