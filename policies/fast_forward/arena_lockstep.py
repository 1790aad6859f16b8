"""Sequences of an arena that decode in lockstep: in each step they take the next free cells in the order of joining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import TILE
from policies.cells.sequence_cells import Row
from policies.fast_forward.forecast import MAX_STEPS, Usages
from policies.fast_forward.lockstep import (
    NO_READS,
    LockstepBatch,
    LockstepSequence,
    NextStepReads,
    PassReads,
    PassSummary,
)
from policies.fast_forward.state_sums import StateSums
from policies.fast_forward.tiles import TileMap
from policies.vocabulary import Chunk, IntArray, MicroBatch, Moves, Shift


class ArenaPlan(NamedTuple):
    """Decode steps of a lockstep batch that a policy has planned; none of them is taken yet."""

    cells: Cells
    """What they take, step after step, for each sequence in turn."""
    scanned: IntArray
    """Scores computed in each step, those of all sequences together; shape (steps,)."""
    runs: IntArray
    """Contiguous pieces that the scanned cells lie in, likewise."""
    span: IntArray
    """Cells that the kernel reads at least once, likewise."""
    max_scanned_per_token: Callable[[int], int]
    """The most cells that one token is scored against in the first so many steps."""
    usages: Callable[[int], Usages]
    """How full the cache is after each of the first so many steps; to be asked before they are taken."""
    take: Callable[[int], None]
    """Take the first ``k`` steps."""


class LockstepHost(Protocol):
    """What a lockstep batch asks of the policy whose sequences it has."""

    capacity: int
    """Cells that can hold tokens."""

    def lockstep_arena(self) -> Arena:
        """The arena that the sequences lie in."""
        ...

    def may_join_lockstep(self, seq: int, tokens: int) -> bool:
        """Whether a sequence of that many tokens takes the cells that the policy's plans say."""
        ...

    def plan_lockstep(self, batch: ArenaLockstepBatch, n: int) -> ArenaPlan | None:
        """At most ``n`` decode steps; None where something must be decided first."""
        ...

    def place_with_lockstep(self, batch: ArenaLockstepBatch, step: Sequence[Chunk]) -> PassSummary | None:
        """Place chunks and a token of each member in one pass; None if they need several. Raises ``NoSlot``."""
        ...

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the chunks of a step."""
        ...


class ArenaForecast:
    """What a lockstep batch reads in several steps from the next one on; all sums are exact."""

    __slots__ = ("_held", "_members", "_plan", "_totals", "steps")

    region_copies: Sequence[tuple[int, int]] = ()

    def __init__(self, plan: ArenaPlan, members: int, held: int):
        """``held``: tokens that the members have before the first step."""
        self.steps = len(plan.span)
        """Steps that can be taken before something must be decided."""
        self._plan = plan
        self._members = members
        self._held = held
        self._totals: dict[str, IntArray] = {}

    def passes(self, members: int) -> Sequence[tuple[int, Sequence[PassReads]]]:
        """The passes of a step: the sequences in each, and what they read."""
        return ((members, (self,)),)

    def total_scanned(self, n: int) -> int:
        """Scores computed in the first ``n`` steps."""
        return self._total("scanned", self._plan.scanned, n)

    def total_useful(self, n: int) -> int:
        """Scores in the first ``n`` steps against a cell that the token's sequence can see."""
        return n * self._held + self._members * (n * (n + 1) // 2)

    def total_span(self, n: int) -> int:
        """Cells read at least once in a step, summed over the first ``n`` steps."""
        return self._total("span", self._plan.span, n)

    def total_runs(self, n: int) -> int:
        """Contiguous pieces read in the first ``n`` steps."""
        return self._total("runs", self._plan.runs, n)

    def _total(self, name: str, by_step: IntArray, n: int) -> int:
        totals = self._totals.get(name)
        if totals is None:
            totals = self._totals[name] = np.add.accumulate(by_step)
        return int(totals[n - 1])


class ArenaSequence(LockstepSequence):
    """A member: its tokens are those of its row in the arena."""

    __slots__ = ()

    def __init__(self, length: int):
        super().__init__()
        self._length = length


class ArenaLockstepBatch(LockstepBatch[ArenaSequence]):
    """Sequences that share no cell and have no gap; each step takes cells as a micro-batch of single tokens does."""

    takes_from_pool = True

    def __init__(self, host: LockstepHost, max_pass_tokens: int):
        super().__init__(max_pass_tokens)
        self._host = host
        self._held = 0
        """Tokens of all members."""
        self._order: list[int] | None = []
        """The members in order; None where that must be found anew."""
        self._plan: ArenaPlan | None = None
        self._reads = NO_READS
        """Of the step that was placed last."""

    @property
    def seqs(self) -> Sequence[int]:
        """The members, in the order in which they get their tokens."""
        if self._order is None:
            members = self._members
            self._order = sorted(members, key=lambda seq: members[seq].join_index)
        return self._order

    @property
    def held(self) -> int:
        """Tokens of all members."""
        return self._held

    def rows(self) -> list[Row]:
        """The members' rows in the arena."""
        rows = self._host.lockstep_arena().rows.rows
        return [rows[seq] for seq in self.seqs]

    def join(self, seq: int, place: int = 0) -> bool:
        """Join, unless the sequence shares cells, has a gap, or holds nothing."""
        row = self._host.lockstep_arena().row_of(seq)
        if row is None or row.end == row.begin or not self._host.may_join_lockstep(seq, row.end):
            return False
        member = ArenaSequence(row.end - row.begin)
        self._add(seq, member, place)
        self._order = None
        self._held += member.length
        return True

    def leave(self, seq: int) -> None:
        """Leave, keeping all cells."""
        self._held -= self._drop(seq).length
        self._order = None

    def blocked(self) -> list[int]:
        """Empty: what must be decided concerns all of them."""
        return []

    def reserve_step(self) -> bool:
        """Whether all members can still go in lockstep; whether there is room is seen when the step is placed."""
        arena = self._host.lockstep_arena()
        rows = arena.rows.rows
        return all(seq in rows or arena.row_of(seq) is not None for seq in self._members)

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Place chunks behind a token of each member. Raises ``NoSlot``."""
        self._reads = NO_READS
        found = self._host.place_with_lockstep(self, step)
        if found is not None:
            return (found,)
        batches = self._host.allocate([*self.chunks(), *step])
        return [self._summary(batch, len(self) if i == 0 else 0) for i, batch in enumerate(batches)]

    def chunks(self) -> list[Chunk]:
        """The members' next tokens."""
        return [Chunk(row.seq, row.end, 1) for row in self.rows()]

    def _summary(self, batch: MicroBatch, members: int) -> PassSummary:
        """Sum up a micro-batch, the first chunks of which are those of ``members``."""
        (place,) = batch.places
        reads = place.reads
        tokens, scanned, useful, runs = (
            array.tolist() for array in (reads.tokens, reads.scanned, reads.useful, reads.runs)
        )
        if members:
            most = max(scanned[:members])
            self.note_reads(sum(scanned[:members]), sum(runs[:members]), most, reads.span)
        rows = list(zip(tokens[members:], scanned[members:], runs[members:], strict=True))
        count = batch.n_tokens - members
        return PassSummary(count, rows, place.moves, place.shift, useful[members:], reads.span)

    def note_reads(self, scanned: int, runs: int, most: int, span: int) -> None:
        """Note what the members read in the step that has just been placed."""
        self._reads = NextStepReads(scanned, runs, most, self._held + len(self._members), span)

    def next_step_reads(self) -> NextStepReads:
        """What members read in the step that has just been placed."""
        return self._reads

    def forecast(self, n: int) -> ArenaForecast | None:
        """Forecast steps up to the next search or compaction; None where the next step must be placed by itself."""
        plan = self._plan = self._host.plan_lockstep(self, min(n, MAX_STEPS))
        return None if plan is None else ArenaForecast(plan, len(self._members), self._held)

    def max_scanned_per_token(self, n: int) -> int:
        """In the steps of the latest forecast."""
        assert self._plan is not None
        return self._plan.max_scanned_per_token(n)

    def take_step(self) -> None:
        """Count the step that has been placed."""
        self.steps += 1
        self._held += len(self._members)

    def take_steps(self, forecast: object, n: int, sums: StateSums | None = None) -> Sequence[Moves]:
        """Take the cells of ``n`` steps; nothing is moved."""
        plan, members = self._plan, len(self._members)
        assert plan is not None
        if sums is not None:
            charged = plan.span if sums.charges == "span" else plan.scanned
            if sums.charges == "useful":
                charged = np.arange(self._held + members, self._held + members * n + 1, members)
            sums.capacity = self._host.capacity
            sums.take_states(plan.usages(n), charged[:n], plan.runs[:n])
        plan.take(n)
        self.steps += n
        self._held += n * len(self._members)
        return ()


def pass_summary(
    batch: ArenaLockstepBatch, step: Sequence[Chunk], span: int, tiles: TileMap | None, moves: Moves, shift: Shift
) -> PassSummary:
    """What is read in a pass that has been placed: a token of each member, and some chunks.

    Under the kernel ``tiled`` if there are ``tiles``, else ``masked``, with a span of ``span`` cells.
    """
    members = len(batch)
    if tiles is None:
        batch.note_reads(members * span, members, span, span)
        rows = [(chunk.n, span, 1) for chunk in step]
        return PassSummary(
            sum([chunk.n for chunk in step]), rows, moves, shift, [chunk.start + chunk.n for chunk in step], span
        )
    batch.note_reads(*tiles.sums(batch.seqs), 0)
    rows, useful, tokens = [], [], 0
    for seq, _, n, _ in step:
        n_tiles, cells, runs = tiles.counts(seq)
        rows.append((n, TILE * n_tiles, runs))
        useful.append(cells)
        tokens += n
    return PassSummary(tokens, rows, moves, shift, useful)
