"""The placement rule of one cache for all sequences: each step takes free cells as a micro-batch of its tokens does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from policies.cells.search import first_run
from policies.cells.sequence_cells import Row as SequenceRow
from policies.cells.tile_counts import HeldTiles
from policies.compaction.triggers import CompactionPlanner
from policies.compiled import i64, mypyc_attr
from policies.placement.repeats import CellRow, CellStepRule
from policies.placement.rule import GroupReads, PassReads, Row
from policies.vocabulary import NO_MOVES, Cells, Chunk, OutOfCells, split_batch

if TYPE_CHECKING:
    from policies.layouts.arena_placement import ArenaPlacement
    from policies.layouts.unified import UnifiedPolicy

_TILE: Final = 64


@mypyc_attr(allow_interpreted_subclasses=True)
class CellRule(CellStepRule):
    """Gives the tokens of a step consecutive cells, or the highest free ones.

    A compaction that is due is carried out within the step. A step that finds no room, or before which an engine owes
    something, is taken by the policy's ``allocate``.
    """

    def __init__(
        self,
        policy: UnifiedPolicy,
        placement: ArenaPlacement,
        planner: CompactionPlanner,
        max_pass_tokens: int,
        pad: int,
    ):
        super().__init__(max_pass_tokens, 1, policy.arena.free, policy.arena.rows)
        self._policy = policy
        self._placement = placement
        self._arena = policy.arena
        self._pending = policy.arena.pending
        self._planner = planner
        self._pad: i64 = pad
        self._has_tiles = policy.kernel == "tiled"
        self._contiguous = policy.contiguous
        """Whether a step takes the next consecutive cells; otherwise it takes the highest free ones."""
        self._is_stale = False
        """Whether it must be looked up where the rows' tokens are noted."""
        self._least_left: i64 = 0
        """The fewest tokens that a row was still to be given after the step taken last."""

    # Membership

    def _row_for(self, seq: int) -> Row | None:
        cells: SequenceRow | None = self._arena.row_of(seq)
        if cells is None or cells.end == cells.begin or not self._placement.only_generates(seq, cells.end):
            return None
        return CellRow(seq, cells, self._placement.tiles_of(seq) if self._has_tiles else None)

    def renew(self) -> None:
        """Be told that tiles must be counted again."""
        self._is_stale = True

    def blocked(self) -> list[int]:
        """Rows whose sequence shares cells now, or has a gap."""
        self._tokens()
        return [row.seq for row in self.rows if self._is_stale and self._cells_of(row) is None]

    def _cells_of(self, row: Row) -> SequenceRow | None:
        """Where a row's tokens are noted; None where its sequence cannot be a row any more."""
        cells: SequenceRow | None = self._arena.row_of(row.seq)
        return cells if cells is not None and cells.end == row.length else None

    def _look_up(self) -> bool:
        """Look up where the rows' tokens are noted; False where one of the sequences cannot be a row any more."""
        for row in self.cell_rows:
            cells = self._cells_of(row)
            if cells is None:
                return False
            row.cells = cells
            row.tiles = self._placement.tiles_of(row.seq) if self._has_tiles else None
        self._is_stale = False
        return True

    # Steps

    def take_step(self) -> bool:
        """Give each row its tokens, after a compaction where one is due."""
        free, planner = self.free, self._planner
        tokens = self._tokens()
        if not 0 < tokens <= free.total or not self._can_take(tokens):
            return False
        first: i64 = -1
        if self._contiguous:
            first = self._find(tokens)
            if first < 0:
                return False
        work = self.passes[0]
        group = work.groups[0]
        if group.prepares:
            group.moves, group.prepares = NO_MOVES, False
        if planner.checks_steps:
            planner.ask_before_step(tokens)
        if planner.wanted:
            # There was room before, so there is room behind what is packed.
            self._placement.compact_if_due()
            first = self._find(tokens)
            if first < 0 or (self._is_stale and not self._look_up()):
                return False
            group.moves, _ = self._arena.settle()
            group.note_preparation()
        planner.forget_plans()
        cells = list[int]()
        if first < 0:
            cells = free.take_last(tokens)
            self.go_on_behind(i64(cells[-1]) + 1)
        else:
            free.take(first, tokens)
            self.go_on_behind(first + tokens)
        work.tokens, work.chunks, work.rows = tokens, len(self.rows), self.rows
        self._placement.attended = span = free.span(self._pad)
        self._give(group, first, cells, span)
        if planner.checks_steps:
            planner.ask_after_step(tokens)
        elif first >= 0 and tokens == len(self.rows) and not group.prepares:
            limit = (first // _TILE + 1) * _TILE if self._has_tiles else span
            self.begin_repeats(first, limit, self._least_left)
        return True

    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take a step with chunks beside the rows. What ``OutOfCells.done`` lists is placed, but counted for no row."""
        own = self._tokens()
        tokens = own
        for chunk in chunks:
            tokens += chunk.n
        policy, free, planner = self._policy, self.free, self._planner
        several = tokens > self.max_pass_tokens
        # What is kept where a later micro-batch finds no room must be listed chunk by chunk.
        may_keep = several and policy.keeps_partial and (planner.wanted or free.largest < 2 * tokens)
        if own == self.max_pass_tokens or may_keep or not self._can_take(own):
            return self._place_by_chunks(chunks)
        planner.ask_before_step(tokens)
        head = int(free.head)
        found = list[PassReads]()
        rest = own
        for part in split_batch(chunks, self.max_pass_tokens, own) or [()]:
            taken = self._take_room(rest, part)
            if taken is None:
                refusal: OutOfCells = self._placement.no_room(rest + sum([chunk.n for chunk in part]))
                if found:
                    self._take_back(found, head)
                raise refusal
            moves, shift = self._arena.settle()
            work = PassReads(1)
            work.beside = part
            group = work.groups[0]
            group.moves, group.shift = moves, shift
            group.note_preparation()
            span: i64 = free.span(self._pad)
            if rest:
                if self._is_stale:
                    self._look_up()
                work.rows, work.tokens, work.chunks = self.rows, rest, len(self.rows)
                if isinstance(taken, range):
                    self._give(group, taken.start, [], span)
                else:
                    self._give(group, -1, taken[:rest].tolist(), span)
            self._add_chunks(work, part, span)
            self._placement.attended = span
            found.append(work)
            rest = 0
        planner.ask_after_step(tokens)
        return found

    def _take_room(self, own: i64, chunks: Sequence[Chunk]) -> Cells | None:
        """``ArenaPlacement.take_room``, quicker where consecutive cells are free."""
        planner = self._planner
        if planner.wanted:
            self._placement.compact_if_due()
        if self._contiguous:
            tokens = own
            for chunk in chunks:
                tokens += chunk.n
            first = self._find(tokens)
            if first >= 0:
                planner.forget_plans()
                self.free.take(first, tokens)
                self.go_on_behind(first + tokens)
                if chunks:
                    self._placement.write(chunks, range(first + own, first + tokens))
                return range(first, first + tokens)
        return self._placement.take_room(own, chunks)

    def look(self) -> None:
        """Note how full the cache is; every number is kept up to date."""
        free = self.free
        self.stored = self.allocated = free.size - free.total
        self.free_extents = free.lengths.count
        self.largest_free_extent = free.largest
        self.placeable = self.largest_free_extent if self._contiguous else free.total
        self.span = free.top

    def _tokens(self) -> i64:
        """Tokens that all rows get in a step."""
        tokens: i64 = 0
        for row in self.cell_rows:
            tokens += row.n
            if row.cells.dropped:
                self._is_stale = True
        return tokens

    def _can_take(self, tokens: i64) -> bool:
        """Whether so many tokens of rows can be placed in one micro-batch, without ``allocate``."""
        if tokens > self.max_pass_tokens or (self._is_stale and not self._look_up()):
            return False
        pending = self._pending
        return pending.rotations is None and not pending.moves

    def _find(self, n: i64) -> i64:
        """The first of the consecutive cells that a step of ``n`` tokens gets; -1 if there are none."""
        free = self.free
        head = free.head
        # As ``start_of_search`` has it.
        if head > free.size - free.total + 2 * n:
            head = 0
        found = first_run(free, n, head)
        return self._placement.first_fit(n) if found < 0 else found

    def go_on_behind(self, end: i64) -> None:
        """Let the next search begin at ``end``, or at 0 where that is the end of the cache."""
        self.free.head = end if end < self.free.size else 0

    def _give(self, group: GroupReads, first: i64, cells: list[int], span: i64) -> None:
        """Note the cells of the rows' tokens, which are taken: those from ``first`` on, or ``cells``; and the reads."""
        if group.longer:
            group.longer = []
        scanned: i64 = 0
        useful: i64 = 0
        most: i64 = 0
        most_useful: i64 = 0
        runs: i64 = 0
        longer: i64 = 0
        at: i64 = 0
        least_left: i64 = 1 << 60
        for row in self.cell_rows:
            n, noted, tiles = row.n, row.cells, row.tiles
            for _ in range(n):
                cell = first + at if first >= 0 else cells[at]
                at += 1
                self.sequences.append_run(noted, cell, 1, 1)
                if tiles is not None:
                    tiles.add_one(cell)
            row.length += n
            row.left -= n
            if row.left < least_left:
                least_left = row.left
            reads = span
            sees = row.length
            if tiles is None:
                runs += 1
            else:
                reads, sees = _TILE * tiles.tiles, tiles.cells
                runs += tiles.runs
            if n > 1:
                group.longer.append((n, reads, sees))
                longer += reads
                continue
            scanned += reads
            useful += sees
            if reads > most:
                most = reads
            if sees > most_useful:
                most_useful = sees
        self.ended, self._least_left = least_left <= 0, least_left
        group.single_scanned, group.single_useful = scanned, useful
        group.single_most, group.single_most_useful = most, most_useful
        group.runs = runs
        group.span = scanned + longer if self._has_tiles else span

    def _add_chunks(self, work: PassReads, chunks: Sequence[Chunk], span: i64) -> None:
        """Note what chunks read that have been placed."""
        group = work.groups[0]
        if not self._has_tiles:
            group.span = span
        for seq, start, n, _ in chunks:
            work.tokens += n
            work.chunks += 1
            if self._has_tiles:
                tiles: HeldTiles = self._placement.tiles_of(seq)
                group.span += _TILE * tiles.tiles
                group.add_chunk(n, _TILE * tiles.tiles, tiles.cells, tiles.runs)
            else:
                group.add_chunk(n, span, start + n, 1)

    def _take_back(self, passes: Sequence[PassReads], head: int) -> None:
        """Undo a step of which these passes were placed."""
        chunks = list[Chunk]()
        for row in self.rows:
            row.length -= row.n
            row.left += row.n
            chunks.append(Chunk(row.seq, row.length, row.n))
        self.ended = False
        for work in passes:
            chunks += work.beside
        self._placement.take_back(chunks, [(work.groups[0].moves, work.groups[0].shift) for work in passes], head)

    def _place_by_chunks(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """``place`` through ``allocate``."""
        step = [Chunk(row.seq, int(row.length), int(row.n)) for row in self.rows]
        step += chunks
        batches = self._policy.allocate(step)
        self._give_tokens()
        return [PassReads.of(batch) for batch in batches]
