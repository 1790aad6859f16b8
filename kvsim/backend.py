"""Backends: how long a step takes. One predicts, a real one does the work under a stopwatch."""

from __future__ import annotations

from typing import Protocol

from kvsim.costs import CostModel
from policies import Kernel, MicroBatch, Moves
from workloads import Request


class Backend(Protocol):
    """What the server asks for durations. Never chooses a cell."""

    wants_views: bool
    """Whether micro-batches must say which cells attention may see."""

    def begin(self, seq: int, request: Request) -> None:
        """A request takes the sequence ``seq``, which holds nothing."""
        ...

    def forward(self, batch: MicroBatch) -> float:
        """Seconds that the micro-batch takes, its moves included."""
        ...

    def move(self, moves: Moves) -> float:
        """Seconds that the moves take."""
        ...


class SimulatedBackend:
    """Predicts from a cost model."""

    wants_views = False

    def __init__(self, costs: CostModel, kernel: Kernel):
        self.costs = costs
        self._kernel = kernel

    def begin(self, seq: int, request: Request) -> None:
        """Nothing to do: a prediction needs no content."""

    def forward(self, batch: MicroBatch) -> float:
        """Predicted seconds."""
        return self.costs.forward(batch, self._kernel) + self.move(batch.moves)

    def move(self, moves: Moves) -> float:
        """Predicted seconds."""
        return self.costs.moves(moves)
