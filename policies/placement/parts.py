"""The placement rule of two-level pages: a row takes a block of every kind of page when its last ones are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.compiled import i64
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable, blocks_behind
from policies.paging.large_pages import LargePages
from policies.placement.rule import PassReads, PlacementRule, Row
from policies.vocabulary import Chunk, MicroBatch, split_batch


class PartRow(Row):
    """A sequence, and its blocks of each kind of page."""

    def __init__(self, seq: int, tables: list[BlockTable]):
        super().__init__(seq, int(tables[0].length))
        self.tables = tables
        self.calm: i64 = 0
        """Tokens up to which it takes no block, fills none that is to be cached, and gives up none; 0: not known."""


class PartRule(PlacementRule):
    """Rows that write into blocks which no other sequence holds, in several paged caches with one memory."""

    def __init__(
        self,
        parts: Sequence[BlockManager],
        memory: LargePages,
        groups: Sequence[tuple[int, int | None]],
        layers: Sequence[tuple[int, int]],
        reserve_step: Callable[[Sequence[Chunk]], bool],
        allocate: Callable[[Sequence[Chunk]], tuple[MicroBatch, ...]],
        max_pass_tokens: int,
    ):
        """``groups``: for each cache group its part, and how far its layers look back if its part keeps more.

        ``layers``: for each part, and those that its pages have room for. ``reserve_step``, ``allocate``: the policy's.
        """
        super().__init__(max_pass_tokens, len(groups))
        self._parts = list(parts)
        self._windows: list[int] = [-1 if part.window is None else part.window for part in parts]
        self._memory = memory
        self._part_of = [part for part, _ in groups]
        self._looks_back: list[int] = [-1 if window is None else window for _, window in groups]
        """By group; -1: all that its part keeps."""
        self._reserve_step = reserve_step
        self._allocate = allocate
        self._layers = list(layers)
        self._all_layers = sum([n for n, _ in layers])
        self._page_room = layers[0][1] * memory.kinds[0].per_page * parts[0].block_size
        """K and V of one token in one layer that a large page has room for."""
        self._size: i64 = parts[0].block_size
        self._caches = parts[0].prefix_cache
        self._nothing: list[tuple[int, ...]] = [() for _ in parts]
        self._tables: list[PartRow] = []
        """The rows, by their own type."""

    # Membership

    def _row_for(self, seq: int) -> Row | None:
        tables: list[BlockTable] = []
        for part in self._parts:
            table = part.tables.get(seq)
            if table is None or not table.length:
                return None
            spare = len(table.blocks) * self._size - table.length
            if spare < 0 or spare >= self._size:
                return None
            if spare:
                last = table.blocks[-1]
                if part.pool.holders(last) > 1 or part.pool.keys[last] is not None:
                    return None
            tables.append(table)
        for table in tables:
            table.reserved = 0
        return PartRow(seq, tables)

    def _drop(self, row: Row) -> None:
        assert isinstance(row, PartRow)
        if self._caches:
            for part, table in zip(self._parts, row.tables, strict=True):
                part.cache_full_blocks(table, int(row.length) - part.lag)

    def _changed(self) -> None:
        tables: list[PartRow] = []
        for row in self.rows:
            assert isinstance(row, PartRow)
            tables.append(row)
        self._tables = tables

    def cache_all_full_blocks(self) -> None:
        """Let all blocks that rows have filled be found."""
        if self._caches:
            for row in self._tables:
                for part, table in zip(self._parts, row.tables, strict=True):
                    part.cache_full_blocks(table, int(row.length))

    # Reserving

    def reserve(self) -> bool:
        """Take the blocks of the next step, and let those be found that it fills.

        Where there is no room for a row, those before it have theirs, as if each had asked for itself.
        """
        due: list[PartRow] = []
        for row in self._tables:
            if row.length + row.n > row.calm:
                due.append(row)
        if not due:
            return True
        if self.places_whole_steps:
            return self._reserve(due)
        granted = True
        for row in due:
            granted = granted and self._reserve([row])
        return granted

    def _reserve(self, rows: list[PartRow]) -> bool:
        """Take blocks of all kinds for the next tokens of these rows, or of none."""
        size, memory = self._size, self._memory
        needs: list[int] = []
        most: i64 = 0
        for at, part in enumerate(self._parts):
            need: i64 = 0
            window = self._windows[at]
            for row in rows:
                table = row.tables[at]
                if window >= 0:
                    unseen = int(row.length) - part.lag
                    if blocks_behind(unseen, window, int(size)) > table.skipped:
                        part.skip_behind_window(table, unseen)
                        self.released = True
                need += self._missing(row, table)
            needs.append(int(need))
            most += need
        later = 0
        if most:
            pages, _ = memory.pages_for(needs, self._nothing)
            later = sum(pages)
            if later > memory.n_available:
                return False
        else:
            pages = needs
        for at, part in enumerate(self._parts):
            later -= pages[at]
            memory.held_back = later
            for row in rows:
                table = row.tables[at]
                more = self._missing(row, table)
                if more:
                    memory.taker = row.seq
                    part.extend(table, int(more), ahead=False)
                if self._caches:
                    part.cache_full_blocks(table, int(row.length + row.n) - part.lag)
        for row in rows:
            self._look_ahead(row)
        return True

    def _missing(self, row: PartRow, table: BlockTable) -> i64:
        """Blocks that a row lacks in one part for its next tokens."""
        size = self._size
        beyond = row.length + row.n - len(table.blocks) * size
        return (beyond + size - 1) // size if beyond > 0 else 0

    def _look_ahead(self, row: PartRow) -> None:
        """Find out when a row is next to take, cache or give up a block, for whose next tokens all is done."""
        size = self._size
        calm = len(row.tables[0].blocks) * size
        lag: i64 = self._parts[0].lag
        if self._caches:
            # Up to this step all is cached that can be.
            filled = ((row.length + row.n - lag) // size + 1) * size + lag - 1
            if filled < calm:
                calm = filled
        for at, window in enumerate(self._windows):
            if window >= 0:
                stays = (row.tables[at].skipped + 1) * size + window - 1 + lag
                if stays < calm:
                    calm = stays
        row.calm = calm

    def reserve_with(self, chunks: Sequence[Chunk]) -> bool:
        """Take the blocks of rows and chunks as ``allocate`` would: all of them, or none."""
        if not chunks:
            return self.reserve()
        due = [row for row in self._tables if row.length + row.n > row.calm]
        if not self._reserve_step([*[Chunk(row.seq, int(row.length), int(row.n)) for row in due], *chunks]):
            return False
        for row in due:
            for table in row.tables:
                table.reserved = 0
            self._look_ahead(row)
        return True

    # Steps

    def take_step(self) -> bool:
        """Give each row its tokens."""
        if not self.reserve():
            return False
        tokens: i64 = 0
        for row in self._tables:
            tokens += row.n
        if tokens > self.max_pass_tokens:
            return False
        if len(self.passes) > 1:
            self.passes = self.passes[:1]
        self._write_rows(self.passes[0], tokens)
        return True

    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take a step with chunks, whose blocks may be reserved already, behind the rows' tokens."""
        rows_tokens: i64 = 0
        tokens: i64 = 0
        plain = True
        for row in self._tables:
            rows_tokens += row.n
        for chunk in chunks:
            tokens += chunk.n
            plain = plain and not chunk.also
        if not plain or not tokens or rows_tokens >= self.max_pass_tokens or not self.reserve_with(chunks):
            return self._place_chunk_by_chunk(chunks)
        fits = rows_tokens + tokens <= self.max_pass_tokens
        passes: list[PassReads] = []
        for part in [chunks] if fits else split_batch(chunks, self.max_pass_tokens, int(rows_tokens)):
            work = PassReads(len(self._part_of))
            if not passes:
                self._write_rows(work, rows_tokens)
            for chunk in part:
                self._write_chunk(work, chunk)
            work.beside = part
            passes.append(work)
        return passes

    def _place_chunk_by_chunk(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        rows = self._tables
        batches = self._allocate([*[Chunk(row.seq, int(row.length), int(row.n)) for row in rows], *chunks])
        self._give_tokens()
        for row in rows:
            row.calm = 0
        return [PassReads.of(batch) for batch in batches]

    def _write_rows(self, work: PassReads, tokens: i64) -> None:
        """Write the tokens of all rows, for which there are blocks, in one pass."""
        rows, size = self._tables, self._size
        for row in rows:
            length = row.length + row.n
            for at, table in enumerate(row.tables):
                table.length = length
                occupancy = self._parts[at].occupancy
                if occupancy.up_to_date:
                    if row.n == 1:
                        last = length - 1
                        occupancy.raise_to(table.blocks[last // size], int(last % size + 1))
                    else:
                        self._parts[at].count_tokens(table, int((length - row.n) // size))
        for at, group in enumerate(work.groups):
            scanned: i64 = 0
            longest: i64 = 0
            runs: i64 = 0
            more: i64 = 0
            part, window = self._part_of[at], self._looks_back[at]
            if group.longer:
                group.longer = []
            for row in rows:
                table = row.tables[part]
                length = table.length
                if window < 0:
                    held = length - table.skipped * size
                else:
                    unseen = length - row.n - window + 1
                    held = length - (unseen // size * size if unseen > 0 else 0)
                runs += (held + size - 1) // size
                if row.n == 1:
                    scanned += held
                    if held > longest:
                        longest = held
                else:
                    group.longer.append((int(row.n), int(held), int(held)))
                    more += held
            group.single_scanned = group.single_useful = scanned
            group.single_most = group.single_most_useful = longest
            group.runs, group.span = runs, scanned + more
        work.tokens, work.chunks, work.rows, work.beside = tokens, len(rows), rows, ()
        self._give_tokens()

    def _write_chunk(self, work: PassReads, chunk: Chunk) -> None:
        """Write a chunk, for which there are blocks, behind what a pass has already."""
        seq, start, n, _ = chunk
        size = int(self._size)
        for part in self._parts:
            part.write(part.tables[seq], start, start + n)
        for at, group in enumerate(work.groups):
            table, window = self._parts[self._part_of[at]].tables[seq], self._looks_back[at]
            behind = table.skipped if window < 0 else blocks_behind(start, window, size)
            held = start + n - behind * size
            group.add_chunk(n, held, held, -(-held // size))
            group.span += held
        work.tokens += n
        work.chunks += 1

    def look(self) -> None:
        """In cells of all layers; free extents are of large pages without a block in use."""
        memory, layers, room, size = self._memory, self._all_layers, self._page_room, int(self._size)
        memory.look()
        stored, free = 0, memory.extents.total * room
        for at, part in enumerate(self._parts):
            own, in_page = self._layers[at]
            if not part.occupancy.up_to_date:
                part.occupancy.reset()
                for table in part.tables.values():
                    part.count_tokens(table, table.skipped)
            stored += part.occupancy.stored * own
            free += memory.free_blocks[at] * size * in_page
        self.stored, self.allocated = stored // layers, (memory.n - 1) * room // layers - free // layers
        self.placeable = size * memory.placeable_blocks
        self.free_extents = memory.free_extents
        self.largest_free_extent = memory.largest_free_extent * room // layers
        self.span = memory.used_pages * room // layers
