"""Sequences of an arena that decode in lockstep: in each step they take the next free cells in the order of joining."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import TILE
from policies.cells.sequence_cells import Row
from policies.fast_forward.forecast import MAX_STEPS, StepReads, Usages
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


class GroupReads(NamedTuple):
    """What decode steps of a lockstep batch read in one cache group."""

    scanned: IntArray
    """Scores computed in each step, those of all sequences together; shape (steps,)."""
    runs: IntArray
    """Contiguous pieces that the scanned cells lie in, likewise."""
    span: IntArray
    """Cells that the kernel reads at least once, likewise."""
    max_scanned_per_token: Callable[[int], int]
    """The most cells that one token is scored against in the first so many steps."""
    useful: IntArray | None = None
    """Scores against a cell that the token's sequence can see, likewise; None: those of all tokens held."""

    @staticmethod
    def of(reads: StepReads) -> GroupReads:
        """What steps read that were planned one by one."""
        most = reads.max_scanned_per_token

        def max_scanned_per_token(n: int) -> int:
            return int(most[:n].max())

        return GroupReads(reads.scanned, reads.runs, reads.span, max_scanned_per_token, reads.useful)


class ArenaPlan(NamedTuple):
    """Decode steps of a lockstep batch that a policy has planned; none of them is taken yet."""

    groups: Sequence[GroupReads]
    """What they read."""
    usages: Callable[[int], Usages]
    """How full the cache is after each of the first so many steps; to be asked before they are taken."""
    take: Callable[[int], None]
    """Take the first ``k`` steps."""


class LockstepHost(Protocol):
    """What a lockstep batch asks of the policy whose sequences it has."""

    capacity: int
    """Cells that can hold tokens."""

    def lockstep_arenas(self) -> Sequence[Arena]:
        """The arenas that the sequences lie in, one in each cache group."""
        ...

    def may_join_lockstep(self, seq: int, tokens: int) -> bool:
        """Whether a sequence of that many tokens takes the cells that the policy's plans say."""
        ...

    def plan_lockstep(self, batch: ArenaLockstepBatch, n: int) -> ArenaPlan | None:
        """At most ``n`` decode steps; None where something must be decided first."""
        ...

    def place_with_lockstep(self, batch: ArenaLockstepBatch, step: Sequence[Chunk]) -> Sequence[PassSummary] | None:
        """Place chunks behind a token of each member, which are all in the first pass. Raises ``NoSlot``.

        None, and nothing has changed, where ``allocate`` must do so.
        """
        ...

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the chunks of a step."""
        ...


class GroupForecast:
    """What a lockstep batch reads in one cache group in several steps from the next one on; all sums are exact."""

    __slots__ = ("_held", "_members", "_reads", "_totals", "steps")

    def __init__(self, reads: GroupReads, members: int, held: int):
        """``held``: tokens that the members have before the first step."""
        self.steps = len(reads.span)
        """Steps that can be taken before something must be decided."""
        self._reads = reads
        self._members = members
        self._held = held
        self._totals: dict[str, IntArray] = {}

    def total_scanned(self, n: int) -> int:
        """Scores computed in the first ``n`` steps."""
        return self._total("scanned", self._reads.scanned, n)

    def total_useful(self, n: int) -> int:
        """Scores in the first ``n`` steps against a cell that the token's sequence can see."""
        if self._reads.useful is not None:
            return self._total("useful", self._reads.useful, n)
        return n * self._held + self._members * (n * (n + 1) // 2)

    def total_span(self, n: int) -> int:
        """Cells read at least once in a step, summed over the first ``n`` steps."""
        return self._total("span", self._reads.span, n)

    def total_runs(self, n: int) -> int:
        """Contiguous pieces read in the first ``n`` steps."""
        return self._total("runs", self._reads.runs, n)

    def each_scanned(self, n: int) -> IntArray:
        """Scores computed in each of the first ``n`` steps; shape (n,)."""
        return self._reads.scanned[:n]

    def each_useful(self, n: int) -> IntArray:
        """Scores in each of them against a cell that the token's sequence can see; shape (n,)."""
        if self._reads.useful is not None:
            return self._reads.useful[:n]
        return np.arange(self._held + self._members, self._held + self._members * n + 1, self._members)

    def each_span(self, n: int) -> IntArray:
        """Cells read at least once in each of them; shape (n,)."""
        return self._reads.span[:n]

    def each_runs(self, n: int) -> IntArray:
        """Contiguous pieces read in each of them; shape (n,)."""
        return self._reads.runs[:n]

    def _total(self, name: str, by_step: IntArray, n: int) -> int:
        totals = self._totals.get(name)
        if totals is None:
            totals = self._totals[name] = np.add.accumulate(by_step)
        return int(totals[n - 1])


class ArenaForecast(GroupForecast):
    """What is read in the first cache group, and in the further ones."""

    __slots__ = ("_further",)

    region_copies: ClassVar[Sequence[tuple[int, int]]] = ()

    def __init__(self, groups: Sequence[GroupReads], members: int, held: int):
        """``held``: tokens that the members have before the first step."""
        super().__init__(groups[0], members, held)
        self._further = [GroupForecast(reads, members, held) for reads in groups[1:]]

    def pass_sizes(self, members: int) -> Sequence[int]:
        """All in one."""
        return (members,)

    def passes(
        self, members: int, alike: Callable[[int], Hashable]
    ) -> Sequence[tuple[Sequence[int], Sequence[PassReads]]]:
        """A single one."""
        return (((members,), (self, *self._further)),)


class ArenaSequence(LockstepSequence):
    """A member: its tokens are those of its row in the arena."""

    __slots__ = ()

    def __init__(self, length: int):
        super().__init__()
        self._length = length


class ArenaLockstepBatch(LockstepBatch[ArenaSequence]):
    """Sequences that share no cell and have no gap; each step takes cells as a micro-batch of single tokens does."""

    takes_from_pool: ClassVar[bool] = True

    def __init__(self, host: LockstepHost, max_pass_tokens: int):
        super().__init__(max_pass_tokens)
        self._host = host
        self._held = 0
        """Tokens of all members."""
        self._plan: ArenaPlan | None = None
        self._reads = NO_READS
        """Reads of the step that was placed last."""

    @property
    def held(self) -> int:
        """Tokens of all members."""
        return self._held

    def rows(self, group: int = 0) -> list[Row]:
        """The members' rows in the arena of a cache group."""
        rows = self._host.lockstep_arenas()[group].rows.rows
        return [rows[seq] for seq in self.seqs]

    def join(self, seq: int, place: int = 0) -> bool:
        """Join, unless the sequence shares cells, has a gap, or holds nothing."""
        held = [arena.row_of(seq) for arena in self._host.lockstep_arenas()]
        rows = [row for row in held if row is not None and row.end > row.begin]
        if len(rows) < len(held) or not self._host.may_join_lockstep(seq, rows[0].end):
            return False
        member = ArenaSequence(rows[0].end - rows[0].begin)
        self._add(seq, member, place)
        self._held += member.length
        return True

    def leave(self, seq: int) -> None:
        """Leave, keeping all cells."""
        self._held -= self._drop(seq).length

    def blocked(self) -> list[int]:
        """Empty: what must be decided concerns all of them."""
        return []

    def reserve_step(self) -> bool:
        """Whether all members can still go in lockstep; whether there is room is seen when the step is placed."""
        return all(
            seq in arena.rows.rows or arena.row_of(seq) is not None
            for arena in self._host.lockstep_arenas()
            for seq in self._members
        )

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Place chunks behind a token of each member. Raises ``NoSlot``."""
        self._reads = NO_READS
        found = self._host.place_with_lockstep(self, step)
        if found is not None:
            return found
        batches = self._host.allocate([*self.chunks(), *step])
        passes = [summed_up(batch, self._members if i == 0 else ()) for i, batch in enumerate(batches)]
        self._reads = passes[0][1] if passes else NO_READS
        return [summary for _, _, summary in passes]

    def chunks(self) -> list[Chunk]:
        """The members' next tokens."""
        return [Chunk(row.seq, row.end, 1) for row in self.rows()]

    def note_reads(self, reads: Sequence[NextStepReads]) -> None:
        """Note what the members read in each cache group in the step that has just been placed."""
        self._reads = reads[0]._replace(further=tuple(reads[1:]))

    def next_step_reads(self) -> NextStepReads:
        """What members read in the step that has just been placed."""
        return self._reads

    def forecast(self, n: int) -> ArenaForecast | None:
        """Forecast steps up to the next search or compaction; None where the next step must be placed by itself."""
        plan = self._plan = self._host.plan_lockstep(self, min(n, MAX_STEPS))
        return None if plan is None else ArenaForecast(plan.groups, len(self._members), self._held)

    def max_scanned_per_token(self, n: int) -> int:
        """In the steps of the latest forecast."""
        assert self._plan is not None
        return max([reads.max_scanned_per_token(n) for reads in self._plan.groups])

    def take_step(self) -> None:
        """Count the step that has been placed."""
        self.steps += 1
        self._held += len(self._members)

    def take_steps(self, forecast: object, n: int, sums: StateSums | None = None) -> Sequence[Moves]:
        """Take the cells of ``n`` steps; nothing is moved."""
        plan = self._plan
        assert plan is not None
        if sums is not None:
            sums.capacity = self._host.capacity
            sums.take_states(plan.usages(n), n)
        plan.take(n)
        self.steps += n
        self._held += n * len(self._members)
        return ()


def summed_up(batch: MicroBatch, members: Container[int]) -> tuple[int, NextStepReads, PassSummary]:
    """A micro-batch, as its tokens of members of a lockstep batch, what they read, and the other chunks."""
    own = [chunk.seq in members for chunk in batch.chunks]
    count = sum(own)
    reads, summaries = list[NextStepReads](), list[PassSummary]()
    for place in batch.places:
        scores = pieces = most = visible = 0
        rows, seen = list[tuple[int, int, int]](), list[int]()
        columns = (place.reads.tokens, place.reads.scanned, place.reads.useful, place.reads.runs)
        for mine, n, scanned, useful, runs in zip(own, *(array.tolist() for array in columns), strict=True):
            if mine:
                scores += scanned
                pieces += runs
                most = max(most, scanned)
                visible += useful
            else:
                rows.append((n, scanned, runs))
                seen.append(useful)
        span = place.reads.span
        reads.append(NextStepReads(scores, pieces, most, visible, span) if count else NO_READS)
        summaries.append(PassSummary(batch.n_tokens - count, rows, place.moves, place.shift, seen, span))
    further = tuple(reads[1:]) if count else ()
    return count, reads[0]._replace(further=further), summaries[0]._replace(further=tuple(summaries[1:]))


def pass_summary(
    rows: Sequence[Row],
    step: Sequence[Chunk],
    span: int,
    tiles: TileMap | None,
    moves: Moves,
    shift: Shift,
    window: int | None = None,
) -> tuple[NextStepReads, PassSummary]:
    """What is read in one cache group in a pass that has been placed: by a token of each row, and by some chunks.

    Under the kernel ``tiled`` if there are ``tiles``, else ``masked``, with a span of ``span`` cells. ``window``:
    tokens that attention looks back.
    """
    if tiles is None:
        held = [row.end for row in rows]
        counts = [(chunk.n, span, 1) for chunk in step]
        useful = [chunk.start + chunk.n for chunk in step]
        scanned, runs, most = len(rows) * span, len(rows), span
    else:
        held = [row.end - row.begin for row in rows]
        scanned, runs, most = tiles.sums([row.seq for row in rows])
        span, counts, useful = 0, [], []
        for seq, _, n, _ in step:
            n_tiles, cells, pieces = tiles.counts(seq)
            counts.append((n, TILE * n_tiles, pieces))
            useful.append(cells)
    if window is not None:
        held = [min(n, window) for n in held]
        useful = [min(n, window + chunk.n - 1) for n, chunk in zip(useful, step, strict=True)]
    tokens = sum([chunk.n for chunk in step])
    reads = NextStepReads(scanned, runs, most, sum(held), span) if rows else NO_READS
    return reads, PassSummary(tokens, counts, moves, shift, useful, span)
