"""Regions: one contiguous stretch of cells for each sequence, and the rule by which rows fill theirs step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from policies.cells.region_search import RegionSearch
from policies.compiled import i64, mypyc_attr
from policies.placement.rule import GroupReads, PassReads, PlacementRule, Row
from policies.vocabulary import NO_MOVES, NO_SHIFT, Chunk, IntArray, Moves, OutOfCells, Shift, View

UNBOUNDED: Final = 1 << 60
"""More tokens than there ever are."""


class Region(Row):
    """Cells ``[start, start + size)`` of a sequence."""

    def __init__(self, seq: int, start: int, size: int):
        super().__init__(seq)
        self.start: i64 = start
        self.size: i64 = size
        self.limit: i64 = size
        """Tokens that the sequence may have before the region must grow, or be renumbered."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenOrder:
    """Token ``i`` of a sequence lies in the ``i``-th cell of its region."""

    def __init__(self, max_held: int = UNBOUNDED):
        """``max_held``: cells of a region that can hold a token at the same time."""
        self.max_held = max_held

    def limit(self, region: Region) -> int:
        """Tokens that a sequence may have before its region must grow, or be renumbered."""
        return region.size

    def renumber(self, region: Region, tokens: int) -> None:
        """Make room for the sequence to have ``tokens`` tokens, more than its region's limit; by default grow has."""

    def offsets(self, numbers: IntArray) -> IntArray:
        """Where in a region the tokens of these numbers lie; shape (n,)."""
        return numbers

    def numbers(self, length: int) -> IntArray:
        """The tokens that are still held of the first ``length``, ascending; shape (n,)."""
        return np.arange(length)

    def positions(self, region: Region, numbers: IntArray) -> IntArray:
        """The rotary positions of the tokens of these numbers; shape (n,)."""
        return numbers

    def settle_rotations(self) -> Shift:
        """The keys to rotate that no pass has reported yet; from now on they are reported."""
        return NO_SHIFT


class RegionTable:
    """Where each sequence's region lies, how many cells hold a token, and which cells are free for new regions."""

    def __init__(self, order: TokenOrder, search: RegionSearch):
        """``search``: finds the cells of new regions, in an empty cache."""
        self.order = order
        self.search = search
        self.regions: dict[int, Region] = {}
        self.stored: i64 = 0
        """Cells of all regions that hold a token."""
        self.allocated: i64 = 0
        """Cells of all regions; this and the next three are right after ``look``."""
        self.placeable: i64 = 0
        """Cells of the largest region that there is room for."""
        self.free_extents: i64 = 0
        self.largest_free_extent: i64 = 0
        self._looked = False
        self._max_held: i64 = order.max_held
        self._highest: Region | None = None
        """The region behind all others that hold a token; None where it must be looked for, or there is none."""

    def look(self) -> None:
        """Bring the counts of free cells up to date."""
        if not self._looked:
            free = self.search.free
            self.allocated = free.size - free.total
            self.placeable = self.search.largest
            self.free_extents = len(free)
            self.largest_free_extent = free.largest
            self._looked = True

    def take(self, seq: int, n: int) -> Region:
        """Give a sequence a new region for ``n`` cells. Raises ``OutOfCells``."""
        region = Region(seq, *self._take_cells(n))
        region.limit = self.order.limit(region)
        self.regions[seq] = region
        return region

    def enlarge(self, region: Region, n: int) -> None:
        """Move a region to free cells for ``n``, but give back none yet. Raises ``OutOfCells``."""
        region.start, region.size = self._take_cells(n)
        region.limit = self.order.limit(region)

    def _take_cells(self, n: int) -> tuple[int, int]:
        start = self.search.find(n)
        if start is None:
            most, free = self.search.largest, self.search.free.total
            raise OutOfCells(f"no free extent of {n} cells: the largest has {most} of {free}")
        size = self.search.size_of(n)
        self.search.take(start, size)
        self._looked = False
        return start, size

    def put_back(self, region: Region, start: int, size: int) -> None:
        """Undo ``enlarge`` of a region that had ``size`` cells from ``start`` on."""
        self.give_back(region.start, region.size)
        region.start, region.size = start, size
        region.limit = self.order.limit(region)

    def give_back(self, start: int, size: int) -> None:
        """The cells of a region that there was are free again."""
        self.search.give_back(start, size)
        self._looked = False
        self._highest = None

    def release(self, seq: int) -> None:
        """Give up a sequence's region and all of its tokens."""
        region = self.regions.pop(seq)
        self.stored -= self.held(region)
        self.give_back(region.start, region.size)

    def truncate(self, region: Region, length: int) -> None:
        """Keep the first ``length`` tokens of a region."""
        self.stored -= self.held(region)
        region.length = length
        self.stored += self.held(region)
        self._highest = None

    def held(self, region: Region) -> i64:
        """Cells of a region that hold a token."""
        return region.length if region.length < self._max_held else self._max_held

    def append(self, region: Region, n: i64) -> i64:
        """Count ``n`` more tokens of a region as written; returns the cells that then hold one."""
        before, tokens = region.length, region.length + n
        if tokens > region.limit:
            self.order.renumber(region, tokens)
        region.length = tokens
        highest = self._highest
        if highest is not None and region.start > highest.start:
            self._highest = region
        held = tokens if tokens < self._max_held else self._max_held
        self.stored += held - before if before < self._max_held else 0
        return held

    def write(self, chunk: Chunk) -> IntArray:
        """Count a chunk's tokens as written; returns their cells; shape (n,)."""
        region = self.regions[chunk.seq]
        self.append(region, chunk.n)
        return int(region.start) + self.order.offsets(np.arange(chunk.start, chunk.start + chunk.n))

    def cells(self, seq: int) -> IntArray:
        """The cells that hold a token of a sequence, in order of position; shape (n,)."""
        region = self.regions[seq]
        return int(region.start) + self.order.offsets(self.order.numbers(region.length))

    def view(self, seq: int) -> View:
        """What attention may see of a sequence."""
        region = self.regions[seq]
        return View(self.cells(seq), self.order.positions(region, self.order.numbers(region.length)))

    def top(self) -> i64:
        """One past the highest cell that holds a token."""
        highest = self._highest
        if highest is None:
            for region in self.regions.values():
                if region.length and (highest is None or region.start > highest.start):
                    highest = region
            self._highest = highest
        return 0 if highest is None else highest.start + self.held(highest)


class RegionRule(PlacementRule):
    """Rows fill their regions, each of which is read as one run; full ones are replaced by larger ones."""

    def __init__(self, table: RegionTable, make_room: Callable[[Sequence[Chunk]], Moves], max_pass_tokens: int):
        """``make_room``: lets regions grow for chunks, and says what is copied; all, or it raises ``OutOfCells``."""
        super().__init__(max_pass_tokens, 1)
        self._table = table
        self._make_room = make_room
        self._made: list[PassReads] = [self.passes[0]]
        """Passes that can be used again."""
        self._pass: PassReads = self.passes[0]
        """The pass that is being filled, and the reads of its only group."""
        self._group: GroupReads = self.passes[0].groups[0]
        self._room: i64 = 0
        """Tokens that it still has room for."""
        self._whole: list[Row] = []
        """If there are several passes: the rows that have all their tokens in this one."""
        self._parts: list[Chunk] = []
        """What else is in it then."""

    def _row_for(self, seq: int) -> Row | None:
        """The region of a sequence with tokens."""
        region = self._table.regions.get(seq)
        return None if region is None or not region.length else region

    def take_step(self) -> bool:
        """Fill the regions; False where a full one finds no room to grow."""
        tokens: i64 = 0
        full = False
        for row in self.rows:
            assert isinstance(row, Region)
            tokens += row.n
            if row.length + row.n > row.limit:
                full = True
        moves = NO_MOVES
        if full:
            try:
                moves = self._grow(())
            except OutOfCells:
                return False
        self._fill(tokens, (), moves)
        return True

    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take and grow regions where needed, all or none; then fill them."""
        moves = self._grow(chunks)
        tokens: i64 = 0
        for row in self.rows:
            tokens += row.n
        for chunk in chunks:
            tokens += chunk.n
        self._fill(tokens, chunks, moves)
        return self.passes if tokens else ()

    def look(self) -> None:
        """Note what the table counts."""
        table = self._table
        table.look()
        self.stored, self.allocated, self.span = table.stored, table.allocated, table.top()
        self.placeable, self.free_extents = table.placeable, table.free_extents
        self.largest_free_extent = table.largest_free_extent

    def _grow(self, chunks: Sequence[Chunk]) -> Moves:
        """Make room for all rows and then for chunks; the cells to copy. Raises ``OutOfCells``."""
        wanted: list[Chunk] = []
        for row in self.rows:
            assert isinstance(row, Region)
            if row.length + row.n > row.limit:
                wanted.append(Chunk(row.seq, row.length, row.n))
        wanted += chunks
        moves = self._make_room(wanted)
        if moves is not NO_MOVES:
            self.released = True
        return moves

    def _fill(self, tokens: i64, chunks: Sequence[Chunk], moves: Moves) -> None:
        """Write ``tokens`` tokens, those of the rows and then those of the chunks, pass by pass."""
        several = tokens > self.max_pass_tokens
        ended = False
        if several or len(self.passes) > 1:
            self.passes = []
            self._begin_pass()
        else:
            self._clear(self._pass)
        self._group.moves = moves
        if not several:
            self._pass.rows, self._pass.beside = self.rows, chunks
        for row in self.rows:
            assert isinstance(row, Region)
            if not several:
                self._write(row, row.n)
            elif row.n <= self._room:
                self._write(row, row.n)
                self._whole.append(row)
            else:
                self._write_parts(row, row.n)
            row.left -= row.n
            if row.left <= 0:
                ended = True
        regions = self._table.regions
        for chunk in chunks:
            if several:
                self._write_parts(regions[chunk.seq], chunk.n)
            elif chunk.n:
                self._write(regions[chunk.seq], chunk.n)
        self._end_pass()
        self.ended = ended

    def _write_parts(self, region: Region, n: i64) -> None:
        """Write tokens to a region, over as many passes as that takes."""
        while n > 0:
            if self._room == 0:
                self._end_pass()
                self._begin_pass()
            take = n if n < self._room else self._room
            self._parts.append(Chunk(region.seq, region.length, take))
            self._write(region, take)
            n -= take

    def _write(self, region: Region, n: i64) -> None:
        """Write tokens to a region in the pass that is being filled."""
        held = self._table.append(region, n)
        group = self._group
        if n > 1:
            group.longer.append((n, held, held))
        else:
            group.single_scanned += held
            if held > group.single_most:
                group.single_most = held
        group.runs += 1
        group.span += held
        self._room -= n

    def _begin_pass(self) -> None:
        """Fill another pass, in which the step's tokens do not all have room."""
        at = len(self.passes)
        if at == len(self._made):
            self._made.append(PassReads(1))
        work = self._made[at]
        self.passes.append(work)
        self._clear(work)
        self._whole, self._parts = [], []
        work.rows, work.beside = self._whole, self._parts

    def _clear(self, work: PassReads) -> None:
        """Make a pass empty, and the one that is being filled."""
        self._pass, self._group = work, work.groups[0]
        self._room = self.max_pass_tokens
        group = self._group
        group.single_scanned = group.single_most = group.runs = group.span = 0
        group.moves = NO_MOVES
        if group.longer:
            group.longer = []

    def _end_pass(self) -> None:
        """Note what follows from all that was written in a pass."""
        work, group = self._pass, self._group
        work.tokens, work.chunks = self.max_pass_tokens - self._room, group.runs
        group.single_useful, group.single_most_useful = group.single_scanned, group.single_most
        group.shift = self._table.order.settle_rotations()
        group.prepares = group.moves is not NO_MOVES or group.shift is not NO_SHIFT
