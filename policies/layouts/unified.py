"""One arena for all sequences, contiguous slots from a moving head: the cache of llama.cpp until mid-2025."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.cells.arena import FOREVER, Arena
from policies.cells.reads import padded_span, reads_of
from policies.cells.search import Cells, cells_array, find_run, start_of_search
from policies.compaction.compactors import Compactor, stays_tidy
from policies.compaction.triggers import Facts, Trigger
from policies.fast_forward.forecast import FastForward, Usages
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.fast_forward.tiles import TileMap
from policies.policy import CacheConfig, Kernel, Policy
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    Usage,
    View,
    split_batch,
)

Find = Callable[[Arena, Sequence[Chunk]], Cells | None]
"""Cells for the tokens of a micro-batch, shape (n_tokens,), or None; may move the arena's head."""

_IDLE_RUNS = 8
"""Runs moved in one slice of idle compaction."""


def contiguous(arena: Arena, chunks: Sequence[Chunk]) -> Cells | None:
    """One run of cells for the whole micro-batch; a search that fails leaves the head where it stopped."""
    n = sum([chunk.n for chunk in chunks])
    first, arena.head = find_run(arena.free, start_of_search(arena.head, arena.used, n), n)
    return None if first is None else range(first, first + n)


class UnifiedPolicy(Policy):
    """An arena, a search, and a compactor with its trigger. The bookkeeping is that of llama.cpp b4666 to b4880.

    ``anywhere``: the search takes any free cells, so that all of them can be had at once.
    ``keeps_partial``: when a later micro-batch of a step finds no room, keep what earlier ones took, as llama.cpp
    did; otherwise take it all back.
    """

    can_shift = True

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        *,
        find: Find = contiguous,
        anywhere: bool = False,
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
        self._tiles = TileMap(self.arena) if self.kernel == "tiled" else None
        self.trigger = trigger or Trigger()
        self.wants_compaction = False
        """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
        self.attended = 0
        """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
        self._compactor = compactor
        self.moves_cells = compactor is not None
        self._find = find
        self._anywhere = anywhere
        self._keeps_partial = keeps_partial
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._planned: list[tuple[int, int, int]] = []
        """What is left of a plan for idle compaction; empty when the state has changed since."""
        self._asked: Moves | None = None
        """The plan that the trigger has just seen, while nothing has changed since."""

    def allocate(
        self, step: Sequence[Chunk], *, views: bool = False, lockstep_tokens: int = 0
    ) -> tuple[MicroBatch, ...]:
        """Place the step micro-batch by micro-batch, compacting where the trigger says so."""
        arena, head = self.arena, self.arena.head
        self._planned = []
        asks = self._compactor is not None and self.trigger.asks
        tokens = sum([chunk.n for chunk in step])
        if asks and self.trigger.before(self._facts(tokens), self._ask_for_plan):
            self.wants_compaction = True
        done: list[MicroBatch] = []
        for chunks in cut(step, tokens, self._n_ubatch):
            self.update()
            self._asked = None
            cells = self._find(arena, chunks)
            if cells is None and self.trigger.on_failure and self.compact().n_runs:
                cells = self._find(arena, chunks)
            if cells is None:
                n = sum(chunk.n for chunk in chunks)
                reason = f"no room for {n} tokens: {arena.free.total} of {arena.size} cells are free"
                if not self._keeps_partial and done:
                    self._take_back(done)
                    arena.head, done = head, []
                raise NoSlot(reason, done)
            self._take(chunks, cells)
            done.append(self._micro_batch(chunks, cells, views))
        if asks and self.trigger.after(self._facts(tokens)):
            self.wants_compaction = True
        return tuple(done)

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Along the free runs that the next searches go by, as long as the trigger stays quiet."""
        arena, tiled = self.arena, self._tiles is not None
        if arena.owes or len(step) > self._n_ubatch or not (tiled or self.kernel == "masked"):
            return None
        path = self._way(step, n)
        if path is None or path.steps < 2:
            return None
        steps, trigger, forecast = path.steps, self.trigger, None
        asks = self._compactor is not None and trigger.asks
        in_vain = self.wants_compaction
        if asks and not in_vain and not trigger.calm(*path.bounds(), steps):
            forecast = path.forecast()
            steps = trigger.quiet(forecast, steps)
            in_vain = steps < 2 and not trigger.learns
        if in_vain:
            if trigger.learns or not self._stays_tidy(path):
                return None
            steps = path.steps

        def take(k: int, look: bool) -> Usages | None:
            if forecast is not None and not in_vain:
                trigger.pass_by(forecast, k)
            elif asks:
                trigger.pass_calmly(k)
            self.attended, self._planned = int(path.spans()[k - 1]), []
            usages = path.take(k, look=look)
            stop = path.head_after(k)
            arena.head = stop if stop < arena.size else 0
            if self._tiles is not None:
                self._tiles.took_steps(path.step, path.table(k))
            if in_vain:
                self.wants_compaction = asks and trigger.after(self._facts(len(step)))
            return usages

        return path.fast_forward(steps, take, self._tiles)

    def _stays_tidy(self, path: FreeCellPath) -> bool:
        """Whether compactions, now and on the way, would certainly find nothing to move."""
        cells = path.cells
        if not isinstance(cells, range) or cells.start != self.arena.top:
            return False
        return self._compactor is None or stays_tidy(self._compactor, self.arena, path.step)

    def _way(self, step: Sequence[Chunk], n: int) -> FreeCellPath | None:
        """Where steps go; None where that cannot be told."""
        return None if self._find is not contiguous else FreeCellPath(self.arena, step, n, self._pad, anywhere=False)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells; the next search begins at the first of them if that lies lower."""
        self._moved(seq)
        if start <= 0 and stop is None:
            self._lower_head(self.arena.empty(seq))
            return
        gone = self.arena.remove(seq, start, FOREVER if stop is None else stop)
        self._lower_head(int(gone[0]) if len(gone) else None)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the cells; the next search begins at 0."""
        self._moved()
        self._planned = []
        self.arena.share(src, dst, start, FOREVER if stop is None else stop)
        self.arena.head = 0

    def keep(self, seq: int) -> None:
        """Empty all other cells; the next search begins at the first empty one if that lies lower."""
        self._moved()
        self.arena.keep(seq)
        starts = self.arena.free.starts
        self._lower_head(starts[0] if starts else None)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions and remember to rotate the keys."""
        stop = FOREVER if stop is None else stop
        if start == stop:
            return
        self._moved()
        _, gone = self.arena.shift(seq, start, stop, delta)
        self._planned = []
        self.arena.head = int(gone[0]) if len(gone) else 0

    def divide(self, seq: int, start: int, stop: int | None, divisor: int) -> None:
        """Divide positions ``[start, stop)`` (llama.cpp's ``seq_div``, for self-extend)."""
        stop = FOREVER if stop is None else stop
        if start == stop or divisor == 1:
            return
        self.arena.divide(seq, start, stop, divisor)

    def clear(self) -> None:
        """Empty everything."""
        self._moved()
        self.arena.clear()
        self._planned = []

    def update(self) -> None:
        """Compact if that is due (llama.cpp's ``llama_kv_self_update``, whose rotations the arena keeps)."""
        if self.wants_compaction:
            self.wants_compaction = False
            self.compact()

    def compact(self) -> Moves:
        """Carry out the compactor's plan at once."""
        self._planned = []
        moves, self._asked = self._plan() if self._asked is None else self._asked, None
        if moves.n_runs:
            self._moved()
            self.arena.compact(moves)
            self.arena.head = self.arena.used
        return moves

    def idle(self) -> Moves:
        """The next few runs of a plan; planned anew only when the state has changed."""
        if self._compactor is None or not self.trigger.when_idle:
            return NO_MOVES
        if not self._planned:
            plan = self._plan()
            self._planned = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True))
        now, self._planned = self._planned[:_IDLE_RUNS], self._planned[_IDLE_RUNS:]
        moves = Moves.from_runs(now) if now else NO_MOVES
        if moves.n_runs:
            self._moved()
            self.arena.compact(moves)
            self.arena.head = min(self.arena.head, self.arena.free.starts[0])
        return self.arena.settle_moves()

    def can_truncate(self, seq: int, n: int) -> int:
        """Any beginning of a sequence can be kept."""
        return n

    def sequences(self) -> list[int]:
        """Read off the arena."""
        return self.arena.sequences()

    def usage(self) -> Usage:
        """Read off the free runs."""
        arena, free = self.arena, self.arena.free
        largest = free.largest
        placeable = free.total if self._anywhere else largest
        return Usage(arena.size, arena.used, arena.used, placeable, len(free), largest, arena.top)

    def occupancy(self, group: int = 0) -> CellMap:
        """Read off the arena."""
        return self.arena.cell_map()

    def first_owners(self, group: int = 0) -> IntArray:
        """Read off the arena."""
        return self.arena.first_owners()

    def _facts(self, tokens: int) -> Facts:
        arena = self.arena
        span = padded_span(arena.top, self._pad, arena.size)
        return Facts(arena.used, arena.top, span, self._pad, tokens, arena.count_above)

    def _plan(self) -> Moves:
        return NO_MOVES if self._compactor is None else self._compactor(self.arena)

    def _ask_for_plan(self) -> Moves:
        self._asked = self._plan()
        return self._asked

    def _take(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        arena = self.arena
        arena.take(cells, chunks)
        if self._tiles is not None:
            self._tiles.took(chunks, cells)
        end = int(cells[-1]) + 1
        arena.head = end if end < arena.size else 0

    def _moved(self, seq: int | None = None) -> None:
        """A sequence gives up cells; or any may, or get others."""
        if self._tiles is not None:
            self._tiles.forget(seq)

    def _take_back(self, done: Sequence[MicroBatch]) -> None:
        self._moved()
        for batch in done:
            for chunk in batch.chunks:
                for seq in chunk.seqs:
                    self.arena.remove(seq, chunk.start, chunk.start + chunk.n)
        self.arena.unsettle([(batch.places[0].moves, batch.places[0].shift) for batch in done])

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
        self._planned = []
        if freed is not None:
            self.arena.head = min(self.arena.head, freed)


def cut(step: Sequence[Chunk], tokens: int, n_ubatch: int) -> Sequence[tuple[Chunk, ...]]:
    """``split``, of a step of so many tokens, which are mostly few enough for one micro-batch."""
    if tokens <= n_ubatch and all(chunk.n for chunk in step):
        return (tuple(step),) if step else ()
    return split_batch(step, n_ubatch)
