"""Decode steps in several caches that are planned ahead, and sequences that decode in a single one in lockstep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from policies.cells.arena import Arena
from policies.cells.reads import padded_span
from policies.cells.stream_arenas import CacheSpec, StreamArenas
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import Trigger
from policies.fast_forward.arena_lockstep import ArenaLockstepBatch, ArenaPlan, pass_summary
from policies.fast_forward.forecast import FastForward
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.fast_forward.lockstep import PassSummary
from policies.fast_forward.multi_stream import plan_steps
from policies.fast_forward.stream_lockstep import StreamLockstepBatch
from policies.fast_forward.stream_tiles import StreamTiles
from policies.fast_forward.tiles import TileSteps
from policies.layouts.stream_plans import StepPlanner
from policies.policy import Policy
from policies.vocabulary import Chunk, split_batch


class MultiStreamSteps(Policy):
    """Follows the free cells that the next searches find; the other half of ``MultiStreamPolicy``."""

    caches: tuple[CacheSpec, ...]
    n_streams: int
    wants_compaction: bool
    _streams: StreamArenas
    _tiles: StreamTiles | None
    _planner: StepPlanner
    _lockstep: ArenaLockstepBatch
    _in_streams: StreamLockstepBatch | None
    """The sequences that decode in lockstep, where each has a stream of its own."""
    _compactor: Compactor | None
    trigger: Trigger
    _n_ubatch: int

    @property
    @abstractmethod
    def arenas(self) -> tuple[tuple[Arena, ...], ...]:
        """Indexed by group, then by stream."""

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Along the free cells that the next searches find in all groups and streams, where no trigger is asked."""
        asked = self._compactor is not None and self.trigger.checks_steps
        if self.kernel not in ("masked", "tiled") or asked or self.wants_compaction or self._streams.unreported:
            return None
        if any(chunk.also for chunk in step):
            return None
        return plan_steps(self._streams, step, n, self._n_ubatch, contiguous=self.contiguous, tiles=self._tiles)

    def lockstep_batch(self) -> ArenaLockstepBatch | StreamLockstepBatch | None:
        """The sequences that decode in lockstep, in one cache for all that is never compacted, or each in its own."""
        if self._in_streams is not None:
            return self._in_streams
        single = self.n_streams == 1 and len(self.caches) == 1 and self.caches[0].window is None
        return self._lockstep if single and self._compactor is None and self.kernel in ("masked", "tiled") else None

    def place_alone(self, group: int, chunk: Chunk) -> None:
        """Place a chunk in its stream of a group, in which there is room."""
        stream, chunks = self._streams.stream_of(chunk.seq), (chunk,)
        cells = self._planner.find_cells(group, stream, chunk.n)
        assert cells is not None, "there is room"
        self._planner.take(group, (stream, chunks, cells))
        if self._tiles is not None:
            self._tiles.add(group, stream, chunks, cells)

    def lockstep_arena(self) -> Arena:
        """The only arena."""
        return self.arenas[0][0]

    def may_join_lockstep(self, seq: int, tokens: int) -> bool:
        """Any sequence may."""
        return True

    def plan_lockstep(self, batch: ArenaLockstepBatch, n: int) -> ArenaPlan | None:
        """``plan_decode_steps`` for a lockstep batch."""
        arena, seqs = self.arenas[0][0], batch.seqs
        if self.wants_compaction or self._streams.unreported:
            return None
        path = FreeCellPath(arena, len(seqs), n, self.caches[0].pad, anywhere=not self.contiguous)
        if path.steps < 1:
            return None
        tiles = None if self._tiles is None else TileSteps(self._tiles.map_of(0), seqs, path.cells)

        def take(k: int) -> None:
            arena.take_rows(path.cells[: k * path.tokens], batch.rows())
            self._streams.attended = {padded_span(arena.top, self.caches[0].pad, arena.size)}
            arena.head = path.head_after(k)
            if tiles is not None:
                tiles.take(k)

        return ArenaPlan((path.group_reads(path.steps, tiles),), path.usages, take)

    def place_with_lockstep(self, batch: ArenaLockstepBatch, step: Sequence[Chunk]) -> Sequence[PassSummary] | None:
        """``allocate`` of micro-batches all of which are certain to find room."""
        arena, members = self.arenas[0][0], len(batch)
        tokens = members + sum([chunk.n for chunk in step])
        if self.wants_compaction or not arena.continues(step):
            return None
        parts: list[Sequence[Chunk]] = [step]
        if tokens > self._n_ubatch:
            if members >= self._n_ubatch or self.contiguous or tokens > arena.free.total:
                return None
            parts = list(split_batch(step, self._n_ubatch, members))
        self._streams.attended = set()
        found = list[PassSummary]()
        for part in parts:
            summary = self._place_part(None if found else batch, part)
            if summary is None:
                return None
            found.append(summary)
        return found

    def _place_part(self, batch: ArenaLockstepBatch | None, step: Sequence[Chunk]) -> PassSummary | None:
        """Place one micro-batch of chunks, behind a token of each member if there is a batch; None without room."""
        arena, members = self.arenas[0][0], 0 if batch is None else len(batch)
        cells = self._planner.find_cells(0, 0, members + sum([chunk.n for chunk in step]))
        if cells is None:
            return None
        tiles = None if self._tiles is None else self._tiles.map_of(0)
        if batch is not None:
            arena.take_rows(cells[:members], batch.rows())
            if tiles is not None:
                tiles.add_step(batch.seqs, cells[:members])
        if step:
            arena.take(cells[members:], step)
            if tiles is not None:
                tiles.add(step, cells[members:])
        arena.head = int(cells[-1]) + 1
        moves, shift = self._streams.settle(0)
        span = padded_span(arena.top, self.caches[0].pad, arena.size)
        self._streams.attended.add(span)
        return pass_summary(batch, step, span, tiles, moves, shift)
