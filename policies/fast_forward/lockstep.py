"""Sequences that decode in lockstep: while each of them gets a token in every step, one count of steps tells how far
all have come, and a step costs no more for many of them than for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, MicroBatch, Moves, Shift


class NextStepReads(NamedTuple):
    """What attention reads for all of a lockstep batch together in its next step."""

    scanned: int
    """Scores computed, all of them against cells that the token's sequence can see."""
    runs: int
    """Contiguous pieces that the scanned cells lie in."""
    max_scanned_per_token: int
    """Cells that one token is scored against, at most."""


BlockSchedule = Sequence[tuple[int, Mapping[int, Any]]]
"""After how many steps these members, by their numbers, take or give up a block, for the first time and then again and
again."""


class ReadForecast(NamedTuple):
    """What attention reads for all of a lockstep batch together in some steps from the next one on; all sums are
    exact."""

    steps: int
    scanned_before: int
    """Scores that were computed in the step before."""
    growth_per_step: int
    """By how many there are more in each further step."""
    runs_before: int
    """Contiguous pieces that the scanned cells lay in."""
    growth_drops: Sequence[int] = ()
    """After how many steps the growth lessens by one, and again by one."""
    block_size: int = 1
    """Cells in a block, and so the steps between two blocks of one member."""
    block_starts: BlockSchedule = ()
    """Who takes a block when, ascending: all do, once in so many steps, and their cells are one piece more."""
    block_releases: BlockSchedule = ()
    """Who gives up a full block when: one piece less."""
    region_copies: Sequence[tuple[int, int]] = ()
    """After how many steps so many cells in a row are copied, before the next one."""

    def total_scanned(self, n: int) -> int:
        """Computed in the first ``n`` steps."""
        scores = n * self.scanned_before + self.growth_per_step * (n * (n + 1) // 2)
        for bend in self.growth_drops:
            if bend < n:
                scores -= (n - bend) * (n - bend + 1) // 2
        return scores - self.block_size * self._since(self.block_releases, n) if self.block_releases else scores

    def total_runs(self, n: int) -> int:
        """Read in the first ``n`` steps."""
        pieces = n * self.runs_before
        if self.block_starts:
            # Each of the members takes its first block when it has filled those that it has.
            size, members = self.block_size, self.growth_per_step
            room = size * self.runs_before - self.scanned_before
            whole, rest = divmod(n, size)
            pieces += whole * (members * n - room) - members * size * (whole * (whole - 1) // 2)
            for first, who in self.block_starts:
                if first >= rest:
                    break
                pieces += len(who) * (rest - first)
        return pieces - self._since(self.block_releases, n) if self.block_releases else pieces

    def _since(self, dues: BlockSchedule, n: int) -> int:
        """How many of the first ``n`` steps there are from each block on, that one's included; over all blocks."""
        size, found = self.block_size, 0
        for first, who in dues:
            left = n - first
            if left > 0:
                times = (left - 1) // size + 1
                found += len(who) * times * (2 * left - size * (times - 1))
        return found // 2


NO_READS = NextStepReads(0, 0, 0)
"""What a lockstep batch of none reads."""


class PassSummary(NamedTuple):
    """A forward pass of some chunks, but for a lockstep batch that gets its tokens in it too: as much as a clock must
    know."""

    tokens: int
    chunk_reads: list[tuple[int, int, int]]
    """Of each chunk: its tokens, the cells that each of them scans, all of them its own, and the runs they lie in."""
    moves: Moves = NO_MOVES
    """Cells to copy before the pass."""
    shift: Shift = NO_SHIFT
    """Keys to rotate after that, before the pass."""

    @staticmethod
    def from_micro_batch(batch: MicroBatch) -> PassSummary:
        """Of a micro-batch whose chunks scan their own cells."""
        (place,) = batch.places
        reads = place.reads
        rows = list(zip(reads.tokens.tolist(), reads.scanned.tolist(), reads.runs.tolist(), strict=True))
        return PassSummary(batch.n_tokens, rows, place.moves, place.shift)


class LockstepSequence:
    """What a sequence holds; as long as it is in a lockstep batch, its length goes with the lockstep batch's steps."""

    __slots__ = ("_length", "join_index", "lockstep_batch")

    def __init__(self) -> None:
        self._length = 0
        """Tokens placed; in a lockstep batch, less its steps."""
        self.lockstep_batch: LockstepBatch[Any] | None = None
        self.join_index = 0
        """Of joining it: the order in which members get their tokens in a step."""

    @property
    def length(self) -> int:
        """Tokens placed."""
        return self._length if self.lockstep_batch is None else self._length + self.lockstep_batch.steps

    @length.setter
    def length(self, tokens: int) -> None:
        self._length = tokens if self.lockstep_batch is None else tokens - self.lockstep_batch.steps


M = TypeVar("M", bound=LockstepSequence)


class LockstepBatch(ABC, Generic[M]):
    """Those who decode in lockstep, in the order of their joining: in each step all of them get one token."""

    takes_from_pool: bool
    """Whether members take from what others may want as well, so that it matters who comes first in a step."""

    def __init__(self, max_pass_tokens: int) -> None:
        self.max_pass_tokens = max_pass_tokens
        """The most tokens in one forward pass."""
        self.steps = 0
        """Taken so far."""
        self._members: dict[int, M] = {}
        self._joins = 0
        self._most: int | None = 0
        """Tokens of the longest member, less all steps; None where it must be looked for."""

    def __len__(self) -> int:
        return len(self._members)

    @abstractmethod
    def join(self, seq: int) -> bool:
        """A sequence that holds something decodes with the others from now on; False where it cannot."""

    @abstractmethod
    def leave(self, seq: int) -> None:
        """It does so no longer."""

    @abstractmethod
    def blocked(self) -> list[int]:
        """Members for whose next token something must be decided."""

    @abstractmethod
    def reserve_step(self) -> bool:
        """Set aside what the next step takes; False, and nothing happens, where there is no room."""

    @abstractmethod
    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Give every token of some chunks a cell, as the policy's ``allocate``; the first of the forward passes has
        room for the lockstep batch's tokens too. Raises ``NoSlot``."""

    @abstractmethod
    def next_step_reads(self) -> NextStepReads:
        """What the next step reads, if nobody is stuck."""

    @abstractmethod
    def forecast(self, n: int) -> ReadForecast:
        """As many of the next ``n`` steps as can be taken before something is to be decided; at least one, if that has
        been reserved and nobody is stuck."""

    def steps_until_release(self) -> int:
        """Steps up to the first in which a member may give room back, that one included."""
        return 1 << 62

    @abstractmethod
    def max_scanned_per_token(self, n: int) -> int:
        """Cells that one token is scored against in the next ``n`` steps, at most."""

    @abstractmethod
    def take_step(self) -> None:
        """Take the next step, which must have been reserved."""

    @abstractmethod
    def take_steps(self, forecast: ReadForecast, n: int) -> Sequence[Moves]:
        """Take so many of the steps that have just been foreseen; the copies that were foreseen for them."""

    def _add(self, seq: int, member: M) -> None:
        self._joins += 1
        member._length -= self.steps
        most = self._most
        if not self._members or (most is not None and member._length > most):
            self._most = member._length
        member.lockstep_batch, member.join_index, self._members[seq] = self, self._joins, member

    def _drop(self, seq: int) -> M:
        member = self._members.pop(seq)
        member.lockstep_batch = None
        if member._length == self._most:
            self._most = None
        member._length += self.steps
        return member

    def _most_tokens(self) -> int:
        """That a member holds; 0 where there is none."""
        if not self._members:
            return 0
        if self._most is None:
            self._most = max([member._length for member in self._members.values()])
        return self.steps + self._most
