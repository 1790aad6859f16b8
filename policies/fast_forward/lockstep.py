"""Sequences that decode in lockstep, each with a token in every step.

One count of steps tells how long all of them are, so that simulating a step costs no more for many than for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from policies.compiled import mypyc_attr
from policies.fast_forward.state_sums import StateSums
from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, IntArray, MicroBatch, Moves, Shift, Transfer


class NextStepReads(NamedTuple):
    """What attention reads for a whole lockstep batch in its next step."""

    scanned: int
    """Scores computed, all against cells that the token's sequence can see."""
    runs: int
    """Contiguous pieces that the scanned cells lie in."""
    max_scanned_per_token: int
    """Cells that one token is scored against, at most."""
    useful: int | None = None
    """Scores against a cell that the token's sequence can see; None: all of them."""
    span: int = 0
    """Cells that all tokens of the pass scan together, where the kernel has them do so."""
    further: Sequence[NextStepReads] = ()
    """What is read in the further cache groups."""


class PassReads(Protocol):
    """What attention reads in one cache group in several steps from the next one on."""

    def total_scanned(self, n: int) -> int:
        """Scores computed in the first ``n`` steps."""
        ...

    def total_useful(self, n: int) -> int:
        """Scores in the first ``n`` steps against a cell that the token's sequence can see."""
        ...

    def total_span(self, n: int) -> int:
        """Cells read at least once in a step, summed over the first ``n`` steps."""
        ...

    def total_runs(self, n: int) -> int:
        """Contiguous pieces read in the first ``n`` steps."""
        ...


class Forecast(PassReads, Protocol):
    """What a whole lockstep batch reads in several steps; its sums are those of the first cache group."""

    @property
    def steps(self) -> int:
        """Steps that can be taken before something must be decided."""
        ...

    @property
    def region_copies(self) -> Sequence[tuple[int, int]]:
        """After how many steps a region is copied, before the next one, and how many cells it has."""
        ...

    def pass_sizes(self, members: int) -> Sequence[int]:
        """How many of ``members`` sequences each pass of a step has."""
        ...

    def passes(
        self, members: int, alike: Callable[[int], Hashable]
    ) -> Sequence[tuple[Sequence[int], Sequence[PassReads]]]:
        """The passes of a step of ``members`` sequences: their sizes, and what they read together by cache group.

        Those are put together for whose sizes ``alike`` gives the same.
        """
        ...


class StepArrays(Protocol):
    """What attention reads in one cache group in each of several steps, one by one; arrays of shape (steps,)."""

    def each_scanned(self, n: int) -> IntArray:
        """Scores computed in each of the first ``n`` steps."""
        ...

    def each_useful(self, n: int) -> IntArray:
        """Scores in each of them against a cell that the token's sequence can see."""
        ...

    def each_span(self, n: int) -> IntArray:
        """Cells read at least once in each of them."""
        ...

    def each_runs(self, n: int) -> IntArray:
        """Contiguous pieces read in each of them."""
        ...


BlockSchedule = Sequence[tuple[int, Mapping[int, Any]]]
"""When members take or give up a block: after how many steps for the first time, and the members by their numbers.

Each does so again after every ``block_size`` steps.
"""


class ReadForecast(NamedTuple):
    """What attention reads for a whole lockstep batch in several steps from the next one on; all sums are exact."""

    steps: int
    """Steps that can be taken before something must be decided."""
    scanned_before: int
    """Scores computed in the step before the first."""
    growth_per_step: int
    """By how many the scores of a step exceed those of the step before."""
    runs_before: int
    """Contiguous pieces that the scanned cells lay in, in the step before the first."""
    growth_drops: Sequence[int] = ()
    """After how many steps the growth lessens, by one for each entry."""
    block_size: int = 1
    """Cells in a block, and so the steps between two blocks of one member."""
    block_starts: BlockSchedule = ()
    """When members take a block, ascending: every member does once in ``block_size`` steps, and reads a run more."""
    block_releases: BlockSchedule = ()
    """When members give up a full block, and read a run less."""
    region_copies: Sequence[tuple[int, int]] = ()
    """After how many steps a region is copied, before the next one, and how many cells it has."""

    def pass_sizes(self, members: int) -> Sequence[int]:
        """All in one."""
        return (members,)

    def passes(
        self, members: int, alike: Callable[[int], Hashable]
    ) -> Sequence[tuple[Sequence[int], Sequence[PassReads]]]:
        """A single one, over a single cache group."""
        return (((members,), (self,)),)

    def total_useful(self, n: int) -> int:
        """All scores."""
        return self.total_scanned(n)

    def total_span(self, n: int) -> int:
        """All scores: each sequence reads its own cells."""
        return self.total_scanned(n)

    def total_scanned(self, n: int) -> int:
        """Scores computed in the first ``n`` steps."""
        scores = n * self.scanned_before + self.growth_per_step * (n * (n + 1) // 2)
        for bend in self.growth_drops:
            if bend < n:
                scores -= (n - bend) * (n - bend + 1) // 2
        return scores - self.block_size * self._since(self.block_releases, n) if self.block_releases else scores

    def total_runs(self, n: int) -> int:
        """Contiguous pieces read in the first ``n`` steps."""
        pieces = n * self.runs_before
        if self.block_starts:
            # Each of the members takes its first block when it has filled those that it has.
            size, members = self.block_size, self.growth_per_step
            room = size * self.runs_before - self.scanned_before
            whole, rest = divmod(n, size)
            pieces += whole * (members * n - room) - members * size * (whole * (whole - 1) // 2)
            for first, takers in self.block_starts:
                if first >= rest:
                    break
                pieces += len(takers) * (rest - first)
        return pieces - self._since(self.block_releases, n) if self.block_releases else pieces

    def _since(self, schedule: BlockSchedule, n: int) -> int:
        """Steps among the first ``n`` from each block's own step on, summed over all blocks of a schedule."""
        size, found = self.block_size, 0
        for first, members in schedule:
            left = n - first
            if left > 0:
                times = (left - 1) // size + 1
                found += len(members) * times * (2 * left - size * (times - 1))
        return found // 2


NO_READS = NextStepReads(0, 0, 0)
"""What an empty lockstep batch reads."""


class PassSummary(NamedTuple):
    """What a clock must know of a forward pass of chunks, a lockstep batch that takes part in it left out."""

    tokens: int
    chunk_reads: list[tuple[int, int, int]]
    """For each chunk: its tokens, the cells of its sequence that each of them scans, and the runs they lie in."""
    moves: Moves = NO_MOVES
    """Cells to copy before the pass."""
    shift: Shift = NO_SHIFT
    """Keys to rotate after the copies, before the pass."""
    useful: Sequence[int] | None = None
    """For each chunk: the cells among the scanned ones that its sequence can see; None: all of them."""
    span: int = 0
    """Cells that all tokens of the pass scan together, where the kernel has them do so."""
    further: Sequence[PassSummary] = ()
    """What is read in the further cache groups."""
    transfers: Sequence[Transfer] = ()
    """Copies between the cache and the host tier to make before the pass."""
    mapped: int = 0
    """Pages of virtual memory to map before the pass."""

    @staticmethod
    def from_micro_batch(batch: MicroBatch) -> PassSummary:
        """Sum up a micro-batch whose chunks scan their own cells."""
        (place,) = batch.places
        reads = place.reads
        rows = list(zip(reads.tokens.tolist(), reads.scanned.tolist(), reads.runs.tolist(), strict=True))
        return PassSummary(
            batch.n_tokens, rows, place.moves, place.shift, transfers=place.transfers, mapped=place.mapped
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class LockstepSequence:
    """A sequence that can be a member of a lockstep batch, and whose length then grows with the batch's steps."""

    __slots__ = ("_length", "join_index", "lockstep_batch")

    def __init__(self) -> None:
        self._length = 0
        """Tokens placed; while a member, less the batch's steps."""
        self.lockstep_batch: LockstepBatch[Any] | None = None
        self.join_index = 0
        """Ascends in the order in which members get their tokens in a step; no two joins have the same."""

    @property
    def length(self) -> int:
        """Tokens placed."""
        return self._length if self.lockstep_batch is None else self._length + self.lockstep_batch.steps

    @length.setter
    def length(self, tokens: int) -> None:
        self._length = tokens if self.lockstep_batch is None else tokens - self.lockstep_batch.steps


M = TypeVar("M", bound=LockstepSequence)

_JOIN_BITS = 40
"""More joins than a run can have, counted in the lower bits of a ``join_index``; above them is the member's place."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LockstepBatch(ABC, Generic[M]):
    """Sequences that get one token each in every step, in order of their places, then of joining."""

    takes_from_pool: ClassVar[bool]
    """Whether members take from a pool that other sequences use as well, so that the order within a step matters."""

    def __init__(self, max_pass_tokens: int) -> None:
        self.max_pass_tokens = max_pass_tokens
        """The most tokens in one forward pass."""
        self.steps = 0
        """Steps taken so far."""
        self.places_whole_steps = False
        """Whether the scheduler has a step placed as a whole, rather than room reserved for one sequence after another:
        then all sequences give up what a step leaves behind before any takes what it needs."""
        self._members: dict[int, M] = {}
        self._order: list[int] | None = []
        """The members in order; None where that must be found anew."""
        self._joins = 0
        self._most: int | None = 0
        """Tokens of the longest member, less all steps; None where that must be computed anew."""

    def __len__(self) -> int:
        return len(self._members)

    @property
    def seqs(self) -> Sequence[int]:
        """The members, in the order in which they get their tokens."""
        if self._order is None:
            members = self._members
            self._order = sorted(members, key=lambda seq: members[seq].join_index)
        return self._order

    @abstractmethod
    def join(self, seq: int, place: int = 0) -> bool:
        """Make a sequence that holds something a member; False where it cannot be one.

        ``place``: members with a lower one get their tokens before it in each step, among equals those that joined
        earlier.
        """

    @abstractmethod
    def leave(self, seq: int) -> None:
        """End a sequence's membership."""

    @abstractmethod
    def blocked(self) -> list[int]:
        """Members whose next token needs a decision, such as a new region."""

    @abstractmethod
    def reserve_step(self) -> bool:
        """Set aside what the next step takes; False, without effect, where there is no room."""

    def reserve_with(self, step: Sequence[Chunk]) -> bool:
        """Set aside what the next step and the chunks of sequences beside it take; False, without effect, if it is not
        certain that there is room. Where ``place`` takes all or nothing, only the members' part."""
        return self.reserve_step()

    @abstractmethod
    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Place chunks as the policy's ``allocate`` does, with room for the batch's tokens in the first pass.

        Raises ``NoSlot``.
        """

    @abstractmethod
    def next_step_reads(self) -> NextStepReads:
        """What the next step reads, if no member is blocked."""

    def members_by_pass(self) -> Sequence[tuple[int, NextStepReads]]:
        """How many members each pass that ``place`` returned has, and what they read in it; later ones have none."""
        return ((len(self._members), self.next_step_reads()),)

    def passes_alone(self) -> Forecast | None:
        """Passes of the step placed last that ``place`` has not returned, which have a token each of members only."""
        return None

    @abstractmethod
    def forecast(self, n: int) -> Forecast | None:
        """What the next steps read: at most ``n`` of them, before something must be decided.

        At least one, if that has been reserved and no member is blocked; or None where the next step must be placed
        by itself.
        """

    def steps_until_release(self) -> int:
        """Steps up to and including the first in which a member may give room back."""
        return 1 << 62

    @abstractmethod
    def max_scanned_per_token(self, n: int) -> int:
        """The most cells that one token is scored against in the next ``n`` steps."""

    @abstractmethod
    def take_step(self) -> None:
        """Take the next step, which must have been reserved."""

    @abstractmethod
    def take_steps(self, forecast: Any, n: int, sums: StateSums | None = None) -> Sequence[Moves]:
        """Take the first ``n`` steps of the latest forecast; returns the copies that it announced for them.

        ``sums``: where to add up how full the cache is after each of these steps.
        """

    def _add(self, seq: int, member: M, place: int) -> None:
        self._joins += 1
        member._length -= self.steps
        most = self._most
        if not self._members or (most is not None and member._length > most):
            self._most = member._length
        member.lockstep_batch, member.join_index = self, (place << _JOIN_BITS) + self._joins
        self._members[seq] = member
        self._order = None

    def _drop(self, seq: int) -> M:
        member = self._members.pop(seq)
        self._order = None
        member.lockstep_batch = None
        if member._length == self._most:
            self._most = None
        member._length += self.steps
        return member

    def _most_tokens(self) -> int:
        """Tokens of the longest member; 0 where there is none."""
        if not self._members:
            return 0
        if self._most is None:
            self._most = max([member._length for member in self._members.values()])
        return self.steps + self._most
