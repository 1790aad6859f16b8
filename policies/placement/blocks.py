"""The placement rule of paged memory: a row takes a block when its last one is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.compiled import i64
from policies.paging.admission import Admission
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable, blocks_behind, blocks_for
from policies.placement.rule import GroupReads, PassReads, PlacementRule, Row
from policies.vocabulary import Chunk, MicroBatch, Transfer, split_batch


class BlockRule(PlacementRule):
    """Rows that write into blocks which no other sequence holds; what they fill is cached in the order of steps.

    Behind a window each row gives up a block before it takes one, or where steps are placed as a whole all rows do.
    """

    def __init__(
        self,
        blocks: BlockManager,
        admission: Admission,
        allocate: Callable[[Sequence[Chunk]], tuple[MicroBatch, ...]],
        settle_transfers: Callable[[], tuple[Transfer, ...]],
        max_pass_tokens: int,
        *,
        one_run: bool,
    ):
        """``allocate``, ``settle_transfers``: the policy's. ``one_run``: each sequence is read as one run."""
        super().__init__(max_pass_tokens, 1)
        self._blocks = blocks
        self._pool = blocks.pool
        self._admission = admission
        self._allocate = allocate
        self._settle_transfers = settle_transfers
        self._one_run = one_run
        self._size: i64 = blocks.block_size
        self._window: i64 = -1 if blocks.window is None else blocks.window
        self._caches = blocks.prefix_cache
        self._prepares = blocks.transfers is not None or blocks.pages is not None
        """Whether a step may have something to do before its first pass."""
        self._tables: list[BlockTable] = []
        """The rows, by their own type."""
        self._tokens: i64 = 0
        """Tokens that all rows are given in a step."""
        self._quiet: i64 = 0
        """Steps, the next one first, in which no row takes a block that it has not got, gives one up, or fills one."""
        self._repeats: i64 = 0
        """Steps that ``repeat_step`` has taken since ``settle``."""
        self._until_end: i64 = 0
        """Repeats after which some row has had its last token; 0 where the step taken last cannot be repeated."""
        self._least_left: i64 = 0
        """The fewest tokens that a row was still to be given after the step taken last."""
        self._highest: i64 = -1
        """The highest block that a row was last written into; -1 if that was not counted."""
        self.steps = 0
        """Steps taken."""

    # Membership

    def _row_for(self, seq: int) -> Row | None:
        table, size = self._blocks.tables.get(seq), self._size
        if table is None or table.length == 0:
            return None
        spare = len(table.blocks) * size - table.length
        if spare < 0 or spare >= size:
            return None
        if spare:
            last = table.blocks[-1]
            if self._pool.holders(last) > 1 or self._pool.keys[last] is not None:
                return None
        if self._window >= 0 and table.skipped > self._behind(table):
            return None
        if not self._caches:
            self._pool.stop_counting()
        table.reserved = 0
        table.full_at = len(table.blocks) * size
        return table

    def _drop(self, row: Row) -> None:
        if self._caches:
            assert isinstance(row, BlockTable)
            self._blocks.cache_full_blocks(row, int(row.length) - self._blocks.lag)

    def _changed(self) -> None:
        tables = list[BlockTable]()
        for row in self.rows:
            assert isinstance(row, BlockTable)
            tables.append(row)
        self._tables = tables
        self._count_tokens()

    def _count_tokens(self) -> None:
        tokens: i64 = 0
        for table in self._tables:
            tokens += table.n
        self._tokens = tokens
        self._quiet = self._until_end = 0

    def cache_all_full_blocks(self) -> None:
        """Let all blocks that rows have filled be found."""
        if self._caches:
            for table in self._tables:
                self._blocks.cache_full_blocks(table, int(table.length))

    # Reserving

    def reserve(self) -> bool:
        """Take the blocks of the next step, in the order of rows, and let those be found that it fills."""
        if self._quiet > 0:
            return True
        self._until_end = 0
        if self._window >= 0 and self.places_whole_steps:
            self._give_up_all()
        need = self._missing()
        if need > len(self._pool.free):
            return False
        blocks, size, each_gives_up = self._blocks, self._size, self._window >= 0 and not self.places_whole_steps
        lag: i64 = blocks.lag
        quiet: i64 = 1 << 40
        for table in self._tables:
            stop = table.length + table.n
            if each_gives_up:
                self._give_up(table)
            if stop > table.full_at:
                more = (stop - table.full_at + size - 1) // size
                blocks.extend(table, int(more), ahead=table.length == table.full_at)
                table.full_at += more * size
            if self._caches:
                filled = (stop - lag) // size
                if filled > table.n_keyed:
                    blocks.cache_full_blocks(table, int(stop - lag))
                left = (filled + 1) * size - (stop - lag)
                if left < quiet:
                    quiet = left
            left = table.full_at - stop + 1 if table.n == 1 else 1
            if left < quiet:
                quiet = left
            if self._window >= 0:
                left = self._next_given_up(table)
                if left < quiet:
                    quiet = left
        self._quiet = quiet
        return True

    def reserve_with(self, chunks: Sequence[Chunk]) -> bool:
        """Take the blocks of rows and chunks in the order of single steps: all of them, or none."""
        if not chunks:
            return self.reserve()
        if self._window >= 0 and self._quiet == 0:
            self._give_up_all()
        return self._admission.reserve_beside(chunks, 0 if self._quiet else int(self._missing()), self.reserve)

    def _missing(self) -> i64:
        """Blocks that the rows lack for the next step."""
        size = self._size
        need: i64 = 0
        for table in self._tables:
            beyond = table.length + table.n - table.full_at
            if beyond > 0:
                need += (beyond + size - 1) // size
        return need

    def _behind(self, table: BlockTable) -> int:
        """A row's first blocks that its next token, and those in flight, do not see."""
        return blocks_behind(int(table.length) - self._blocks.lag, int(self._window), int(self._size))

    def _give_up(self, table: BlockTable) -> None:
        """Have a row give up the blocks that the window has left."""
        if self._behind(table) > table.skipped:
            self._blocks.skip_behind_window(table, int(table.length) - self._blocks.lag)
            self.released = True

    def _give_up_all(self) -> None:
        for table in self._tables:
            self._give_up(table)

    def _next_given_up(self, table: BlockTable) -> i64:
        """Steps up to the one before which a row gives up its next block, once it has given up what it can now."""
        unseen = table.length - self._blocks.lag - self._window + 1
        return (table.skipped + 1) * self._size - unseen

    # Steps

    def take_step(self) -> bool:
        """Give each row its tokens."""
        if self._quiet == 0 and not self.reserve():
            return False
        if self._blocks.copies.runs:
            return False
        tables = self._tables
        if self._tokens <= self.max_pass_tokens:
            work = self.passes[0]
            if len(self.passes) > 1:
                del self.passes[1:]
            self._write(work, tables)
            if self._tokens == len(tables):
                self._until_end = self._least_left
        elif self._tokens == len(tables):
            self._write_in_passes(tables)
        else:
            return False
        if self._prepares:
            self._prepare(self.passes[0].groups[0])
        self.steps += 1
        self._quiet -= 1
        return True

    def repeat_step(self) -> bool:
        """While no row takes a block, gives one up or fills one, each reads one cell more than in the step before."""
        if self._quiet <= 0 or self._repeats >= self._until_end:
            return False
        group, rows = self.passes[0].groups[0], self._tokens
        group.single_scanned += rows
        group.single_useful += rows
        group.single_most += 1
        group.single_most_useful += 1
        group.span += rows
        if self._prepares:
            self._prepare(group)
        self._repeats += 1
        self.ended = self._repeats == self._until_end
        self.steps += 1
        self._quiet -= 1
        return True

    def settle(self) -> None:
        """Have rows, and what is counted by block, count the tokens of repeated steps."""
        repeats, occupancy = self._repeats, self._blocks.occupancy
        if repeats == 0:
            return
        for table in self._tables:
            table.length += repeats
            table.left -= repeats
            if occupancy.up_to_date:
                occupancy.add_tokens(table.blocks[(table.length - 1) // self._size], repeats)
        self._repeats = self._until_end = 0

    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take a step with chunks, whose blocks may be reserved already, behind the rows' tokens."""
        tables, most = self._tables, self.max_pass_tokens
        if self._blocks.copies.runs or not self.reserve_with(chunks) or self._tokens > most:
            return self._place_chunk_by_chunk(chunks)
        work = PassReads(1)
        self._write(work, tables)
        passes = [work]
        room = most - int(self._tokens)
        parts: Sequence[Sequence[Chunk]] = (chunks,)
        if room == 0 or sum([chunk.n for chunk in chunks]) > room:
            parts = split_batch(chunks, most, int(self._tokens) % most)
        for part in parts:
            if work.beside or work.tokens == most:
                work = PassReads(1)
                passes.append(work)
            self._write_chunks(work, part)
        if self._prepares:
            self._prepare(passes[0].groups[0])
        self.steps += 1
        self._quiet -= 1
        return passes

    def look(self) -> None:
        """From what the pool counts."""
        occupancy, extents, size = self._blocks.occupancy, self._pool.extents, self._size
        if extents is None or not occupancy.up_to_date:
            self.settle()
            self._note_usage(self._blocks.usage())
            return
        free = extents.total * size
        self.stored, self.span = occupancy.stored + self._repeats * self._tokens, occupancy.top
        # Asked for now: higher blocks may have been given up since the rows were written.
        if self.span and self._highest == occupancy.highest:
            self.span += self._repeats
        self.allocated, self.placeable = self._blocks.capacity - free, free
        self.free_extents, self.largest_free_extent = extents.lengths.count, extents.largest * size

    def _place_chunk_by_chunk(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        step = [Chunk(table.seq, int(table.length), int(table.n)) for table in self._tables]
        step += chunks
        lengths = [table.length for table in self._tables]
        batches = self._allocate(step)
        for table, length in zip(self._tables, lengths, strict=True):
            table.length, table.full_at = length, len(table.blocks) * self._size
        self._give_tokens()
        self._quiet = 0
        return [PassReads.of(batch) for batch in batches]

    def _prepare(self, first: GroupReads) -> None:
        """Let the first pass carry what must be done before the step."""
        blocks = self._blocks
        first.transfers = self._settle_transfers() if blocks.transfers is not None else ()
        pages = blocks.pages
        first.mapped = pages.settle() if pages is not None and pages.due else 0
        first.note_preparation()

    def _write(self, work: PassReads, tables: list[BlockTable]) -> None:
        """Write the tokens of rows that are in one pass, and note what they read."""
        group, size = work.groups[0], self._size
        occupancy = self._blocks.occupancy
        counts = occupancy.up_to_date
        least_left: i64 = 1 << 60
        highest: i64 = -1
        scanned: i64 = 0
        longest: i64 = 0
        runs: i64 = 0
        tokens: i64 = 0
        more: i64 = 0
        if group.longer:
            group.longer = []
        for table in tables:
            length = table.length + table.n
            table.length = length
            table.left -= table.n
            if table.left < least_left:
                least_left = table.left
            # Further blocks may be reserved ahead of their first tokens.
            begun = (length + size - 1) // size
            held = length - table.skipped * size
            runs += begun - table.skipped
            tokens += table.n
            if table.n == 1:
                scanned += held
                if held > longest:
                    longest = held
            else:
                group.longer.append((int(table.n), int(held), int(held)))
                more += held
            if counts:
                if table.n == 1:
                    block: i64 = table.blocks[begun - 1]
                    occupancy.add_tokens(block, 1)
                    if block > highest:
                        highest = block
                else:
                    self._blocks.count_tokens(table, int((length - table.n) // size))
        work.tokens, work.chunks, work.rows, work.beside = tokens, len(tables), tables, ()
        group.single_scanned = group.single_useful = scanned
        group.single_most = group.single_most_useful = longest
        group.runs = len(tables) if self._one_run else runs
        group.span = scanned + more
        self.ended = least_left <= 0
        self._least_left, self._until_end = least_left, 0
        self._highest = highest

    def _write_in_passes(self, tables: list[BlockTable]) -> None:
        """Write the tokens of more rows than a pass has room for, one of each."""
        passes, ended, first = list[PassReads](), False, 0
        while first < len(tables):
            work = PassReads(1)
            self._write(work, tables[first : first + self.max_pass_tokens])
            ended = ended or self.ended
            passes.append(work)
            first += self.max_pass_tokens
        self.passes, self.ended = passes, ended

    def _write_chunks(self, work: PassReads, chunks: Sequence[Chunk]) -> None:
        """Write chunks that have their blocks, behind what a pass has already."""
        group, size = work.groups[0], int(self._size)
        for seq, start, n, _ in chunks:
            table = self._blocks.tables[seq]
            self._blocks.write(table, start, start + n)
            held = start + n - table.skipped * size
            group.add_chunk(n, held, held, 1 if self._one_run else blocks_for(held, size))
            group.span += held
            work.tokens += n
        work.chunks += len(chunks)
        work.beside = chunks
