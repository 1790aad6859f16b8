"""One arena for all sequences, contiguous slots from a moving head: the cache of llama.cpp until mid-2025."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from policies.cells.arena import FOREVER, Arena
from policies.cells.host_copies import HostStates, SavedPlaces, chunks_of, host_cells, host_cells_at, transfers_of
from policies.cells.reads import reads_of
from policies.cells.search import cells_array, find_contiguous, start_of_search
from policies.cells.tile_counts import HeldTiles, TileCounts
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import CompactionPlanner, Trigger
from policies.placement.cells import CellRule
from policies.placement.rule import PlacementRule
from policies.policy import CacheConfig, Kernel, Policy
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Cells,
    Chunk,
    Group,
    HostCopy,
    IntArray,
    MicroBatch,
    Moves,
    OutOfCells,
    Place,
    Shift,
    Usage,
    View,
    split_batch,
)


class UnifiedPolicy(Policy):
    """One arena, a search for contiguous cells, and a compactor with its trigger.

    The bookkeeping is that of llama.cpp b4666 to b4880. ``keeps_partial``: when a later micro-batch of a step finds
    no room, keep what earlier ones took, as llama.cpp did; otherwise take it all back. A subclass with another search
    overrides ``_find_beside``, and declares ``contiguous``: where that is False, its placement rule gives rows the
    highest free cells.
    """

    can_shift = True
    can_copy_out = True
    can_skip_positions = True
    has_placement_rule = True
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
        self.attended = 0
        """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
        self._compaction = CompactionPlanner(self.arena, compactor, self.trigger, config.pad)
        self._tiles = TileCounts(self.arena) if self.kernel == "tiled" else None
        self.keeps_partial = keeps_partial
        self._saved = HostStates[SavedPlaces]()
        """Sequences that were copied out."""
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._rule = CellRule(self, self._compaction, config.n_ubatch, config.pad)

    @property
    def wants_compaction(self) -> bool:
        """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
        return self._compaction.wanted

    @wants_compaction.setter
    def wants_compaction(self, wanted: bool) -> None:
        self._compaction.wanted = wanted

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step micro-batch by micro-batch, compacting where the trigger says so."""
        arena, compaction = self.arena, self._compaction
        head = arena.head
        tokens = sum([chunk.n for chunk in step])
        compaction.ask_before_step(tokens)
        done: list[MicroBatch] = []
        for chunks in cut(step, tokens, self._n_ubatch):
            cells = self._find_room(partial(self._find_beside, 0, chunks))
            if cells is None:
                refusal = self.no_room(sum(chunk.n for chunk in chunks), done if self.keeps_partial else ())
                if not self.keeps_partial and done:
                    settled = [(batch.places[0].moves, batch.places[0].shift) for batch in done]
                    self.take_back([chunk for batch in done for chunk in batch.chunks], settled, head)
                raise refusal
            self._take(chunks, cells)
            done.append(self._micro_batch(chunks, cells, views))
        compaction.ask_after_step(tokens)
        return tuple(done)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells; the next search begins at the first of them if that is lower."""
        self._leave_rule(seq)
        self._forget_tiles(seq)
        if start <= 0 and stop is None:
            self._lower_head(self.arena.empty(seq))
            return
        gone = self.arena.remove(seq, start, FOREVER if stop is None else stop)
        self._lower_head(int(gone[0]) if len(gone) else None)

    def copy_out(self, seq: int, host: Cells) -> tuple[HostCopy, ...]:
        """All of a sequence's cells."""
        cells, positions = self.arena.cells_of(seq)
        self._saved.keep(host, SavedPlaces(cells, positions))
        settled = self.arena.settle()
        return (HostCopy(transfers_of(cells, host_cells(host, positions), to_host=True), *settled),)

    def copy_in(self, seq: int, host: Cells) -> tuple[HostCopy, ...]:
        """Placed as one micro-batch of any size, with a compaction where a failure asks for one.

        The tokens take their cells in the order of those that they were copied out of, and the next search begins at
        the first of them (``read_kv_cache_meta`` of b4875).
        """
        self.free(seq)
        arena, positions = self.arena, self._saved.at(host).by_cell()
        chunks = chunks_of(seq, positions)
        self._compaction.forget_plans()
        found = self._find_beside(0, chunks)
        if found is None and self.trigger.on_failure and self.compact().n_runs:
            found = self._find_beside(0, chunks)
        if found is None:
            raise OutOfCells(f"no room for {len(host)} tokens from the host: {arena.free.total} cells are free")
        self._take(chunks, found)
        self._compaction.forget_plans()
        cells = cells_array(found)
        arena.head = int(cells[0])
        settled = arena.settle()
        return (HostCopy(transfers_of(cells, host_cells_at(host, positions), to_host=False), *settled),)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the cells; the next search begins at 0."""
        self._forget_tiles()
        self._compaction.forget_plans()
        self.arena.share(src, dst, start, FOREVER if stop is None else stop)
        self.arena.head = 0

    def keep(self, seq: int) -> None:
        """Empty all other cells; the next search begins at the first empty one if that is lower."""
        self._leave_rule(-1)
        self._forget_tiles()
        self.arena.keep(seq)
        self._lower_head(self.arena.free.first_cell(0) if self.arena.free.total else None)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions, and have the keys rotated with the next micro-batch."""
        stop = FOREVER if stop is None else stop
        if start == stop:
            return
        self._leave_rule(seq)
        self._forget_tiles()
        _, gone = self.arena.shift(seq, start, stop, delta)
        self._compaction.forget_plans()
        self.arena.head = int(gone[0]) if len(gone) else 0

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide positions ``[start, stop)`` (llama.cpp's ``seq_div``, for self-extend)."""
        stop = FOREVER if stop is None else stop
        if start == stop or divisor == 1:
            return
        self._leave_rule(seq)
        self.arena.divide(seq, start, stop, divisor)

    def clear(self) -> None:
        """Empty everything."""
        self._leave_rule(-1)
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

    # The step loop

    def placement_rule(self) -> PlacementRule | None:
        """A rule where the kernel reads all cells, or tiles of them."""
        return self._rule if self.kernel in ("masked", "tiled") else None

    def only_generates(self, seq: int, tokens: int) -> bool:
        """Whether a sequence that has so many tokens gets the others where generated tokens are placed."""
        return True

    def tiles_of(self, seq: int) -> HeldTiles:
        """The tiles of a sequence, where the kernel has tiles."""
        assert self._tiles is not None, "the kernel has tiles"
        return self._tiles.of(seq)

    def search(self, n: int) -> int:
        """Where ``_find_beside`` would place ``n`` tokens now; -1 where there is no room."""
        arena = self.arena
        first, _ = find_contiguous(arena.free, start_of_search(arena.head, arena.used, n), n)
        return -1 if first is None else first

    def take_room(self, row_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """Take cells for a micro-batch that begins with tokens of rows, and write the chunks behind them into theirs.

        All of the cells; None where there is no room.
        """
        cells = self._find_room(partial(self._find_beside, row_tokens, chunks))
        if cells is None:
            return None
        if row_tokens:
            self._take((), cells[:row_tokens])
        if chunks:
            self._take(chunks, cells[row_tokens:])
        return cells

    def write(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Write the tokens of chunks into cells that have been taken."""
        self.arena.write(cells_array(cells), chunks)
        if self._tiles is not None:
            self._tiles.add_chunks(chunks, cells)

    def take_back(self, chunks: Sequence[Chunk], settled: Sequence[tuple[Moves, Shift]], head: int) -> None:
        """Undo the micro-batches of a step that finds no room later on.

        ``chunks``: what they placed; ``settled``: what was given out with each; ``head``: as it was before.
        """
        self._forget_tiles()
        for chunk in chunks:
            for seq in chunk.seqs:
                self.arena.remove(seq, chunk.start, chunk.start + chunk.n)
        self.arena.pending.put_back(settled)
        self.arena.head = head

    def no_room(self, tokens: int, done: Sequence[MicroBatch] = ()) -> OutOfCells:
        """What to raise where a micro-batch of so many tokens finds no room."""
        free, size = self.arena.free.total, self.arena.size
        return OutOfCells(f"no room for {tokens} token{'s' * (tokens > 1)}: {free} of {size} cells are free", done)

    # Parts

    def _find_room(self, find: Callable[[], Cells | None]) -> Cells | None:
        """What ``find`` finds, with a compaction before where one is due, and after where a failure asks for one."""
        self.update()
        self._compaction.forget_plans()
        cells = find()
        if cells is None and self.trigger.on_failure and self.compact().n_runs:
            cells = find()
        return cells

    def _find_beside(self, row_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """Cells for the tokens of a micro-batch whose first ones are those of rows, shape (n_tokens,).

        None if there are none; the head is then where the search stopped.
        """
        arena, n = self.arena, row_tokens + sum([chunk.n for chunk in chunks])
        first, arena.head = find_contiguous(arena.free, start_of_search(arena.head, arena.used, n), n)
        return None if first is None else range(first, first + n)

    def _take(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        arena = self.arena
        arena.take(cells, chunks)
        if self._tiles is not None:
            self._tiles.add_chunks(chunks, cells)
        end = int(cells[-1]) + 1
        arena.head = end if end < arena.size else 0

    def _forget_tiles(self, seq: int = -1) -> None:
        """Note that a sequence, or any if negative, gives up cells or gets others."""
        if self._tiles is not None:
            self._tiles.forget(seq)
            if seq < 0:
                self._rule.renew()

    def _leave_rule(self, seq: int) -> None:
        """Let a sequence, or all if negative, be no row any more."""
        rows = self._rule.by_seq
        for each in list(rows) if seq < 0 else [seq]:
            if each in rows:
                self._rule.leave(each)

    def _micro_batch(self, chunks: tuple[Chunk, ...], cells: Cells, views: bool) -> MicroBatch:
        arena = self.arena
        moves, shift = arena.settle()
        self.attended = arena.free.span(self._pad)
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
