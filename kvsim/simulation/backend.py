"""Backends: how long a step takes. One predicts, a real one does the work under a stopwatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvsim.costs.cost_model import CostModel
from kvsim.costs.tables import FloatArray
from policies import NO_MOVES, NO_SHIFT, Chunk, FastForward, Group, HostCopy, Kernel, MicroBatch, Moves, Transfer
from policies.compiled import mypyc_attr
from policies.fast_forward.lockstep import Forecast, NextStepReads, PassSummary
from policies.fast_forward.state_sums import StepWeights
from workloads import Request


class Predictor(Protocol):
    """Prices decode steps before they are taken; what a backend must have for the server to fast-forward."""

    def steps(self, planned: FastForward) -> list[FloatArray]:
        """Seconds of each pass of a step, in each of the planned steps; float64 arrays of shape (steps,)."""
        ...

    def took(self, taken: FastForward) -> None:
        """These steps of a plan were taken; they count for the warnings about the measured range."""
        ...

    def mixed_step(self, members: int, reads: NextStepReads, chunks: PassSummary) -> float:
        """Seconds of a pass in which a lockstep batch of ``members`` gets its tokens beside some chunks."""
        ...

    def lockstep_steps(self, members: int, forecast: Forecast) -> Callable[[int], float]:
        """The seconds of the first ``n`` steps of a lockstep batch together, as a function of ``n``."""
        ...

    def lockstep_weights(self, members: int, forecast: Forecast) -> StepWeights:
        """The seconds of each of these steps by what it reads."""
        ...

    def took_lockstep_steps(self, members: int, cells: int) -> None:
        """Steps of a lockstep batch were taken, in which one token was scored against at most ``cells`` cells."""
        ...


class Backend(Protocol):
    """What the server asks for durations. Never chooses a cell."""

    @property
    def predictor(self) -> Predictor | None:
        """Prices steps ahead of time; None for a backend that measures."""
        ...

    @property
    def wants_views(self) -> bool:
        """Whether micro-batches must say which cells attention may see."""
        ...

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """A request takes the sequence ``seq``; ``again``: it was preempted, and goes on where it was."""
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

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Seconds that it takes to copy a whole sequence to or from the host tier; one copy for each cache group."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class PassByPass(ABC):
    """A backend that runs a step as one micro-batch after another."""

    @property
    def predictor(self) -> Predictor | None:
        """None: it measures; a backend that predicts overrides it."""
        return None

    @abstractmethod
    def forward(self, batch: MicroBatch) -> float:
        """Seconds that the micro-batch takes, its moves and rotations included."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Seconds of each micro-batch."""
        return [self.forward(batch) for batch in batches]


@mypyc_attr(allow_interpreted_subclasses=True)
class DelegatingBackend:
    """A backend that hands every call to another one; base class for backends that look on.

    It has no predictor, so that every step passes through it.
    """

    def __init__(self, inner: Backend):
        self._inner = inner

    @property
    def predictor(self) -> Predictor | None:
        """None, so that nothing is priced without the inner backend."""
        return None

    @property
    def wants_views(self) -> bool:
        """The inner backend's flag."""
        return self._inner.wants_views

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Hand the call on."""
        self._inner.begin(seq, request, again=again)

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Hand the call on."""
        self._inner.discard(seq, start, stop)

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Hand the call on."""
        return self._inner.step(step, batches)

    def move(self, moves: Moves) -> float:
        """Hand the call on."""
        return self._inner.move(moves)

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Hand the call on."""
        return self._inner.transfer(transfers)

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Hand the call on."""
        return self._inner.copy(copies)


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedBackend(PassByPass):
    """Predicts from a cost model, single steps as well as steps ahead of time."""

    wants_views = False

    def __init__(self, costs: CostModel, kernel: Kernel, groups: Sequence[Group]):
        self._costs = costs
        self._groups = groups
        self._price = costs.pass_price(kernel, groups)
        self.steps = self._price.of_steps
        self.took = self._price.reached_by
        self.took_lockstep_steps = self._price.reached

    @property
    def predictor(self) -> Predictor:
        """Itself."""
        return self

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Do nothing: a prediction needs no content."""

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Do nothing: a prediction needs no content."""

    def forward(self, batch: MicroBatch) -> float:
        """Predicted seconds of the pass, and of what is to be done before it."""
        seconds = self._price.of_batch(batch)
        for place, group in zip(batch.places, self._groups, strict=True):
            if place.moves.n_runs or len(place.shift.cells) or place.transfers or place.mapped:
                before = self._costs.before_pass(place, group)
                seconds += before.moves_s
                seconds += before.shift_s
                seconds += before.transfers_s
                seconds += before.mapping_s
        return seconds

    def mixed_step(self, members: int, reads: NextStepReads, chunks: PassSummary) -> float:
        """Predicted seconds of the pass, and of what is to be done before it."""
        seconds = self._price.of_mixed_step(members, reads, chunks)
        for group, each in zip(self._groups, (chunks, *chunks.further), strict=True):
            if each.moves is not NO_MOVES:
                seconds += group.share * self._costs.moves(each.moves)
            if each.shift is not NO_SHIFT:
                seconds += group.share * self._costs.shift(each.shift, group)
            if each.transfers:
                seconds += group.share * self._costs.transfers(each.transfers)
            if each.mapped:
                seconds += group.share * self._costs.mapping(each.mapped)
        return seconds

    def lockstep_steps(self, members: int, forecast: Forecast) -> Callable[[int], float]:
        """Predicted seconds, the copies of regions that grow between the steps included."""
        passes = self._price.of_lockstep_steps(members, forecast)
        copies = self._region_copies(forecast)
        if not copies:
            return passes

        def seconds(steps: int) -> float:
            return passes(steps) + sum([copy_s for after, copy_s in copies.items() if after < steps])

        return seconds

    def lockstep_weights(self, members: int, forecast: Forecast) -> StepWeights:
        """Predicted seconds, by the same formula."""
        each, per_score, per_run = self._price.of_lockstep_step(members)
        by_step = partial(self._price.of_each_lockstep_step, members, forecast)
        return StepWeights(each, per_score, per_run, self._region_copies(forecast), by_step)

    def _region_copies(self, forecast: Forecast) -> dict[int, float]:
        """Seconds of the copies of regions that grow between the steps, by the steps before each."""
        if not forecast.region_copies:
            return {}
        share, seconds = self._groups[0].share, dict[int, float]()
        for after, cells in forecast.region_copies:
            seconds[after] = seconds.get(after, 0.0) + share * self._costs.move_runs(1, cells)
        return seconds

    def move(self, moves: Moves) -> float:
        """Predicted seconds."""
        return self._costs.moves(moves)

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Predicted seconds."""
        return self._costs.transfers(transfers)

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Predicted seconds, with what is to be done before."""
        costs, seconds = self._costs, 0.0
        for copy, group in zip(copies, self._groups, strict=True):
            seconds += group.share * (costs.moves(copy.moves) + costs.shift(copy.shift, group))
            seconds += group.share * costs.host_copies(copy)
        return seconds
