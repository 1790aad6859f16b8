"""A backend for replays: what counts is what is decided, not how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from policies import Chunk, HostCopy, MicroBatch, Moves, Transfer
from policies.placement.rule import PassReads
from workloads import Request


class ZeroTimeBackend:
    """A backend on which everything takes zero time."""

    wants_views = False
    price = None

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Do nothing."""

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Do nothing."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Return zero seconds."""
        return [0.0] * len(batches)

    def before_pass(self, work: PassReads) -> float:
        """Return zero seconds."""
        return 0.0

    def move(self, moves: Moves) -> float:
        """Return zero seconds."""
        return 0.0

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Return zero seconds."""
        return 0.0

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Return zero seconds."""
        return 0.0
