"""Sequences with a stream each that decode in lockstep: which cells they take follows from the count of steps.

A micro-batch has consecutive sequences only, so that a step makes several passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.cells.reads import TILE
from policies.cells.split_batch import consecutive, split_by_stream
from policies.cells.stream_arenas import StreamArenas
from policies.fast_forward.arena_lockstep import summed_up
from policies.fast_forward.lockstep import NO_READS, LockstepBatch, NextStepReads, PassSummary
from policies.fast_forward.state_sums import StateSums
from policies.fast_forward.stream_forecast import StreamForecast, StreamGroupForecast
from policies.fast_forward.stream_growth import ENDLESS, StreamGrowth, StreamMember
from policies.fast_forward.stream_states import StreamStates
from policies.fast_forward.stream_tiles import StreamTiles
from policies.fast_forward.tile_growth import TileGrowth
from policies.vocabulary import Chunk, MicroBatch, Moves


class StreamHost(Protocol):
    """What a lockstep batch asks of the policy whose sequences it has."""

    capacity: int
    """Cells that can hold tokens."""

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the chunks of a step."""
        ...

    def place_alone(self, group: int, chunk: Chunk) -> None:
        """Place a chunk in its stream of a group, in which there is room."""
        ...


class StreamLockstepBatch(LockstepBatch[StreamMember]):
    """Sequences alone in their streams, under the kernel ``tiled``.

    They share nothing, but their order decides on the passes of a step.
    """

    takes_from_pool = True

    def __init__(self, host: StreamHost, streams: StreamArenas, tiles: StreamTiles, n_ubatch: int):
        # A step makes as many passes as it takes.
        super().__init__(ENDLESS)
        self._host = host
        self._streams = streams
        self._tiles = tiles
        self._n_ubatch = n_ubatch
        self._sums = tuple(TileGrowth() for _ in streams.specs)
        """What they hold, by cache group."""
        self._until: int | None = None
        """The step count at which one of them must be looked at; None where that must be found anew."""
        self._highest: tuple[int, int] | None = None
        """The highest phase of members that grow, and the most tiles of others; None where that must be found anew."""
        self._passes: list[list[int]] | None = None
        """The members in each pass of a step; None where that must be found anew."""
        self._placed: list[tuple[int, NextStepReads]] = []
        """Members, and what they read, in each pass of the step placed last that has other chunks too."""
        self._alone: StreamForecast | None = None
        """The other passes of that step."""

    def join(self, seq: int, place: int = 0) -> bool:
        """Join, unless the sequence has a gap, has lost its beginning, or holds nothing."""
        groups = []
        for group, arena in self._streams.of(seq):
            row, window = arena.row_of(seq), self._streams.specs[group].window
            if row is None or row.end == row.begin or (window is None and row.begin > 0):
                return False
            tile_map = self._tiles.map_of(group, self._streams.stream_of(seq))
            groups.append(StreamGrowth(arena, row, window, tile_map))
        member = StreamMember(seq, tuple(groups))
        self._add(seq, member, place)
        member.look(self.steps)
        self._count(member)
        self._passes = None
        return True

    def leave(self, seq: int) -> None:
        """Leave, keeping all cells."""
        member = self._members[seq]
        member.write(self.steps)
        self._count(member, -1)
        self._drop(seq)
        self._passes = None

    def write_all(self) -> None:
        """Bring all arenas up to date."""
        for member in self._members.values():
            member.write(self.steps)

    def blocked(self) -> list[int]:
        """Empty: what a member cannot take for granted is found when the step is placed."""
        return []

    def reserve_step(self) -> bool:
        """Always: whether there is room is seen when the step is placed."""
        return True

    def _count(self, member: StreamMember, times: int = 1) -> None:
        for group, sums in zip(member.groups, self._sums, strict=True):
            group.count_in(sums, times)
        self._until = self._highest = None

    def _look(self) -> int:
        """Look where members go on from that cannot go on as they did; the steps that all can take as they do."""
        if self._until is None:
            self._until = min([member.until for member in self._members.values()], default=ENDLESS)
        if self._until <= self.steps:
            for member in self._members.values():
                if member.until <= self.steps:
                    member.write(self.steps)
                    self._count(member, -1)
                    member.look(self.steps)
                    self._count(member)
            self._until = min([member.until for member in self._members.values()])
        return self._until - self.steps

    # Placing a step

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Place chunks behind a token of each member. Raises ``NoSlot``."""
        self._look()
        self._alone = None
        if not self._has_room(step):
            return self._place_all(step)
        beside, alone = self._passes_beside(step)
        found, self._placed = list[PassSummary](), []
        for each in beside:
            theirs = [chunk for chunk in each if chunk.seq in self._members]
            others = [chunk for chunk in each if chunk.seq not in self._members]
            reads, summaries = list[NextStepReads](), list[PassSummary]()
            for group in range(len(self._sums)):
                reads.append(self._member_reads(group, theirs))
                summaries.append(self._placed_beside(group, others))
            self._placed.append((len(theirs), reads[0]._replace(further=tuple(reads[1:]))))
            found.append(summaries[0]._replace(further=tuple(summaries[1:])))
        if alone:
            apart = [chunk.seq for each in beside for chunk in each]
            self._alone = StreamForecast(self.reads_of, 1, alone, self._reads_without(apart))
        for member in self._members.values():
            if member.until <= self.steps:
                member.since = member.until = self._until = self.steps + 1
        return found

    def _passes_beside(self, step: Sequence[Chunk]) -> tuple[Sequence[Sequence[Chunk]], list[list[int]]]:
        """The passes of a step that have chunks of ``step`` or of members that must be placed; and those of members
        alone.

        Chunks come behind all members, so that they can only prolong what these form.
        """
        members, apart, alone = self._members, list[int](), list[list[int]]()
        others = {chunk.seq for chunk in step}
        due = self._until is not None and self._until <= self.steps
        for seqs in self._member_passes():
            if seqs[-1] + 1 in others or (due and any(members[seq].until <= self.steps for seq in seqs)):
                apart += seqs
            else:
                alone.append(seqs)
        chunks = [*(Chunk(seq, members[seq].length, 1) for seq in apart), *step]
        return split_by_stream(chunks, self._n_ubatch, sequential=True), alone

    def _has_room(self, step: Sequence[Chunk]) -> bool:
        """Whether ``step``, and members that cannot go on as they did, find room: certain if True."""
        streams, chunks = self._streams, list(step)
        if streams.unreported:
            return False
        if self._until is not None and self._until <= self.steps:
            chunks += [chunk for chunk in self.chunks() if self._members[chunk.seq].until <= self.steps]
        for chunk in chunks:
            for group, arena in streams.of(chunk.seq):
                window = streams.specs[group].window
                if not arena.continues((chunk,)):
                    return False
                if arena.free.total < chunk.n and (
                    window is None or min(chunk.n, self._n_ubatch) > arena.size + 1 - window
                ):
                    return False
        return len({chunk.seq for chunk in chunks}) == len(chunks)

    def _place_all(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Place a step, and the chunks of members, as the policy does."""
        self.write_all()
        self._until = self.steps
        for member in self._members.values():
            member.until = self.steps
        passes = [summed_up(batch, self._members) for batch in self._host.allocate([*self.chunks(), *step])]
        self._placed = [(count, reads) for count, reads, _ in passes]
        for member in self._members.values():
            member.since = member.until = self._until = self.steps + 1
        return [summary for _, _, summary in passes]

    def _member_reads(self, group: int, chunks: Sequence[Chunk]) -> NextStepReads:
        """What members read in a pass of the next step; those that cannot go on as they did are placed."""
        if not chunks:
            return NO_READS
        tiles = runs = most = useful = 0
        steps, window = self.steps + 1, self._streams.specs[group].window
        for chunk in chunks:
            member = self._members[chunk.seq]
            growth = member.groups[group]
            if member.until <= self.steps:
                self._host.place_alone(group, chunk)
                (count, pieces), held = growth.tile_counts(), growth.held_now
            else:
                count, pieces, held = growth.tiles_after(steps), growth.runs, growth.held_after(steps - member.since)
            tiles += count
            runs += pieces
            most = max(most, count)
            useful += held if window is None else min(held, window)
        return NextStepReads(TILE * tiles, runs, TILE * most, useful)

    def _placed_beside(self, group: int, chunks: Sequence[Chunk]) -> PassSummary:
        """Place chunks in a group; what they read."""
        window = self._streams.specs[group].window
        rows, useful, tokens = list[tuple[int, int, int]](), list[int](), 0
        for chunk in chunks:
            self._host.place_alone(group, chunk)
            stream = self._streams.stream_of(chunk.seq)
            tiles, held, runs = self._tiles.map_of(group, stream).counts(chunk.seq)
            if window is not None:
                held = min(held, window + chunk.n - 1)
            rows.append((chunk.n, TILE * tiles, runs))
            useful.append(held)
            tokens += chunk.n
        return PassSummary(tokens, rows, useful=useful)

    def chunks(self) -> list[Chunk]:
        """The members' next tokens."""
        members = self._members
        return [Chunk(seq, members[seq].length, 1) for seq in self.seqs]

    def members_by_pass(self) -> Sequence[tuple[int, NextStepReads]]:
        """Members and their reads in each pass of the step that was placed last."""
        return self._placed

    def passes_alone(self) -> StreamForecast | None:
        """Passes of the step that was placed last which have a token each of members only."""
        return self._alone

    def next_step_reads(self) -> NextStepReads:
        """What members read in the first pass of the step that was placed last."""
        return self._placed[0][1] if self._placed else NO_READS

    # Many steps

    def forecast(self, n: int) -> StreamForecast | None:
        """Forecast steps as long as all members go on as they do; None where one cannot."""
        steps = min(n, self._look())
        if steps < 1 or self._streams.unreported:
            return None
        return StreamForecast(self.reads_of, steps, self._member_passes(), self._reads_without(()))

    def reads_of(self, seqs: Sequence[int]) -> list[StreamGroupForecast]:
        """What some members read from the next step on, by cache group."""
        members, sums = [self._members[seq] for seq in seqs], [TileGrowth() for _ in self._sums]
        for member in members:
            for growth, own in zip(member.groups, sums, strict=True):
                growth.count_in(own)
        return self._group_forecasts(sums, members)

    def _reads_without(self, seqs: Sequence[int]) -> list[StreamGroupForecast]:
        """What all but some members read from the next step on; these may also be sequences that are no members."""
        apart = set(seqs)
        sums = [each.copy() for each in self._sums] if apart else self._sums
        for seq in apart & self._members.keys():
            for growth, own in zip(self._members[seq].groups, sums, strict=True):
                growth.count_in(own, -1)
        return self._group_forecasts(sums, [member for seq, member in self._members.items() if seq not in apart])

    def _group_forecasts(
        self, sums: Sequence[TileGrowth], members: Sequence[StreamMember]
    ) -> list[StreamGroupForecast]:
        return [
            StreamGroupForecast(own.forecast(self.steps), self.steps, group, members, self._streams.specs[group].window)
            for group, own in enumerate(sums)
        ]

    def max_scanned_per_token(self, n: int) -> int:
        """The most cells that one token is scored against in the next ``n`` steps."""
        if self._highest is None:
            groups = [growth for member in self._members.values() for growth in member.groups]
            phases = [growth.phase for growth in groups if growth.phase is not None]
            others = [growth.tiles for growth in groups if growth.phase is None]
            self._highest = max(phases, default=-ENDLESS), max(others, default=0)
        phase, tiles = self._highest
        return TILE * max((self.steps + n + phase) // TILE, tiles)

    def take_step(self) -> None:
        """Count the step that has been placed."""
        self.steps += 1

    def take_steps(self, forecast: object, n: int, sums: StateSums | None = None) -> Sequence[Moves]:
        """Count ``n`` steps; nothing is moved."""
        if sums is not None:
            sums.capacity = self._host.capacity
            sums.take_states(self.states().usages(n), n)
        self.steps += n
        return ()

    def states(self) -> StreamStates:
        """How full the first cache group is, now and after the next steps."""
        growing = {}
        for seq, member in self._members.items():
            if member.until <= self.steps:
                member.write(self.steps)
            else:
                growing[self._streams.stream_of(seq)] = member.groups[0].first, self.steps - member.since
        return StreamStates(self._streams, growing)

    def _member_passes(self) -> list[list[int]]:
        """The members in each pass of a step."""
        if self._passes is None:
            self._passes = consecutive(self.seqs, self._n_ubatch + 1)
        return self._passes
