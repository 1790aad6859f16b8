"""One arena for all sequences, contiguous slots from a moving head: the cache of llama.cpp until mid-2025."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from policies.cells.arena import FOREVER, Arena
from policies.cells.free_cells import Cells
from policies.cells.host_copies import HostStates, chunks_of, transfers_of
from policies.cells.reads import padded_span, reads_of
from policies.cells.search import cells_array, find_contiguous, start_of_search
from policies.compaction.compactors import Compactor
from policies.compaction.planner import CompactionPlanner
from policies.compaction.triggers import Trigger
from policies.fast_forward.arena_lockstep import ArenaLockstepBatch
from policies.fast_forward.tiles import TileMap
from policies.layouts.unified_steps import UnifiedSteps
from policies.policy import CacheConfig, Kernel
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    HostCopy,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    Usage,
    View,
    split_batch,
)


class UnifiedPolicy(UnifiedSteps):
    """One arena, a search for contiguous cells, and a compactor with its trigger.

    The bookkeeping is that of llama.cpp b4666 to b4880. ``keeps_partial``: when a later micro-batch of a step finds
    no room, keep what earlier ones took, as llama.cpp did; otherwise take it all back. A subclass with another search
    overrides ``_find_cells`` and declares ``contiguous``. Its steps are taken one by one, unless it overrides
    ``_free_cell_path`` as well, and declares ``can_fast_forward``.
    """

    can_shift = True
    can_copy_out = True
    can_skip_positions = True
    can_fast_forward = True
    contiguous = True

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        *,
        compactor: Compactor | None = None,
        trigger: Trigger | None = None,
        kernel: Kernel = "masked",
        keeps_partial: bool = False,
    ):
        self.name = name
        self.capacity = config.cells
        self.groups = (Group(config.cells),)
        self.kernel = config.kernel or kernel
        self.arena = Arena(config.cells)
        self.trigger = trigger or Trigger()
        self.moves_cells = compactor is not None
        self.wants_compaction = False
        """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
        self.attended = 0
        """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
        self._compaction = CompactionPlanner(self.arena, compactor, self.trigger, config.pad)
        self._tiles = TileMap(self.arena) if self.kernel == "tiled" else None
        self._keeps_partial = keeps_partial
        self._lockstep = ArenaLockstepBatch(self, config.n_ubatch)
        self._saved = HostStates[IntArray]()
        """Positions of sequences that were copied out, in the order of their cells."""
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad

    def allocate(
        self, step: Sequence[Chunk], *, views: bool = False, lockstep_tokens: int = 0
    ) -> tuple[MicroBatch, ...]:
        """Place the step micro-batch by micro-batch, compacting where the trigger says so."""
        arena, compaction = self.arena, self._compaction
        head = arena.head
        tokens = sum([chunk.n for chunk in step])
        if compaction.checks_steps and compaction.due_before_step(tokens):
            self.wants_compaction = True
        done: list[MicroBatch] = []
        for chunks in cut(step, tokens, self._n_ubatch):
            cells = self._find_room(partial(self._find_cells, chunks))
            if cells is None:
                refusal = self._no_room(sum(chunk.n for chunk in chunks), done if self._keeps_partial else ())
                if not self._keeps_partial and done:
                    self._take_back(done)
                    arena.head = head
                raise refusal
            self._take(chunks, cells)
            done.append(self._micro_batch(chunks, cells, views))
        if compaction.checks_steps and compaction.due_after_step(tokens):
            self.wants_compaction = True
        return tuple(done)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells; the next search begins at the first of them if that is lower."""
        self._forget_tiles(seq)
        if start <= 0 and stop is None:
            self._lower_head(self.arena.empty(seq))
            return
        gone = self.arena.remove(seq, start, FOREVER if stop is None else stop)
        self._lower_head(int(gone[0]) if len(gone) else None)

    def copy_out(self, seq: int, host: IntArray) -> tuple[HostCopy, ...]:
        """All of a sequence's cells."""
        cells, positions = self.arena.cells_of(seq)
        self._saved.keep(host, positions[np.argsort(cells, kind="stable")])
        settled = self.arena.settle()
        return (HostCopy(transfers_of(cells, host[positions], to_host=True), *settled),)

    def copy_in(self, seq: int, host: IntArray) -> tuple[HostCopy, ...]:
        """Placed as one micro-batch of any size, with a compaction where a failure asks for one.

        The tokens take their cells in the order of those that they were copied out of, and the next search begins at
        the first of them (``read_kv_cache_meta`` of b4875).
        """
        self.free(seq)
        arena, positions = self.arena, self._saved.at(host)
        chunks = chunks_of(seq, positions)
        self._compaction.forget_plans()
        found = self._find_cells(chunks)
        if found is None and self.trigger.on_failure and self.compact().n_runs:
            found = self._find_cells(chunks)
        if found is None:
            raise NoSlot(f"no room for {len(host)} tokens from the host: {arena.free.total} cells are free")
        self._take(chunks, found)
        self._compaction.forget_plans()
        cells = cells_array(found)
        arena.head = int(cells[0])
        settled = arena.settle()
        return (HostCopy(transfers_of(cells, host[positions], to_host=False), *settled),)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the cells; the next search begins at 0."""
        self._forget_tiles()
        self._compaction.forget_plans()
        self.arena.share(src, dst, start, FOREVER if stop is None else stop)
        self.arena.head = 0

    def keep(self, seq: int) -> None:
        """Empty all other cells; the next search begins at the first empty one if that is lower."""
        self._forget_tiles()
        self.arena.keep(seq)
        self._lower_head(self.arena.free.first_cell(0) if self.arena.free.total else None)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions, and have the keys rotated with the next micro-batch."""
        stop = FOREVER if stop is None else stop
        if start == stop:
            return
        self._forget_tiles()
        _, gone = self.arena.shift(seq, start, stop, delta)
        self._compaction.forget_plans()
        self.arena.head = int(gone[0]) if len(gone) else 0

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide positions ``[start, stop)`` (llama.cpp's ``seq_div``, for self-extend)."""
        stop = FOREVER if stop is None else stop
        if start == stop or divisor == 1:
            return
        self.arena.divide(seq, start, stop, divisor)

    def clear(self) -> None:
        """Empty everything."""
        self._forget_tiles()
        self.arena.clear()
        self._compaction.forget_plans()

    def update(self) -> None:
        """Compact if that is due (llama.cpp's ``llama_kv_self_update``, but for rotations: they stay pending)."""
        if self.wants_compaction:
            self.wants_compaction = False
            self.compact()

    def compact(self) -> Moves:
        """Carry out the compactor's plan at once."""
        moves = self._compaction.plan()
        self._compaction.forget_plans()
        if moves.n_runs:
            self._forget_tiles()
            self.arena.compact(moves)
            self.arena.head = self.arena.used
        return moves

    def idle(self) -> Moves:
        """The next few runs of a plan; a new plan is made only when the arena has changed."""
        if not self.trigger.when_idle:
            return NO_MOVES
        moves = self._compaction.next_idle_moves()
        if moves.n_runs:
            self._forget_tiles()
            self.arena.compact(moves)
            self.arena.head = min(self.arena.head, self.arena.free.first_cell(0))
        return self.arena.pending.settle_moves()

    def can_truncate(self, seq: int, n: int) -> int:
        """Any number of a sequence's first tokens can be kept."""
        return n

    def sequences(self) -> list[int]:
        """The sequences that the arena holds, ascending."""
        return self.arena.sequences()

    def usage(self) -> Usage:
        """State of the arena and of its free extents."""
        arena, free = self.arena, self.arena.free
        largest = free.largest
        placeable = largest if self.contiguous else free.total
        return Usage(arena.size, arena.used, arena.used, placeable, len(free), largest, arena.top)

    def occupancy(self, group: int = 0) -> CellMap:
        """The arena, cell by cell."""
        return self.arena.cell_map()

    def first_owners(self, group: int = 0) -> IntArray:
        """The smallest sequence in each cell of the arena."""
        return self.arena.first_owners()

    def _find_room(self, find: Callable[[], Cells | None]) -> Cells | None:
        """What ``find`` finds, with a compaction before where one is due, and after where a failure asks for one."""
        self.update()
        self._compaction.forget_plans()
        cells = find()
        if cells is None and self.trigger.on_failure and self.compact().n_runs:
            cells = find()
        return cells

    def _no_room(self, tokens: int, done: Sequence[MicroBatch]) -> NoSlot:
        free, size = self.arena.free.total, self.arena.size
        return NoSlot(f"no room for {tokens} token{'s' * (tokens > 1)}: {free} of {size} cells are free", done)

    def _find_cells(self, chunks: Sequence[Chunk]) -> Cells | None:
        """Cells for the tokens of a micro-batch, shape (n_tokens,); None, and the head where it stopped, if none."""
        return self._find_beside(0, chunks)

    def _find_beside(self, lockstep_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """``_find_cells`` of a micro-batch whose first tokens are those of a lockstep batch."""
        arena, n = self.arena, lockstep_tokens + sum([chunk.n for chunk in chunks])
        first, arena.head = find_contiguous(arena.free, start_of_search(arena.head, arena.used, n), n)
        return None if first is None else range(first, first + n)

    def _take(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        arena = self.arena
        arena.take(cells, chunks)
        if self._tiles is not None:
            self._tiles.add(chunks, cells)
        end = int(cells[-1]) + 1
        arena.head = end if end < arena.size else 0

    def _forget_tiles(self, seq: int | None = None) -> None:
        """Note that a sequence, or any if None, gives up cells or gets others."""
        if self._tiles is not None:
            self._tiles.forget(seq)

    def _take_back(self, done: Sequence[MicroBatch]) -> None:
        self._forget_tiles()
        for batch in done:
            for chunk in batch.chunks:
                for seq in chunk.seqs:
                    self.arena.remove(seq, chunk.start, chunk.start + chunk.n)
        self.arena.pending.put_back([(batch.places[0].moves, batch.places[0].shift) for batch in done])

    def _micro_batch(self, chunks: tuple[Chunk, ...], cells: Cells, views: bool) -> MicroBatch:
        arena = self.arena
        moves, shift = arena.settle()
        self.attended = padded_span(arena.top, self._pad, arena.size)
        if self._tiles is not None:
            reads = self._tiles.reads(chunks)
        else:
            reads = reads_of(self.kernel, chunks, lambda seq: arena.cells_of(seq)[0], self.attended)
        seen = tuple(View(*arena.cells_of(chunk.seq)) for chunk in chunks) if views else ()
        return MicroBatch(chunks, (Place(cells_array(cells), reads, moves, shift, seen),))

    def _lower_head(self, freed: int | None) -> None:
        self._compaction.forget_plans()
        if freed is not None:
            self.arena.head = min(self.arena.head, freed)


def cut(step: Sequence[Chunk], tokens: int, n_ubatch: int) -> Sequence[tuple[Chunk, ...]]:
    """``split_batch`` of a step of ``tokens`` tokens, faster if they fit into one micro-batch."""
    if tokens <= n_ubatch and all(chunk.n for chunk in step):
        return (tuple(step),) if step else ()
    return split_batch(step, n_ubatch)
