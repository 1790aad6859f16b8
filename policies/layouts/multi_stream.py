"""Several caches and streams, micro-batches planned ahead: the cache of llama.cpp since mid-2025.

A *group* is a cache that some of the model's layers use: one, or two for models with a sliding window in some layers
(iSWA). A *stream* is an independent cache within a group: one for all sequences (unified), or one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.arena import FOREVER, Arena
from policies.cells.free_extents import extents_of_cells
from policies.cells.reads import padded_span, reads_of
from policies.cells.saved_cells import SavedCells
from policies.cells.search import Cells, cells_array, find_contiguous, find_scattered, start_of_search
from policies.cells.split_batch import split_by_stream
from policies.cells.window import find_usable, positions_lost, usable_extents
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import Trigger, TriggerInput
from policies.fast_forward.forecast import FastForward
from policies.fast_forward.multi_stream import plan_steps
from policies.layouts.unified import cut
from policies.policy import CacheConfig, Kernel, Policy, Unsupported
from policies.vocabulary import (
    NO_MOVES,
    NO_SHIFT,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    Reads,
    Shift,
    Usage,
    View,
    split_batch,
)


class Rejected(ValueError):
    """The batch itself is invalid: positions that do not continue a sequence, or sequences that do not agree."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache group."""

    size: int
    """Cells in each stream."""
    pad: int = 256
    """The span is rounded up to a multiple of this many cells."""
    window: int | None = None
    """Tokens that attention looks back, itself included; cells that fell out of it are used again."""
    share: float = 1.0
    """Share of the model's layers."""


Slot = tuple[int, tuple[Chunk, ...], Cells]
"""A stream, the chunks of a micro-batch that go there, and a cell for each of their tokens."""

Planned = tuple[tuple[Chunk, ...], list[list[Slot]]]
"""A micro-batch, and its slots in every group."""


class MultiStreamPolicy(Policy):
    """Plans every micro-batch of a step before it takes any: a step that does not fit changes nothing.

    (Nearly nothing: two flaws of the original are reproduced, see ``_undo`` and ``_take``.)
    """

    can_shift = True

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
        self.caches = tuple(caches)
        self.arenas = tuple(tuple(Arena(spec.size) for _ in range(n_streams)) for spec in caches)
        """Indexed by group, then by stream."""
        self.capacity = caches[0].size * n_streams
        self.groups = tuple(Group(spec.size * n_streams, spec.window, spec.share, n_streams) for spec in caches)
        self.trigger = trigger or Trigger()
        self.wants_compaction = False
        self.attended: set[int] = set()
        """Spans (llama.cpp's ``n_kv``) of the last step's micro-batches in all groups."""
        self.n_streams = n_streams
        self._copies: list[list[Moves]] = [[] for _ in caches]
        """Of each group: copies between streams that an engine has not been told of yet."""
        self._owing: set[int] = set()
        """Groups of which an engine may have something to be told yet; of no others."""
        self.contiguous = contiguous
        self._compactor = compactor
        self.moves_cells = compactor is not None
        self.n_ubatch = config.n_ubatch

    @property
    def max_sequence_tokens(self) -> int:
        """A stream of the first group."""
        return self.caches[0].size

    def allocate(
        self, step: Sequence[Chunk], *, views: bool = False, lockstep_tokens: int = 0
    ) -> tuple[MicroBatch, ...]:
        """Check, plan, and place; raises ``Rejected`` besides ``NoSlot``."""
        self._check(step)
        if self._compactor is not None or self.wants_compaction:
            self.update(sum(chunk.n for chunk in step))
        found = self._find_at_once(step)
        if found is not None:
            self.attended = set()
            return tuple(self._place(batch, views) for batch in found)
        plan = self._plan(step)
        if plan is None and self.trigger.on_failure and self.compact().n_runs:
            plan = self._plan(step)
        if plan is None:
            free = sum(arena.free.total for arena in self.arenas[0])
            n = sum(chunk.n for chunk in step)
            raise NoSlot(f"no room for {n} tokens: {free} of {self.capacity} cells are free")
        self.attended = set()
        return tuple(self._place(batch, views) for batch in plan)

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Along the free cells that the next searches find in all groups and streams; not where a trigger is asked."""
        asked = self._compactor is not None and self.trigger.checks_steps
        if self.kernel != "masked" or asked or self.wants_compaction or self._owing:
            return None
        if any(chunk.also for chunk in step):
            return None
        return plan_steps(self, step, n)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells (every sequence's, if negative) in all groups."""
        whole = start <= 0 and stop is None
        for _, arena in self._arenas_of(seq):
            if whole:
                first = arena.empty(seq)
            else:
                gone = arena.remove(seq, start, FOREVER if stop is None else stop)
                first = int(gone[0]) if len(gone) else None
            if first is not None:
                arena.head = min(arena.head, first)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share cells within a stream; between streams copy a whole sequence, cell for cell."""
        end = FOREVER if stop is None else stop
        pairs = list(zip(self._arenas_of(src), self._arenas_of(dst), strict=True))
        for (_, source), (_, target) in pairs:
            if source is not target and (start > 0 or (stop is not None and end + 1 < source.size)):
                raise Unsupported(
                    f"{self.name}: between streams only whole sequences are copied, not [{start}, {stop})"
                )
        for (group, source), (_, target) in pairs:
            if source is target:
                source.share(src, dst, start, end)
            else:
                self._copy_stream(group, source, target, src, dst)

    def keep(self, seq: int) -> None:
        """Empty all other cells of the sequence's stream."""
        for _, arena in self._arenas_of(seq):
            gone = arena.keep(seq)
            if len(gone):
                arena.head = min(arena.head, int(gone[0]))

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions; the next search begins at the first cell freed, else at 0."""
        end = FOREVER if stop is None else stop
        if delta == 0 or start == end:
            return
        for group, arena in self._arenas_of(seq):
            self._owing.add(group)
            _, gone = arena.shift(seq, start, end, delta)
            arena.head = int(gone[0]) if len(gone) else 0

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide positions ``[start, stop)`` (llama.cpp's ``seq_div``)."""
        end = FOREVER if stop is None else stop
        if divisor != 1 and start != end:
            for group, arena in self._arenas_of(seq):
                self._owing.add(group)
                arena.divide(seq, start, end, divisor)

    def clear(self) -> None:
        """Empty everything."""
        for arenas in self.arenas:
            for arena in arenas:
                arena.clear()

    def update(self, tokens: int = 0) -> None:
        """Compact if that was asked for, or if the trigger says so."""
        arena = self.arenas[0][0]
        if self._compactor is not None and self.n_streams == 1:
            state = TriggerInput.of(arena, self.caches[0].pad, tokens)
            if self.trigger.due_before_step(state, self._moves_of_first):
                self.wants_compaction = True
        if self.wants_compaction:
            self.wants_compaction = False
            self.compact()

    def compact(self) -> Moves:
        """One pass over every group, where there is one stream; returns the moves of the group that has most."""
        if self._compactor is None or self.n_streams > 1:
            return NO_MOVES
        plans = [self._compactor(arenas[0]) for arenas in self.arenas]
        for group, plan in enumerate(plans):
            if plan.n_runs:
                self._owing.add(group)
                arena = self.arenas[group][0]
                arena.compact(plan)
                arena.head = 0
        return max(plans, key=lambda plan: plan.n_runs)

    def can_truncate(self, seq: int, n: int) -> int:
        """Any beginning, unless a window has overwritten what the next token would see (llama-server's ``pos_min``)."""
        for group, arena in self._arenas_of(seq):
            window = self.caches[group].window
            if window is not None and not 0 <= arena.first_position(seq) <= max(n - window, 0):
                return 0
        return n

    def sequences(self) -> list[int]:
        """Read off the arenas of all groups."""
        return sorted({seq for arenas in self.arenas for arena in arenas for seq in arena.sequences()})

    def usage(self) -> Usage:
        """Read off the free runs of the first group."""
        arenas = self.arenas[0]
        used = sum(arena.used for arena in arenas)
        largest = max(arena.free.largest for arena in arenas)
        placeable = largest if self.contiguous else max(arena.free.total for arena in arenas)
        runs = sum(len(arena.free) for arena in arenas)
        top = max(i * arena.size + arena.top if arena.used else 0 for i, arena in enumerate(arenas))
        return Usage(self.capacity, used, used, placeable, runs, largest, top)

    def occupancy(self, group: int = 0) -> CellMap:
        """The streams one after another."""
        maps = [arena.cell_map() for arena in self.arenas[group]]
        return CellMap(np.concatenate([m.position for m in maps]), tuple(o for m in maps for o in m.owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """The streams one after another."""
        return np.concatenate([arena.first_owners() for arena in self.arenas[group]])

    def _moves_of_first(self) -> Moves:
        return NO_MOVES if self._compactor is None else self._compactor(self.arenas[0][0])

    def stream_of(self, seq: int) -> int:
        """The stream that a sequence lies in."""
        return seq if self.n_streams > 1 else 0

    def _arenas_of(self, seq: int) -> list[tuple[int, Arena]]:
        """A sequence's arena in each group (all arenas, if negative), with the group's number."""
        if seq < 0:
            return [(g, arena) for g, arenas in enumerate(self.arenas) for arena in arenas]
        return [(g, arenas[self.stream_of(seq)]) for g, arenas in enumerate(self.arenas)]

    def _check(self, step: Sequence[Chunk]) -> None:
        """``llama_batch_allocr::init``: every sequence goes on where it ends, and coupled sequences agree."""
        if self.n_streams == 1 and self.arenas[-1][0].last_positions.are_continued_by(step):
            return
        next_position: dict[int, int] = {}
        together: dict[int, set[int]] = {}
        arenas = self.arenas[-1]
        for chunk in step:
            for seq in chunk.seqs if chunk.also else (chunk.seq,):
                expected = next_position.get(seq)
                if expected is None:
                    held = arenas[self.stream_of(seq)].last_position(seq)
                    expected = held + 1 if held >= 0 else chunk.start
                if chunk.start != expected:
                    raise Rejected(f"sequence {seq} ends at {expected - 1}, its next chunk starts at {chunk.start}")
                next_position[seq] = chunk.start + chunk.n
                if chunk.also or together:
                    together[seq] = together.get(seq, set(chunk.seqs)) & set(chunk.seqs)
                    if not together[seq]:
                        raise Rejected(f"sequence {seq} belongs to incompatible sets of sequences")
            for seq in chunk.also:
                first, other = (arenas[self.stream_of(s)] for s in (chunk.seq, seq))
                ends = (first.first_position(chunk.seq), first.last_position(chunk.seq))
                if ends != (other.first_position(seq), other.last_position(seq)):
                    raise Rejected(f"sequence {chunk.seq} is coupled to {seq}, but they have diverged")
        if together and self.n_streams > 1:
            # Not a fault of the batch, in the original's eyes: it only finds no way to split it.
            raise NoSlot("coupled sequences need a unified cache")

    def _find_at_once(self, step: Sequence[Chunk]) -> Iterable[Planned] | None:
        """The plan, where that is certain to fit as it is taken, and no micro-batch sees what a later one takes; each
        is found when the one before it has been placed."""
        tokens = sum([chunk.n for chunk in step])
        if self.n_streams == 1 and tokens <= self.n_ubatch:
            batches = cut(step, tokens, self.n_ubatch)
            by_group = [self._find(group, chunks) for chunks in batches for group in range(len(self.caches))]
            slots = [found for found in by_group if found is not None]
            return [(batches[0], slots)] if 0 < len(slots) == len(by_group) else None
        if self.contiguous or any(spec.window is not None for spec in self.caches):
            return None
        need: dict[int, int] = {}
        for chunk in step:
            stream = self.stream_of(chunk.seq)
            need[stream] = need.get(stream, 0) + chunk.n
        if any(arenas[stream].free.total < n for arenas in self.arenas for stream, n in need.items()):
            return None
        if self.n_streams == 1:
            return self._one_by_one(split_batch(step, self.n_ubatch))
        return self._one_by_one(split_by_stream(step, self.n_ubatch, sequential=True))

    def _one_by_one(self, batches: Iterable[tuple[Chunk, ...]]) -> Iterator[Planned]:
        for batch in batches:
            by_group = [self._find(group, batch) for group in range(len(self.caches))]
            yield batch, [slots for slots in by_group if slots is not None]

    def _plan(self, step: Sequence[Chunk]) -> list[Planned] | None:
        """Micro-batches with their slots in every group; None if they do not fit."""
        attempts = []
        if self.n_streams == 1:
            attempts.append(split_batch(step, self.n_ubatch))
        if self.n_streams > 1 or len(self.caches) > 1:
            attempts.append(split_by_stream(step, self.n_ubatch, sequential=self.n_streams > 1))
        for batches in attempts:
            by_group = []
            for group in range(len(self.caches)):
                slots = self._prepare(group, batches)
                if slots is None:
                    break
                by_group.append(slots)
            else:
                return [(batch, [slots[i] for slots in by_group]) for i, batch in enumerate(batches)]
        return None

    def _prepare(self, group: int, batches: Sequence[tuple[Chunk, ...]]) -> list[list[Slot]] | None:
        """Find and take slots one micro-batch after another, then undo it all (``prepare``)."""
        arenas = self.arenas[group]
        found: list[list[Slot]] = []
        undo = []
        for batch in batches:
            slots = self._find(group, batch)
            if slots is None:
                break
            heads = [arena.head for arena in arenas]
            undo.append(
                (slots, heads, [SavedCells.of(arenas[stream], cells_array(cells)) for stream, _, cells in slots])
            )
            found.append(slots)
            for slot in slots:
                self._take(group, slot)
        for slots, heads, saved in reversed(undo):
            self._undo(arenas, slots, heads, saved)
        return found if len(found) == len(batches) else None

    @staticmethod
    def _undo(
        arenas: Sequence[Arena],
        slots: Sequence[Slot],
        heads: Sequence[int],
        saved: Sequence[SavedCells],
    ) -> None:
        """As the original, the head is restored by the k-th stream of the micro-batch, not by stream number."""
        for k, (stream, _, _) in enumerate(slots):
            saved[k].restore()
            arenas[stream].head = heads[k]

    def _find(self, group: int, batch: Sequence[Chunk]) -> list[Slot] | None:
        by_stream: dict[int, Sequence[Chunk]] = {0: batch}
        if self.n_streams > 1:
            lanes: dict[int, list[Chunk]] = {}
            for chunk in batch:
                lanes.setdefault(self.stream_of(chunk.seq), []).append(chunk)
            by_stream = dict(lanes)
        slots: list[Slot] = []
        for stream, chunks in by_stream.items():
            arena = self.arenas[group][stream]
            n = sum([chunk.n for chunk in chunks])
            window = self.caches[group].window
            head = start_of_search(arena.head, arena.used, n)
            cells: Cells | None
            if self.contiguous:
                usable = arena.free if window is None else usable_extents(arena, window)
                first, _ = find_contiguous(usable, head, n)
                cells = None if first is None else range(first, first + n)
            elif window is None:
                cells = find_scattered(arena.free, head, n)
            else:
                cells = find_usable(arena, window, head, n)
            if cells is None:
                return None
            slots.append((stream, tuple(chunks), cells))
        return slots

    def _take(self, group: int, slot: Slot) -> None:
        """Put the tokens in (``apply_ubatch``).

        Where a cell that left the window is overwritten, all that its sequence holds up to that position goes too,
        so that what is left has no gap. As the original, a plan that fails does not bring that back.
        """
        stream, chunks, cells = slot
        arena = self.arenas[group][stream]
        lost: dict[int, int] = {}
        in_a_row = isinstance(cells, range) and arena.free.is_free(cells.start, len(cells))
        if self.caches[group].window is not None and not in_a_row:
            over = cells_array(cells)
            over = over[arena.owner[over] > 0]
            if len(over):
                lost = positions_lost(arena, over)
                arena.vacate(over)
        arena.take(cells, chunks)
        for seq, last in lost.items():
            arena.remove(seq, 0, last + 1)
        arena.head = int(cells[-1]) + 1

    def _place(self, planned: Planned, views: bool) -> MicroBatch:
        chunks, by_group = planned
        # Under ``masked`` groups differ in nothing but the span and the window.
        alike = None
        if self.kernel == "masked":
            alike = reads_of("masked", chunks, lambda seq: self._arena(0, seq).cells_of(seq)[0], 1)
        places = []
        for group, slots in enumerate(by_group):
            spec, arenas = self.caches[group], self.arenas[group]
            for slot in slots:
                self._take(group, slot)
            moves, shift = self._settle(group)
            found = [cells_array(cells) + stream * spec.size for stream, _, cells in slots]
            cells = found[0] if len(found) == 1 else np.concatenate(found)
            span = max(padded_span(arenas[stream].top, spec.pad, spec.size) for stream, _, _ in slots)
            self.attended.add(span)
            reads = self._reads(group, chunks, span, len(slots), alike)
            seen = tuple(self._view(group, chunk) for chunk in chunks) if views else ()
            places.append(Place(cells, reads, moves, shift, seen))
        return MicroBatch(chunks, tuple(places))

    def _reads(self, group: int, chunks: Sequence[Chunk], span: int, n_streams: int, alike: Reads | None) -> Reads:
        """What a group's layers read; ``alike``: under ``masked``, of a single cell and without a window."""
        window = self.caches[group].window
        if alike is None:
            reads = reads_of(self.kernel, chunks, lambda seq: self._arena(group, seq).cells_of(seq)[0], span)
            scanned, whole = reads.scanned, reads.span
        else:
            reads, scanned, whole = alike, alike.scanned * span, span * n_streams
        useful = reads.useful if window is None else np.minimum(reads.useful, window + reads.tokens - 1)
        return Reads(reads.tokens, scanned, useful, reads.runs, whole)

    def _view(self, group: int, chunk: Chunk) -> View:
        cells, positions = self._arena(group, chunk.seq).cells_of(chunk.seq)
        return View(cells + self.stream_of(chunk.seq) * self.caches[group].size, positions)

    def _arena(self, group: int, seq: int) -> Arena:
        return self.arenas[group][self.stream_of(seq)]

    def _settle(self, group: int) -> tuple[Moves, Shift]:
        """What is owed in all streams of a group, in the group's own cell numbers."""
        size = self.caches[group].size
        if group not in self._owing:
            return NO_MOVES, NO_SHIFT
        self._owing.remove(group)
        moves, cells, deltas = [], [], []
        for stream, arena in enumerate(self.arenas[group]):
            own, shift = arena.pending.settle(arena.owner)
            offset = stream * size
            if own.n_runs:
                moves.append(Moves(own.src + offset, own.dst + offset, own.length))
            cells.append(shift.cells + offset)
            deltas.append(shift.deltas)
        copies, self._copies[group] = self._copies[group], []
        return Moves.join([*copies, *moves]), Shift(np.concatenate(cells), np.concatenate(deltas))

    def _copy_stream(self, group: int, source: Arena, target: Arena, src: int, dst: int) -> None:
        """Same cells, another stream (``seq_cp`` between streams); whatever the target held is gone."""
        cells, positions = source.cells_of(src)
        target.clear()
        target.free.take_cells(cells)
        for cell, position in zip(cells.tolist(), positions.tolist(), strict=True):
            target.put(np.array([cell]), (dst,), position)
        target.pending.rotate(cells, source.pending.rotations_of(cells))
        target.head = source.head
        starts, ends = extents_of_cells(np.sort(cells))
        size = self.caches[group].size
        offset_from, offset_to = self.stream_of(src) * size, self.stream_of(dst) * size
        self._owing.add(group)
        self._copies[group].append(Moves(starts + offset_from, starts + offset_to, ends - starts))
