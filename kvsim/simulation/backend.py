"""Backends: how long a step takes. One predicts, a real one does the work under a stopwatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from kvsim.costs.cost_model import CostModel
from kvsim.costs.pass_price import PassPrice
from policies import Chunk, Group, HostCopy, Kernel, MicroBatch, Moves, Transfer
from policies.compiled import mypyc_attr
from policies.placement.rule import PassReads
from workloads import Request


class Backend(Protocol):
    """What the server asks for durations. Never chooses a cell."""

    @property
    def price(self) -> PassPrice | None:
        """Prices passes of which only the reads are known; None for a backend that measures them."""
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

    def before_pass(self, work: PassReads) -> float:
        """Seconds of what is to be done before a pass that ``price`` prices."""
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
    def price(self) -> PassPrice | None:
        """None: it measures; a backend that predicts overrides it."""
        return None

    def before_pass(self, work: PassReads) -> float:
        """Nothing: what is done before a pass is measured with it."""
        return 0.0

    @abstractmethod
    def forward(self, batch: MicroBatch) -> float:
        """Seconds that the micro-batch takes, its moves and rotations included."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Seconds of each micro-batch."""
        return [self.forward(batch) for batch in batches]


@mypyc_attr(allow_interpreted_subclasses=True)
class DelegatingBackend:
    """A backend that hands every call to another one; base class for backends that look on.

    It prices nothing itself, so that every step passes through it.
    """

    def __init__(self, inner: Backend):
        self._inner = inner

    @property
    def price(self) -> PassPrice | None:
        """None, so that nothing is priced without the inner backend."""
        return None

    def before_pass(self, work: PassReads) -> float:
        """Hand the call on."""
        return self._inner.before_pass(work)

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
    """Predicts from a cost model."""

    wants_views = False

    def __init__(self, costs: CostModel, kernel: Kernel, groups: Sequence[Group]):
        self._costs = costs
        self._groups = groups
        self._price = costs.pass_price(kernel, groups)

    @property
    def price(self) -> PassPrice:
        """By the cost model."""
        return self._price

    def begin(self, seq: int, request: Request, *, again: bool = False) -> None:
        """Do nothing: a prediction needs no content."""

    def discard(self, seq: int, start: int, stop: int) -> None:
        """Do nothing: a prediction needs no content."""

    def forward(self, batch: MicroBatch) -> float:
        """Predicted seconds of the pass, and of what is to be done before it."""
        work = PassReads.of(batch)
        return self._price.seconds(work) + self.before_pass(work)

    def before_pass(self, work: PassReads) -> float:
        """Predicted seconds."""
        seconds = 0.0
        for reads, group in zip(work.groups, self._groups, strict=True):
            if reads.prepares:
                before = self._costs.before_pass(reads, group)
                seconds += before.moves_s + before.shift_s + before.transfers_s + before.mapping_s
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
