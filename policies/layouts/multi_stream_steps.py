"""Decode steps in several caches that are planned ahead, and sequences that decode in a single one in lockstep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import padded_span
from policies.cells.sequence_cells import Row
from policies.cells.stream_arenas import CacheSpec, StreamArenas
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import Trigger
from policies.fast_forward.arena_lockstep import ArenaLockstepBatch, ArenaPlan, GroupReads, pass_summary
from policies.fast_forward.forecast import FastForward
from policies.fast_forward.free_cell_path import FreeCellPath, masked_step_reads
from policies.fast_forward.lockstep import NextStepReads, PassSummary
from policies.fast_forward.multi_stream import path_of, plan_steps
from policies.fast_forward.stream_lockstep import StreamLockstepBatch
from policies.fast_forward.stream_tiles import StreamTiles
from policies.fast_forward.tiles import TileSteps
from policies.fast_forward.window_path import WindowPath
from policies.fast_forward.window_tiles import WindowTileSteps
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
        single = self.n_streams == 1 and self.caches[0].window is None
        return self._lockstep if single and self._compactor is None and self.kernel in ("masked", "tiled") else None

    def place_alone(self, group: int, chunk: Chunk) -> None:
        """Place a chunk in its stream of a group, in which there is room."""
        stream, chunks = self._streams.stream_of(chunk.seq), (chunk,)
        cells = self._planner.find_cells(group, stream, chunk.n)
        assert cells is not None, "there is room"
        self._planner.take(group, (stream, chunks, cells))
        if self._tiles is not None:
            self._tiles.add(group, stream, chunks, cells)

    def lockstep_arenas(self) -> Sequence[Arena]:
        """The only arena of each group."""
        return [arenas[0] for arenas in self.arenas]

    def may_join_lockstep(self, seq: int, tokens: int) -> bool:
        """Any sequence may."""
        return True

    def plan_lockstep(self, batch: ArenaLockstepBatch, n: int) -> ArenaPlan | None:
        """``plan_decode_steps`` for a lockstep batch."""
        streams, seqs, steps = self._streams, batch.seqs, n
        if self.wants_compaction or streams.unreported:
            return None
        paths = list[FreeCellPath]()
        for group in range(len(self.caches)):
            paths.append(path_of(streams, group, seqs, steps, contiguous=self.contiguous))
            steps = min(steps, paths[-1].steps)
            if steps < 1:
                return None
        groups, entered = list[GroupReads](), list[TileSteps | WindowTileSteps]()
        for group, (path, spec) in enumerate(zip(paths, self.caches, strict=True)):
            tiles = None if self._tiles is None else self._tiles.steps_along(group, path, seqs, steps)
            if tiles is not None:
                entered.append(tiles)
            if isinstance(tiles, WindowTileSteps):
                groups.append(GroupReads.of(tiles.reads()))
            elif spec.window is not None:
                groups.append(GroupReads.of(masked_step_reads(batch.chunks(), path.spans()[:steps], spec.window)))
            else:
                groups.append(path.group_reads(steps, tiles))

        def take(k: int) -> None:
            streams.attended = set()
            for group, (path, spec) in enumerate(zip(paths, self.caches, strict=True)):
                if isinstance(path, WindowPath):
                    path.overwrite(k)
                path.arena.take_rows(path.cells[: k * path.tokens], batch.rows(group))
                path.arena.head = path.head_after(k)
                streams.attended.add(padded_span(path.arena.top, spec.pad, path.arena.size))
            for each in entered:
                each.take(k)

        return ArenaPlan(groups, paths[0].usages, take)

    def place_with_lockstep(self, batch: ArenaLockstepBatch, step: Sequence[Chunk]) -> Sequence[PassSummary] | None:
        """``allocate`` of micro-batches all of which are certain to find room."""
        members = len(batch)
        tokens = members + sum([chunk.n for chunk in step])
        if self.wants_compaction or not all(arena.continues(step) for arena in self.lockstep_arenas()):
            return None
        parts: list[Sequence[Chunk]] = [step]
        if tokens > self._n_ubatch:
            single = len(self.caches) == 1 and not self.contiguous
            if members >= self._n_ubatch or not single or tokens > self.arenas[0][0].free.total:
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
        members = 0 if batch is None else len(batch)
        tokens = members + sum([chunk.n for chunk in step])
        by_group = list[Cells]()
        for group in range(len(self.caches)):
            cells = self._planner.find_cells(group, 0, tokens)
            if cells is None:
                return None
            by_group.append(cells)
        found = [self._place_in(group, batch, cells, members, step) for group, cells in enumerate(by_group)]
        if batch is not None:
            batch.note_reads([reads for reads, _ in found])
        return found[0][1]._replace(further=tuple([summary for _, summary in found[1:]]))

    def _place_in(
        self, group: int, batch: ArenaLockstepBatch | None, cells: Cells, members: int, step: Sequence[Chunk]
    ) -> tuple[NextStepReads, PassSummary]:
        """Place a micro-batch in a group, into cells that were found; what members and chunks read."""
        spec, arena = self.caches[group], self.arenas[group][0]
        tiles = None if self._tiles is None else self._tiles.map_of(group)
        self._planner.overwrite(group, 0, cells)
        rows = list[Row]()
        if batch is not None:
            rows = batch.rows(group)
            arena.take_rows(cells[:members], rows)
            if tiles is not None:
                tiles.add_step(batch.seqs, cells[:members])
        if step:
            arena.take(cells[members:], step)
            if tiles is not None:
                tiles.add(step, cells[members:])
        arena.head = int(cells[-1]) + 1
        moves, shift = self._streams.settle(group)
        span = padded_span(arena.top, spec.pad, arena.size)
        self._streams.attended.add(span)
        return pass_summary(rows, step, span, tiles, moves, shift, spec.window)
