"""One arena for all sequences, contiguous slots from a moving head: the cache of llama.cpp until mid-2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.cells.arena import FOREVER, Arena
from policies.cells.host_copies import SavedPlaces, chunks_of, host_cells, host_cells_at, transfers_of
from policies.cells.search import cells_array
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import CompactionPlanner, Trigger
from policies.layouts.arena_placement import ArenaPlacement
from policies.placement.cells import CellRule
from policies.placement.rule import PlacementRule
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
    RelativeCosts,
    Usage,
    split_batch,
)


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """Options of layouts with one arena."""

    threshold: float = 0.1
    """Fragmentation ratio above which a threshold trigger compacts."""
    n_layers: int = 4
    """Layers of the model, on which llama.cpp's limit of runs in one defragmentation depends."""
    costs: RelativeCosts = field(default_factory=lambda: RelativeCosts(score=1.0, run=50.0, cell=8.0))
    """What an adaptive trigger weighs compactions by."""


class UnifiedPolicy(Policy):
    """One arena, a search for contiguous cells, and a compactor with its trigger.

    The bookkeeping is that of llama.cpp b4666 to b4880. ``keeps_partial``: when a later micro-batch of a step finds
    no room, keep what earlier ones took, as llama.cpp did; otherwise take it all back. A subclass with another search
    names its ``ArenaPlacement``.
    """

    placing: type[ArenaPlacement] = ArenaPlacement
    """How cells are searched for."""

    can_shift = True
    can_export = True
    can_skip_positions = True
    has_placement_rule = True

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
        config.read(ArenaOptions)  # What these say is up to the compactor and the trigger.
        self.name = name
        self.capacity = config.cells
        self.groups = (Group(config.cells),)
        self.kernel = config.kernel or kernel
        self.arena = Arena(config.cells)
        self.trigger = trigger or Trigger()
        self.moves_cells = compactor is not None
        self.contiguous = self.placing.contiguous
        self._compaction = CompactionPlanner(self.arena, compactor, self.trigger, config.pad)
        self._placement = self.placing(self.arena, self._compaction, self.trigger, self.kernel, config.pad)
        self.keeps_partial = keeps_partial
        self._n_ubatch = config.n_ubatch
        self._rule = CellRule(self, self._placement, self._compaction, config.n_ubatch, config.pad)
        self._placement.rule = self._rule

    @property
    def attended(self) -> int:
        """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
        return self._placement.attended

    @property
    def wants_compaction(self) -> bool:
        """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
        return self._compaction.wanted

    @wants_compaction.setter
    def wants_compaction(self, wanted: bool) -> None:
        self._compaction.wanted = wanted

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step micro-batch by micro-batch, compacting where the trigger says so."""
        placement, compaction, head = self._placement, self._compaction, self.arena.head
        tokens = sum([chunk.n for chunk in step])
        compaction.ask_before_step(tokens)
        done: list[MicroBatch] = []
        for chunks in cut(step, tokens, self._n_ubatch):
            cells = placement.find_or_compact(0, chunks)
            if cells is None:
                refusal = placement.no_room(sum(chunk.n for chunk in chunks), done if self.keeps_partial else ())
                if not self.keeps_partial and done:
                    settled = [(batch.places[0].moves, batch.places[0].shift) for batch in done]
                    placement.take_back([chunk for batch in done for chunk in batch.chunks], settled, head)
                raise refusal
            placement.take(chunks, cells)
            done.append(placement.micro_batch(chunks, cells, views))
        compaction.ask_after_step(tokens)
        return tuple(done)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Empty the sequence's cells; the next search begins at the first of them if that is lower."""
        self._leave_rule(seq)
        self._placement.forget_tiles(seq)
        if start <= 0 and stop is None:
            self._lower_head(self.arena.empty(seq))
            return
        gone = self.arena.remove(seq, start, FOREVER if stop is None else stop)
        self._lower_head(int(gone[0]) if len(gone) else None)

    def export(self, seq: int, host: Cells | None = None) -> Exported | None:
        """All of a sequence's cells."""
        if host is None:
            return None
        cells, positions = self.arena.cells_of(seq)
        copy = HostCopy(transfers_of(cells, host_cells(host, positions), to_host=True), *self.arena.settle())
        return Exported(len(host), (copy,), (host, SavedPlaces(cells, positions)))

    def import_(self, seq: int, exported: Exported, *, upto: int = 0, waits: bool = False) -> tuple[HostCopy, ...]:
        """Placed as one micro-batch of any size, with a compaction where a failure asks for one.

        The tokens take their cells in the order of those that they were copied out of, and the next search begins at
        the first of them (``read_kv_cache_meta`` of b4875).
        """
        self.free(seq)
        host, saved = exported.state
        arena, positions = self.arena, saved.by_cell()
        chunks = chunks_of(seq, positions)
        self._compaction.forget_plans()
        found = self._placement.find(0, chunks)
        if found is None and self.trigger.on_failure and self.compact().n_runs:
            found = self._placement.find(0, chunks)
        if found is None:
            raise OutOfCells(f"no room for {len(host)} tokens from the host: {arena.free.total} cells are free")
        self._placement.take(chunks, found)
        self._compaction.forget_plans()
        cells = cells_array(found)
        arena.head = int(cells[0])
        settled = arena.settle()
        return (HostCopy(transfers_of(cells, host_cells_at(host, positions), to_host=False), *settled),)

    def copy(self, src: int, dst: int, start: int = 0, stop: int | None = None) -> None:
        """Share the cells; the next search begins at 0."""
        self._placement.forget_tiles()
        self._compaction.forget_plans()
        self.arena.share(src, dst, start, FOREVER if stop is None else stop)
        self.arena.head = 0

    def keep(self, seq: int) -> None:
        """Empty all other cells; the next search begins at the first empty one if that is lower."""
        self._leave_rule(-1)
        self._placement.forget_tiles()
        self.arena.keep(seq)
        self._lower_head(self.arena.free.first_cell(0) if self.arena.free.total else None)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> None:
        """Add to the positions, and have the keys rotated with the next micro-batch."""
        stop = FOREVER if stop is None else stop
        if start == stop:
            return
        self._leave_rule(seq)
        self._placement.forget_tiles()
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
        self._placement.forget_tiles()
        self.arena.clear()
        self._compaction.forget_plans()

    def update(self) -> None:
        """Compact if that is due (llama.cpp's ``llama_kv_self_update``, but for rotations: they stay pending)."""
        self._placement.compact_if_due()

    def compact(self) -> Moves:
        """Carry out the compactor's plan at once."""
        return self._placement.compact()

    def idle(self) -> Moves:
        """The next few runs of a plan; a new plan is made only when the arena has changed."""
        if not self.trigger.when_idle:
            return NO_MOVES
        moves = self._compaction.next_idle_moves()
        if moves.n_runs:
            self._placement.forget_tiles()
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

    def _leave_rule(self, seq: int) -> None:
        """Let a sequence, or all if negative, be no row any more."""
        rows = self._rule.by_seq
        for each in list(rows) if seq < 0 else [seq]:
            if each in rows:
                self._rule.leave(each)

    def _lower_head(self, freed: int | None) -> None:
        self._compaction.forget_plans()
        if freed is not None:
            self.arena.head = min(self.arena.head, freed)


def cut(step: Sequence[Chunk], tokens: int, n_ubatch: int) -> Sequence[tuple[Chunk, ...]]:
    """``split_batch`` of a step of ``tokens`` tokens, faster if they fit into one micro-batch."""
    if tokens <= n_ubatch and all(chunk.n for chunk in step):
        return (tuple(step),) if step else ()
    return split_batch(step, n_ubatch)
