"""Sequences that decode in lockstep: while each of them gets a token in every step, one count of steps tells how far
all have come, and a step costs no more for many of them than for one."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, IntArray, MicroBatch, Moves, Shift


class Ahead(NamedTuple):
    """What attention reads for all of a crew together in its next step."""

    scanned: int
    """Scores computed, all of them against cells that the token's sequence can see."""
    runs: int
    """Contiguous pieces that the scanned cells lie in."""
    longest: int
    """Cells that one token is scored against, at most."""


class Course(NamedTuple):
    """What attention reads for all of a crew together in some steps from the next one on."""

    steps: int
    scanned: int
    """Scores that were computed in the step before."""
    growth: int
    """By how many there are more in each further step."""
    bends: Sequence[int]
    """After how many steps the growth lessens by one, and again by one; ascending."""
    runs: int
    """Contiguous pieces that the scanned cells lay in."""
    begun: IntArray | None
    """How many more they are in each step than before the first, shape (steps,); None where they stay as many."""
    fewer: IntArray | None = None
    """How many scores are not computed in each step because cells were given up on the way, shape (steps,); None where
    none are."""


NOBODY = Ahead(0, 0, 0)
"""What a crew of none reads."""


class Brief(NamedTuple):
    """A forward pass of some chunks, but for a crew that gets its tokens in it too: as much as a clock must know."""

    tokens: int
    rows: list[tuple[int, int, int]]
    """Of each chunk: its tokens, the cells that each of them scans, all of them its own, and the runs they lie in."""
    moves: Moves = NO_MOVES
    """Cells to copy before the pass."""
    shift: Shift = NO_SHIFT
    """Keys to rotate after that, before the pass."""

    @staticmethod
    def of(batch: MicroBatch) -> Brief:
        """Of a micro-batch whose chunks scan their own cells."""
        (place,) = batch.places
        reads = place.reads
        rows = list(zip(reads.tokens.tolist(), reads.scanned.tolist(), reads.runs.tolist(), strict=True))
        return Brief(batch.n_tokens, rows, place.moves, place.shift)


class Member:
    """What a sequence holds; as long as it is in a crew, its length goes with the crew's steps."""

    __slots__ = ("_length", "crew", "turn")

    def __init__(self) -> None:
        self._length = 0
        """Tokens placed; in a crew, less its steps."""
        self.crew: Crew[Any] | None = None
        self.turn = 0
        """Of joining it: the order in which members get their tokens in a step."""

    @property
    def length(self) -> int:
        """Tokens placed."""
        return self._length if self.crew is None else self._length + self.crew.steps

    @length.setter
    def length(self, tokens: int) -> None:
        self._length = tokens if self.crew is None else tokens - self.crew.steps


M = TypeVar("M", bound=Member)


class Crew(ABC, Generic[M]):
    """Those who decode in lockstep, in the order of their joining: in each step all of them get one token."""

    takes: bool
    """Whether members take from what others may want as well, so that it matters who comes first in a step."""

    def __init__(self, widest: int) -> None:
        self.widest = widest
        """The most tokens in one forward pass."""
        self.steps = 0
        """Taken so far."""
        self._members: dict[int, M] = {}
        self._turn = 0
        self._starts: list[tuple[int, int]] = []
        """A heap of, for each member at least: at how many steps it held nothing, and its number."""

    def __len__(self) -> int:
        return len(self._members)

    @abstractmethod
    def join(self, seq: int) -> bool:
        """A sequence that holds something decodes with the others from now on; False where it cannot."""

    @abstractmethod
    def leave(self, seq: int) -> None:
        """It does so no longer."""

    @abstractmethod
    def stuck(self) -> list[int]:
        """Members for whose next token something must be decided."""

    @abstractmethod
    def reserve(self) -> bool:
        """Set aside what the next step takes; False, and nothing happens, where there is no room."""

    @abstractmethod
    def place(self, step: Sequence[Chunk]) -> Sequence[Brief]:
        """Give every token of some chunks a cell, as the policy's ``allocate``; the first of the forward passes has
        room for the crew's tokens too. Raises ``NoSlot``."""

    @abstractmethod
    def ahead(self) -> Ahead:
        """What the next step reads, if nobody is stuck."""

    @abstractmethod
    def course(self, n: int) -> Course:
        """As many of the next ``n`` steps as can be taken before something is to be decided; at least one, if that has
        been reserved and nobody is stuck."""

    @abstractmethod
    def longest(self, n: int) -> int:
        """Cells that one token is scored against in the next ``n`` steps, at most."""

    @abstractmethod
    def take(self, n: int) -> int:
        """Take so many steps, which must have been foreseen, or reserved; the scores computed in them, all against
        cells that the token's sequence can see."""

    def _add(self, seq: int, member: M) -> None:
        self._turn += 1
        member.crew, member.turn, self._members[seq] = self, self._turn, member
        heapq.heappush(self._starts, (self.steps - member._length, seq))
        member._length -= self.steps

    def _drop(self, seq: int) -> M:
        member = self._members.pop(seq)
        member.crew = None
        member._length += self.steps
        return member

    def _most_tokens(self) -> int:
        """That a member holds; 0 where there is none."""
        if not self._members:
            return 0
        starts, members = self._starts, self._members
        while (seq := starts[0][1]) not in members or members[seq]._length != -starts[0][0]:
            heapq.heappop(starts)
        return self.steps - starts[0][0]
