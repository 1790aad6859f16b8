"""Decode steps of a unified cache that are planned ahead, and sequences that decode in it in lockstep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import padded_span
from policies.compaction.planner import CompactionPlanner
from policies.compaction.triggers import Trigger, TriggerForecast
from policies.fast_forward.arena_lockstep import ArenaLockstepBatch, ArenaPlan, pass_summary
from policies.fast_forward.forecast import DecodePass, FastForward, Usages
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.fast_forward.lockstep import PassSummary
from policies.fast_forward.tiles import TileMap, TileSteps
from policies.policy import Policy
from policies.vocabulary import (
    Chunk,
    MicroBatch,
    NoSlot,
)


class _Planned(NamedTuple):
    """Decode steps that can be taken."""

    path: FreeCellPath
    steps: int
    forecast: TriggerForecast | None
    """What the trigger was asked; None if it has ruled out all steps, or need not be asked."""
    due_at_once: bool
    """Whether compactions are due that would move nothing."""


class UnifiedSteps(Policy):
    """Follows the free cells that the next searches find; the other half of ``UnifiedPolicy``."""

    arena: Arena
    trigger: Trigger
    wants_compaction: bool
    """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
    attended: int
    """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
    _compaction: CompactionPlanner
    _tiles: TileMap | None
    _lockstep: ArenaLockstepBatch
    _n_ubatch: int
    _pad: int

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Follows the free cells that the next searches find, as long as no compaction is due that moves cells."""
        if len(step) > self._n_ubatch or not self._generates(step):
            return None
        seqs = [seq for chunk in step for seq in chunk.seqs]
        planned = self._plan(len(step), n, seqs)
        if planned is None or planned.steps < 2:
            return None
        path, ordered = planned.path, self._ordered(step)
        tiles = self._tile_steps(path, planned.steps, [chunk.seq for chunk in ordered])

        def take(k: int, look: bool) -> Usages | None:
            usages = path.usages(k) if look else None
            cells = path.cells[: k * path.tokens]
            self._take_planned(planned, k, partial(self.arena.take_steps, cells, ordered, k))
            if tiles is not None:
                tiles.take(k)
            return usages

        reads = path.reads(step, planned.steps) if tiles is None else tiles.reads()
        return FastForward((DecodePass(len(step), (reads,)),), take)

    def lockstep_batch(self) -> ArenaLockstepBatch | None:
        """The sequences that decode in lockstep, where the kernel reads as a forecast says."""
        return self._lockstep if self.kernel in ("masked", "tiled") else None

    def lockstep_arenas(self) -> Sequence[Arena]:
        """The only arena."""
        return (self.arena,)

    def may_join_lockstep(self, seq: int, tokens: int) -> bool:
        """Any sequence may."""
        return True

    def plan_lockstep(self, batch: ArenaLockstepBatch, n: int) -> ArenaPlan | None:
        """``plan_decode_steps`` for a lockstep batch."""
        planned = self._plan(len(batch), n, batch.seqs)
        if planned is None:
            return None
        path = planned.path
        tiles = self._tile_steps(path, planned.steps, batch.seqs)

        def take(k: int) -> None:
            self._take_planned(planned, k, partial(self.arena.take_rows, path.cells[: k * path.tokens], batch.rows()))
            if tiles is not None:
                tiles.take(k)

        return ArenaPlan((path.group_reads(planned.steps, tiles),), path.usages, take)

    def place_with_lockstep(self, batch: ArenaLockstepBatch, step: Sequence[Chunk]) -> Sequence[PassSummary] | None:
        """``allocate`` of one micro-batch."""
        arena, compaction, members = self.arena, self._compaction, len(batch)
        tokens = members + sum([chunk.n for chunk in step])
        if tokens > self._n_ubatch:
            return None
        if compaction.checks_steps and compaction.due_before_step(tokens):
            self.wants_compaction = True
        cells = self._find_room(lambda: self._find_beside(members, step))
        if cells is None:
            raise self._no_room(tokens, ())
        arena.take_rows(cells[:members], batch.rows())
        if self._tiles is not None:
            self._tiles.add_step(batch.seqs, cells[:members])
        if step:
            self._take(step, cells[members:])
        else:
            end = int(cells[-1]) + 1
            arena.head = end if end < arena.size else 0
        moves, shift = arena.settle()
        self.attended = span = padded_span(arena.top, self._pad, arena.size)
        reads, found = pass_summary(batch.rows(), step, span, self._tiles, moves, shift)
        batch.note_reads((reads,))
        if compaction.checks_steps and compaction.due_after_step(tokens):
            self.wants_compaction = True
        return (found,)

    def _plan(self, tokens: int, n: int, seqs: Sequence[int]) -> _Planned | None:
        """At most ``n`` decode steps of ``tokens`` tokens each, of ``seqs``; None where something must be decided."""
        arena, compaction, trigger = self.arena, self._compaction, self.trigger
        if not arena.pending.is_empty or (self._tiles is None and self.kernel != "masked"):
            return None
        path = self._free_cell_path(tokens, n)
        if path is None or path.steps < 1:
            return None
        steps, forecast = path.steps, None
        due_at_once = self.wants_compaction
        if compaction.checks_steps and not due_at_once and not trigger.rules_out(*path.bounds(), steps):
            forecast = path.forecast()
            steps = trigger.steps_until_due(forecast, steps)
            due_at_once = steps < 2 and not trigger.stateful
        if due_at_once:
            # A compaction that moves nothing can be passed over, if the trigger need not know of it.
            if trigger.stateful or not self._stays_tidy(path, seqs):
                return None
            steps = path.steps
        return _Planned(path, steps, forecast, due_at_once) if steps else None

    def _tile_steps(self, path: FreeCellPath, steps: int, seqs: Sequence[int]) -> TileSteps | None:
        """The tiles that steps along a path enter; None if the kernel has no tiles."""
        return None if self._tiles is None else TileSteps(self._tiles, seqs, path.cells[: steps * path.tokens])

    def _take_planned(self, planned: _Planned, k: int, take: Callable[[], None]) -> None:
        """Take the first ``k`` of some planned steps; ``take`` does so in the arena."""
        path, _, forecast, due_at_once = planned
        arena, compaction = self.arena, self._compaction
        if forecast is not None and not due_at_once:
            self.trigger.advance(forecast, k)
        elif compaction.checks_steps:
            self.trigger.skip(k)
        compaction.forget_plans()
        take()
        self.attended = padded_span(arena.top, self._pad, arena.size)
        stop = path.head_after(k)
        arena.head = stop if stop < arena.size else 0
        if due_at_once:
            self.wants_compaction = compaction.checks_steps and compaction.due_after_step(path.tokens)

    def _free_cell_path(self, tokens: int, n: int) -> FreeCellPath | None:
        """The cells that ``_find_cells`` will find in at most ``n`` decode steps; None where that is not known."""
        return FreeCellPath(self.arena, tokens, n, self._pad, anywhere=False)

    def _generates(self, step: Sequence[Chunk]) -> bool:
        """Whether the cells of these decode steps are those that ``_free_cell_path`` finds."""
        return True

    def _ordered(self, step: Sequence[Chunk]) -> Sequence[Chunk]:
        """The step in the order in which its chunks are placed."""
        return step

    def _stays_tidy(self, path: FreeCellPath, seqs: Sequence[int]) -> bool:
        """Whether compactions, now and after each step, would move nothing: certain if True."""
        cells = path.cells
        return isinstance(cells, range) and cells.start == self.arena.top and self._compaction.stays_tidy(seqs)

    @abstractmethod
    def _find_room(self, find: Callable[[], Cells | None]) -> Cells | None:
        """What ``find`` finds, with a compaction before where one is due, and after where a failure asks for one."""

    @abstractmethod
    def _find_beside(self, lockstep_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """Cells for a micro-batch whose first tokens are those of a lockstep batch; None if there is no room."""

    @abstractmethod
    def _no_room(self, tokens: int, done: Sequence[MicroBatch]) -> NoSlot:
        """What to raise where a micro-batch of ``tokens`` tokens finds no room."""

    @abstractmethod
    def _take(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Write the tokens of chunks into cells, and go on behind them."""
