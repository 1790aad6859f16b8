"""Backends: how long a step takes. One predicts, a real one does the work under a stopwatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from kvsim.costs.costs import CostModel, FloatArray
from policies import NO_MOVES, NO_SHIFT, Chunk, FastForward, Group, Kernel, MicroBatch, Moves, Transfer
from policies.fast_forward.lockstep import NextStepReads, PassSummary
from workloads import Request


class Backend(Protocol):
    """What the server asks for durations. Never chooses a cell."""

    @property
    def wants_views(self) -> bool:
        """Whether micro-batches must say which cells attention may see."""
        ...

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """A request takes the sequence ``seq``; ``again``: it was preempted, and goes on with what it has said."""
        ...

    def discard(self, seq: int, start: int, stop: int) -> None:
        """The sequence forgets positions ``[start, stop)``; those behind move up (context shift)."""
        ...

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Seconds of each of a step's micro-batches, their moves and rotations included.

        ``batches`` are those that the policy placed: of a step that found no room, none, or those that it keeps.
        """
        ...

    def move(self, moves: Moves) -> float:
        """Seconds that the moves take."""
        ...

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Seconds that copies to and from the host tier take."""
        ...


class PassByPass(ABC):
    """A backend that knows a step as one micro-batch after another."""

    @abstractmethod
    def forward(self, batch: MicroBatch) -> float:
        """Seconds that the micro-batch takes, its moves and rotations included."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Seconds of each."""
        return [self.forward(batch) for batch in batches]


class DelegatingBackend:
    """A backend around another, which it leaves to do everything; for those that want to look on."""

    def __init__(self, inner: Backend):
        self._inner = inner

    @property
    def wants_views(self) -> bool:
        """As the inner one."""
        return self._inner.wants_views

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """As the inner one."""
        self._inner.begin(seq, request, again=again)

    def discard(self, seq: int, start: int, stop: int) -> None:
        """As the inner one."""
        self._inner.discard(seq, start, stop)

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """As the inner one."""
        return self._inner.step(step, batches)

    def move(self, moves: Moves) -> float:
        """As the inner one."""
        return self._inner.move(moves)

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """As the inner one."""
        return self._inner.transfer(transfers)


class SimulatedBackend(PassByPass):
    """Predicts from a cost model."""

    wants_views = False

    def __init__(self, costs: CostModel, kernel: Kernel, groups: Sequence[Group]):
        self.costs = costs
        self._kernel = kernel
        self._groups = groups

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Nothing to do: a prediction needs no content."""

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Nothing to do."""

    def forward(self, batch: MicroBatch) -> float:
        """Predicted seconds."""
        return self._and_before(self.costs.forward(batch, self._kernel, self._groups), batch)

    def mixed_step(self, tokens: int, next_step_reads: NextStepReads, summary: PassSummary) -> float:
        """Predicted seconds of a pass in which a lockstep batch of so many gets its tokens beside some chunks."""
        group = self._groups[0]
        seconds = self.costs.mixed_step(tokens, next_step_reads, summary, self._kernel, group)
        if summary.moves is not NO_MOVES:
            seconds += group.share * self.costs.moves(summary.moves)
        if summary.shift is not NO_SHIFT:
            seconds += group.share * self.costs.shift(summary.shift, group)
        return seconds

    def _and_before(self, seconds: float, batch: MicroBatch) -> float:
        """With those of what is to be done before the pass."""
        for place, group in zip(batch.places, self._groups, strict=True):
            if place.moves.n_runs:
                seconds += group.share * self.costs.moves(place.moves)
            if len(place.shift.cells):
                seconds += group.share * self.costs.shift(place.shift, group)
            if place.transfers:
                seconds += group.share * self.transfer(place.transfers)
        return seconds

    def fast_forward(self, fast_forward: FastForward) -> list[FloatArray]:
        """Predicted seconds of each pass of a step, in each of the steps; arrays of shape (steps,)."""
        return self.costs.fast_forward(fast_forward, self._kernel, self._groups)

    def move(self, moves: Moves) -> float:
        """Predicted seconds."""
        return self.costs.moves(moves)

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Predicted seconds."""
        return self.costs.transfers(transfers)
