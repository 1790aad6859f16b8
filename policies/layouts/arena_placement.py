"""Where the micro-batches of one arena go: the search for their cells, taking them, and taking them back."""

from __future__ import annotations

from collections.abc import Sequence

from policies.cells.arena import Arena
from policies.cells.reads import reads_of
from policies.cells.search import cells_array, find_contiguous, start_of_search
from policies.cells.tile_counts import HeldTiles, TileCounts
from policies.compaction.triggers import CompactionPlanner, Trigger
from policies.placement.cells import CellRule
from policies.policy import Kernel
from policies.vocabulary import Cells, Chunk, MicroBatch, Moves, OutOfCells, Place, Shift, View


class ArenaPlacement:
    """Consecutive cells from a moving head, with a compaction where one is due.

    A subclass with another search overrides ``find``, and declares ``contiguous``: where that is False, the placement
    rule gives rows the highest free cells.
    """

    contiguous = True

    def __init__(self, arena: Arena, compaction: CompactionPlanner, trigger: Trigger, kernel: Kernel, pad: int):
        self.arena = arena
        self.attended = 0
        """llama.cpp's ``n_kv``: the span of the last micro-batch that was placed."""
        self.rule: CellRule | None = None
        """What is told when the tiles of rows must be looked up again."""
        self._compaction = compaction
        self._trigger = trigger
        self._kernel = kernel
        self._pad = pad
        self._tiles = TileCounts(arena) if kernel == "tiled" else None

    def find(self, row_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """Cells for the tokens of a micro-batch whose first ones are those of rows, shape (n_tokens,).

        None if there are none; the head is then where the search stopped.
        """
        arena, n = self.arena, row_tokens + sum([chunk.n for chunk in chunks])
        first, arena.head = find_contiguous(arena.free, start_of_search(arena.head, arena.used, n), n)
        return None if first is None else range(first, first + n)

    def only_generates(self, seq: int, tokens: int) -> bool:
        """Whether a sequence that has so many tokens gets the others where generated tokens are placed."""
        return True

    def first_fit(self, n: int) -> int:
        """Where ``n`` consecutive cells would be found now; -1 where there is no room."""
        arena = self.arena
        first, _ = find_contiguous(arena.free, start_of_search(arena.head, arena.used, n), n)
        return -1 if first is None else first

    def find_or_compact(self, row_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """``find``, with a compaction before where one is due, and after where a failure asks for one."""
        self.compact_if_due()
        self._compaction.forget_plans()
        cells = self.find(row_tokens, chunks)
        if cells is None and self._trigger.on_failure and self.compact().n_runs:
            cells = self.find(row_tokens, chunks)
        return cells

    def take_room(self, row_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """Take cells for a micro-batch that begins with tokens of rows, and write the chunks behind them into theirs.

        All of the cells; None where there is no room.
        """
        cells = self.find_or_compact(row_tokens, chunks)
        if cells is None:
            return None
        if row_tokens:
            self.take((), cells[:row_tokens])
        if chunks:
            self.take(chunks, cells[row_tokens:])
        return cells

    def take(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Take free cells, write the tokens of chunks into them, and let the next search begin behind them."""
        arena = self.arena
        arena.take(cells, chunks)
        if self._tiles is not None:
            self._tiles.add_chunks(chunks, cells)
        end = int(cells[-1]) + 1
        arena.head = end if end < arena.size else 0

    def write(self, chunks: Sequence[Chunk], cells: Cells) -> None:
        """Write the tokens of chunks into cells that have been taken."""
        self.arena.write(cells_array(cells), chunks)
        if self._tiles is not None:
            self._tiles.add_chunks(chunks, cells)

    def micro_batch(self, chunks: tuple[Chunk, ...], cells: Cells, views: bool) -> MicroBatch:
        """What an engine is told of chunks that have been placed."""
        arena = self.arena
        moves, shift = arena.settle()
        self.attended = arena.free.span(self._pad)
        if self._tiles is not None:
            reads = self._tiles.reads(chunks)
        else:
            reads = reads_of(self._kernel, chunks, lambda seq: arena.cells_of(seq)[0], self.attended)
        seen = tuple(View(*arena.cells_of(chunk.seq)) for chunk in chunks) if views else ()
        return MicroBatch(chunks, (Place(cells_array(cells), reads, moves, shift, seen),))

    def take_back(self, chunks: Sequence[Chunk], settled: Sequence[tuple[Moves, Shift]], head: int) -> None:
        """Undo the micro-batches of a step that finds no room later on.

        ``chunks``: what they placed; ``settled``: what was given out with each; ``head``: as it was before.
        """
        self.forget_tiles()
        for chunk in chunks:
            for seq in chunk.seqs:
                self.arena.remove(seq, chunk.start, chunk.start + chunk.n)
        self.arena.pending.put_back(settled)
        self.arena.head = head

    def no_room(self, tokens: int, done: Sequence[MicroBatch] = ()) -> OutOfCells:
        """What to raise where a micro-batch of so many tokens finds no room."""
        free, size = self.arena.free.total, self.arena.size
        return OutOfCells(f"no room for {tokens} token{'s' * (tokens > 1)}: {free} of {size} cells are free", done)

    # Compaction

    def compact_if_due(self) -> None:
        """Compact if that is due (llama.cpp's ``llama_kv_self_update``, but for rotations: they stay pending)."""
        if self._compaction.wanted:
            self._compaction.wanted = False
            self.compact()

    def compact(self) -> Moves:
        """Carry out the compactor's plan at once."""
        moves = self._compaction.plan()
        self._compaction.forget_plans()
        if moves.n_runs:
            self.forget_tiles()
            self.arena.compact(moves)
            self.arena.head = self.arena.used
        return moves

    # Tiles

    def tiles_of(self, seq: int) -> HeldTiles:
        """The tiles of a sequence, where the kernel has tiles."""
        assert self._tiles is not None, "the kernel has tiles"
        return self._tiles.of(seq)

    def forget_tiles(self, seq: int = -1) -> None:
        """Note that a sequence, or any if negative, gives up cells or gets others."""
        if self._tiles is not None:
            self._tiles.forget(seq)
            if seq < 0 and self.rule is not None:
                self.rule.renew()
