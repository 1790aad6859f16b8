"""The cache of llama.cpp since mid-2025: several groups and streams, and steps that are planned before they are placed.

A *group* is a cache that some of the model's layers use: one, or two for models with a sliding window in some layers
(iSWA). A *stream* is an independent cache within a group: one for all sequences (unified), or one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.arena import FOREVER
from policies.cells.host_copies import SavedPlaces, chunks_of, host_cells, host_cells_at, transfers_of
from policies.cells.reads import padded_span, reads_of
from policies.cells.search import cells_array
from policies.cells.stream_arenas import CacheSpec, StreamArenas
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import Threshold, Trigger, TriggerInput
from policies.layouts.stream_plans import Planned, Rejected, StepPlanner, check_step
from policies.placement.streams import StreamRule
from policies.policy import CacheConfig, Kernel, Policy
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Cells,
    Chunk,
    Exported,
    Group,
    HostCopy,
    IntArray,
    MicroBatch,
    Moves,
    OutOfCells,
    Place,
    Reads,
    Unsupported,
    Usage,
)

__all__ = ["CacheSpec", "MultiStreamPolicy", "Rejected", "StreamOptions"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of layouts with streams."""

    unified: bool = True
    """One cache for all sequences (llama-server's ``--kv-unified``), instead of an equal share for each."""
    window: int = 256
    """Tokens that layers with a sliding window keep of each sequence."""
    n_layers: int = 4
    """Layers of the model, on which llama.cpp's limit of runs in one defragmentation depends."""
    snapshots: int = 0
    """Tokens that the states of a model can take back (``n_rs_seq``): those that EAGLE or MTP drafts."""


class MultiStreamPolicy(Policy):
    """Plans every micro-batch of a step before it places any: a step that does not fit changes nothing.

    (Nearly nothing: two flaws of the original are reproduced, see ``_undo`` and ``take`` in ``stream_plans.py``.)
    """

    can_shift = True
    can_export = True
    has_placement_rule = True

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        caches: Sequence[CacheSpec],
        *,
        n_streams: int = 1,
        contiguous: bool = False,
        compactor: Compactor | None = None,
        trigger: Trigger | None = None,
        kernel: Kernel = "masked",
    ):
        self.name = name
        self.kernel = config.kernel or kernel
        self._streams = StreamArenas(caches, n_streams, tiled=self.kernel == "tiled")
        self.arenas = self._streams.arenas
        """Indexed by group, then by stream."""
        self.caches = self._streams.specs
        self.n_streams = n_streams
        self.capacity = caches[0].size * n_streams
        self.groups = tuple(Group(spec.size * n_streams, spec.window, spec.share, n_streams) for spec in caches)
        self.trigger = trigger or Trigger()
        self.wants_compaction = False
        self._compactor = compactor
        self.moves_cells = compactor is not None
        self._n_ubatch = config.n_ubatch
        self.contiguous = contiguous
        self._planner = StepPlanner(self._streams, config.n_ubatch, contiguous=contiguous)
        self._ends = self._streams.ends
        compacts = compactor is not None
        self._rule = StreamRule(self, self._streams, config.n_ubatch, contiguous=contiguous, compacts=compacts)

    @property
    def attended(self) -> set[int]:
        """Spans (llama.cpp's ``n_kv``) of the micro-batches, in all groups, of the last step given to ``allocate``."""
        return self._streams.attended

    @property
    def max_sequence_tokens(self) -> int:
        """Cells in a stream of the first group."""
        return self.caches[0].size

    def stream_of(self, seq: int) -> int:
        """The stream that a sequence lies in."""
        return self._streams.stream_of(seq)

    # Placement

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Check, plan and place a step; raises ``Rejected`` besides ``OutOfCells``."""
        if self.n_streams > 1 or not self.arenas[-1][0].continues(step):
            check_step(step, self._ends, apart=self.n_streams > 1)
        if self._compactor is not None or self.wants_compaction:
            self.update(sum(chunk.n for chunk in step))
        plan = self._planner.find_at_once(step)
        if plan is None:
            plan = self._planner.plan(step)
            if plan is None and self.trigger.on_failure and self.compact().n_runs:
                plan = self._planner.plan(step)
            if plan is None:
                free = sum(arena.free.total for arena in self.arenas[0])
                n = sum(chunk.n for chunk in step)
                raise OutOfCells(f"no room for {n} token{'s' * (n > 1)}: {free} of {self.capacity} cells are free")
        self._streams.attended = set()
        return tuple(self._place(batch, views) for batch in plan)

    def _place(self, planned: Planned, views: bool) -> MicroBatch:
        """Take a micro-batch's cells in every group."""
        chunks, by_group = planned
        streams = self._streams
        # Under ``masked`` groups differ in nothing but the span and the window.
        per_cell = None
        if self.kernel == "masked":
            per_cell = reads_of("masked", chunks, lambda seq: streams.cells_of(0, seq)[0], 1)
        places = []
        for group, slots in enumerate(by_group):
            spec, arenas = self.caches[group], streams.arenas[group]
            for slot in slots:
                self._planner.take(group, slot)
                if streams.tiles:
                    streams.tiles[group][slot[0]].add_chunks(*slot[1:])
            moves, shift = streams.settle(group)
            found = [cells_array(cells) + stream * spec.size for stream, _, cells in slots]
            cells = found[0] if len(found) == 1 else np.concatenate(found)
            span = max(padded_span(arenas[stream].top, spec.pad, spec.size) for stream, _, _ in slots)
            streams.attended.add(span)
            reads = self._reads(group, chunks, span, len(slots), per_cell)
            seen = tuple(streams.view(group, chunk.seq) for chunk in chunks) if views else ()
            places.append(Place(cells, reads, moves, shift, seen))
        return MicroBatch(chunks, tuple(places))

    def _reads(self, group: int, chunks: Sequence[Chunk], span: int, n_streams: int, per_cell: Reads | None) -> Reads:
        """What a group's layers read; ``per_cell``: under ``masked``, for a span of one cell and without a window."""
        window = self.caches[group].window
        if per_cell is None:
            if self._streams.tiles:
                reads = self._streams.tile_reads(group, chunks)
            else:
                reads = reads_of(self.kernel, chunks, lambda seq: self._streams.cells_of(group, seq)[0], span)
            scanned, whole = reads.scanned, reads.span
        else:
            reads, scanned, whole = per_cell, per_cell.scanned * span, span * n_streams
        useful = reads.useful if window is None else np.minimum(reads.useful, window + reads.tokens - 1)
        return Reads(reads.tokens, scanned, useful, reads.runs, whole)

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells (every sequence's, if negative) in all groups."""
        self._end_row(seq)
        self._streams.remove(seq, max(start, 0), FOREVER if stop is None else stop)

    def can_truncate(self, seq: int, n: int) -> int:
        """Any beginning, unless a window has overwritten what the next token would see (llama-server's ``pos_min``)."""
        for group, arena in self._streams.of(seq):
            window = self.caches[group].window
            if window is not None and not 0 <= arena.first_position(seq) <= max(n - window, 0):
                return 0
        return n

    def keep(self, seq: int) -> None:
        """Empty all other cells of the sequence's stream."""
        self._end_row(-1)
        self._streams.forget()
        for _, arena in self._streams.of(seq):
            gone = arena.keep(seq)
            if len(gone):
                arena.head = min(arena.head, int(gone[0]))

    def clear(self) -> None:
        """Empty every cell."""
        self._end_row(-1)
        self._streams.forget()
        for _, arena in self._streams.of(-1):
            arena.clear()

    # The host tier

    def export(self, seq: int, host: Cells | None = None) -> Exported | None:
        """All that attention may still see of a sequence (``llama_kv_cache::state_write``)."""
        if host is None:
            return None
        copies, saved = [], []
        for group in range(len(self.caches)):
            places = self._seen(group, seq)
            saved.append(places)
            transfers = transfers_of(places.cells, host_cells(host, places.positions), to_host=True)
            copies.append(HostCopy(transfers, *self._streams.settle(group)))
        return Exported(len(host), tuple(copies), (host, saved))

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """Find cells for all of it at once, in every group or in none (``llama_kv_cache::state_read``).

        The tokens take them in the order of the cells that they were exported from.
        """
        self.free(seq)
        host, places = exported.state
        found = []
        for group, saved in enumerate(places):
            positions = saved.by_cell()
            cells = self._cells_for(group, seq, positions)
            if cells is None:
                free = self.arenas[group][self.stream_of(seq)].free.total
                self.free(seq)
                raise OutOfCells(f"no room for {len(positions)} tokens from the host: {free} cells are free")
            found.append((host_cells_at(host, positions), cells))
        return tuple(
            HostCopy(transfers_of(cells, own, to_host=False), *self._streams.settle(group))
            for group, (own, cells) in enumerate(found)
        )

    def _seen(self, group: int, seq: int) -> SavedPlaces:
        """What attention may still see of a sequence in a group, in the cells that an engine knows."""
        spec = self.caches[group]
        cells, positions = self._streams.cells_of(group, seq)
        if spec.window is not None:
            seen = positions > positions.max(initial=-1) - spec.window
            cells, positions = cells[seen], positions[seen]
        return SavedPlaces(cells + self.stream_of(seq) * spec.size, positions)

    def _cells_for(self, group: int, seq: int, positions: IntArray) -> IntArray | None:
        """Take cells of a group for positions of a sequence, which holds none there; None if there are too few."""
        slots = self._planner.find_one(group, chunks_of(seq, positions))
        if slots is None:
            return None
        self._planner.take(group, slots)
        return cells_array(slots[2]) + self.stream_of(seq) * self.caches[group].size

    # Sharing and shifting

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share cells within a stream; between streams copy a whole sequence, cell for cell."""
        end = FOREVER if stop is None else stop
        pairs = list(zip(self._streams.of(src), self._streams.of(dst), strict=True))
        for (_, source), (_, target) in pairs:
            if source is not target and (start > 0 or (stop is not None and end + 1 < source.size)):
                raise Unsupported(
                    f"{self.name}: between streams only whole sequences are copied, not [{start}, {stop})"
                )
        self._end_row(src)
        self._end_row(dst)
        self._streams.forget()
        for (group, source), (_, target) in pairs:
            if source is target:
                source.share(src, dst, start, end)
            else:
                self._streams.copy_between_streams(group, src, dst)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions; the next search begins at the first cell freed, else at 0."""
        end = FOREVER if stop is None else stop
        if delta == 0 or start == end:
            return
        self._end_row(seq)
        self._streams.forget()
        for group, arena in self._streams.of(seq):
            self._streams.unreported.add(group)
            _, gone = arena.shift(seq, start, end, delta)
            arena.head = int(gone[0]) if len(gone) else 0

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide positions ``[start, stop)`` (llama.cpp's ``seq_div``)."""
        end = FOREVER if stop is None else stop
        if divisor != 1 and start != end:
            self._end_row(seq)
            self._streams.forget()
            for group, arena in self._streams.of(seq):
                self._streams.unreported.add(group)
                arena.divide(seq, start, end, divisor)

    # Compaction

    def update(self, tokens: int = 0) -> None:
        """Compact if that was asked for, or if the trigger says so before a step of that many tokens."""
        if self.is_due(tokens):
            self.wants_compaction = False
            self.compact()

    def is_due(self, tokens: int) -> bool:
        """Whether compaction was asked for, or the trigger asks for it before a step of that many tokens."""
        compactor = self._compactor
        if compactor is not None and self.n_streams == 1:
            arena = self.arenas[0][0]
            state = TriggerInput.of(arena, self.caches[0].pad, tokens)
            if self.trigger.due_before_step(state, lambda: compactor(arena)):
                return True
        return self.wants_compaction

    def compact(self) -> Moves:
        """One pass over every group, where there is one stream; returns the moves of the group that has most."""
        if self._compactor is None or self.n_streams > 1:
            return NO_MOVES
        self._streams.forget()
        plans = [self._compactor(arenas[0]) for arenas in self.arenas]
        for group, plan in enumerate(plans):
            if plan.n_runs:
                self._streams.unreported.add(group)
                arena = self.arenas[group][0]
                arena.compact(plan)
                arena.head = 0
        return max(plans, key=lambda plan: plan.n_runs)

    # Looking in

    def sequences(self) -> list[int]:
        """The sequences with a cell in any group."""
        return sorted({seq for _, arena in self._streams.of(-1) for seq in arena.sequences()})

    def usage(self) -> Usage:
        """From the free extents of the first group."""
        rule = self._rule
        rule.look()
        extents = rule.free_extents, rule.largest_free_extent
        return Usage(self.capacity, rule.stored, rule.allocated, rule.placeable, *extents, rule.span)

    def occupancy(self, group: int = 0) -> CellMap:
        """The cells of all streams, in order."""
        maps = [arena.cell_map() for arena in self.arenas[group]]
        return CellMap(np.concatenate([m.position for m in maps]), tuple(o for m in maps for o in m.owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """From the sets that the arenas keep, in order of streams."""
        return np.concatenate([arena.first_owners() for arena in self.arenas[group]])

    # The step loop

    def placement_rule(self) -> StreamRule | None:
        """Under the kernels ``masked`` and ``tiled``; with compaction only if asking for it twice changes nothing."""
        has_rule = self.kernel in ("masked", "tiled")
        if self._compactor is not None and self.trigger.checks_steps:
            has_rule = has_rule and isinstance(self.trigger, Threshold)
        if self.contiguous and (self.n_streams > 1 or any(spec.window is not None for spec in self.caches)):
            has_rule = False
        return self._rule if has_rule else None

    def _end_row(self, seq: int) -> None:
        """Let a sequence, or all if negative, be no row: its cells are about to change in another way."""
        rule = self._rule
        for each in [*rule.by_seq] if seq < 0 else [seq]:
            if each in rule.by_seq:
                rule.leave(each)
