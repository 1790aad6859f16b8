"""The block tables of all sequences: how they share blocks, write to them, cache them and give them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from policies.content import Content, Key
from policies.paging.block_table import (
    BlockOccupancy,
    BlockTable,
    PendingCopies,
    blocks_behind,
    blocks_for,
    blocks_in_sight,
)
from policies.paging.blocks import NULL, PRIVATE, BlockPool
from policies.paging.free_lists.uncached import ParkedPages
from policies.vocabulary import NO_MOVES, Moves, SequencePlan, Usage

if TYPE_CHECKING:
    from policies.paging.host_offload import TransferLog


class BlockManager:
    """Block tables over one pool, with a prefix cache, copy on write and a sliding window.

    It takes no decisions: whether there is room is up to ``Admission``.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_cache: bool = False,
        window: int | None = None,
        tail_only: bool = False,
    ):
        """``tail_only``: of a prompt only the last blocks that a window needs to see are cached."""
        self.pool = pool
        self.pages = pool.free if isinstance(pool.free, ParkedPages) else None
        """The free list, where blocks are pages that stay mapped in a slot."""
        self.block_size = block_size
        self.capacity = (pool.n - pool.first) * block_size
        """Cells of all blocks that can be handed out."""
        self.prefix_cache = prefix_cache
        self.window = window
        self.tables: dict[int, BlockTable] = {}
        """Each sequence that was opened or holds blocks."""
        self.occupancy = BlockOccupancy(pool.n, block_size)
        self.occupancy.up_to_date = False  # Until it is asked for.
        self.copies = PendingCopies(block_size)
        self.bring_in: Callable[[Sequence[int], Sequence[Key], int], list[int]] | None = None
        """Replaces found blocks that are in the host tier, ``~slot``, by blocks that they are copied to, for a kind of
        request."""
        self.transfers: TransferLog | None = None
        """Copies that are due between the pool and a host tier, if there is one."""
        self.lag = 0
        """Decode steps after which it is known what a token says that a decode step has placed: 1 where steps are
        composed ahead, otherwise 0, and blocks are cached when they are taken."""
        self.forgets_uncomputed = True
        """Whether blocks that are given up before they were written are no longer cached; in vLLM they still are."""
        self._tail_only = tail_only
        self.key_lookahead = 0
        """Tokens behind a block that its key covers too."""

    def keys(self, content: Content, n: int) -> list[Key]:
        """The keys of a text's first ``n`` blocks, or of as many as have one."""
        return content.keys(self.block_size, n, self.key_lookahead)

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Tell a sequence's table what the sequence says, and make the table if there is none."""
        table = self.tables.get(seq)
        if table is None:
            self.tables[seq] = BlockTable(plan.content, plan, seq)
        else:
            table.content, table.plan = plan.content, plan

    def attach(self, table: BlockTable, found: Sequence[int]) -> None:
        """Begin an empty table with cached blocks: ``NULL`` before a window, ``~slot`` for those in the host tier."""
        keys = self.keys(table.content, len(found))
        if self.window is not None:
            table.skipped = next((at for at, block in enumerate(found) if block != NULL), 0)
        self.pool.touch([block for block in found[table.skipped :] if block >= 0], table.plan.kind)
        table.blocks += found if self.bring_in is None else self.bring_in(found, keys, table.plan.kind)
        table.length = len(found) * self.block_size
        table.n_keyed = len(found)
        self.count_tokens(table, table.skipped)

    def extend(self, table: BlockTable, n: int, *, ahead: bool) -> None:
        """Append free blocks to a table; ``ahead``: the first one is for the token behind those that it holds."""
        if self.pages is not None:
            self.pages.turn_to(table.seq, len(table.blocks), ahead=ahead)
        table.blocks += self.pool.take(n)

    def share(self, source: BlockTable, target: BlockTable, stop: int) -> None:
        """Let an empty table hold the first ``stop`` tokens of another one."""
        size = self.block_size
        if target.content.common_prefix(source.content) < min(stop, source.content.n):
            target.content = source.content.head(stop)
        target.blocks = source.blocks[: blocks_for(stop, size)]
        target.length, target.skipped = stop, source.skipped
        target.n_keyed = min(source.n_keyed, stop // size)
        self.pool.share(target.blocks[target.skipped :])
        if stop % size:
            self.occupancy.partially_visible.add(target.blocks[-1])

    def write(self, table: BlockTable, start: int, end: int) -> None:
        """Place tokens ``[start, end)`` in blocks that the table has."""
        table.length, table.reserved = end, 0
        if self.occupancy.up_to_date:
            self.count_tokens(table, start // self.block_size)

    def count_tokens(self, table: BlockTable, first: int) -> None:
        """Count the tokens in a table's blocks from its block ``first`` on."""
        full, rest = divmod(table.length, self.block_size)
        self.occupancy.fill(table.blocks[first:full])
        if rest:
            self.occupancy.raise_to(table.blocks[full], rest)

    def prepare_write(self, table: BlockTable, at: int) -> None:
        """Make a table's block ``at`` writable: copy it if other sequences hold it, and uncache it otherwise.

        A block that was cached when it was scheduled stays: others that found it wait for just these tokens.
        """
        if at < table.n_keyed:
            return
        block = table.blocks[at]
        if self.holders(block) > 1:
            new = self.pool.take(1)[0]
            filled = table.length - at * self.block_size
            table.blocks[at] = new
            if filled > 0:
                self.copies.add(block, new, filled)
                self.occupancy.raise_to(new, filled)
            else:
                self.pool.release([block])
            self._recount(block)
        elif self.pool.keys[block] is not None:
            self.pool.forget(block)

    def cache_full_blocks(self, table: BlockTable, tokens: int) -> None:
        """Cache the blocks that the first ``tokens`` tokens fill, under the keys of the text; no-op without a cache."""
        size = self.block_size
        stop = min(tokens, table.content.n - self.key_lookahead) // size
        if not self.prefix_cache or stop <= table.n_keyed:
            return
        pool = self.pool
        first, last = max(table.n_keyed, table.skipped), stop
        if self._tail_only and self.window is not None:
            end = (table.plan.prompt_tokens - 1) // size
            first, last = max(first, end - blocks_in_sight(self.window, size)), min(stop, end)
        if last <= first:
            table.n_keyed = stop
            return
        # A window's blocks are given up while their sequence goes on, which may yet come back for them.
        if self.window is None and table.content.private and pool.hides_private:
            pool.store_private(table.blocks[first:last])
            table.n_keyed = stop
            return
        keys = self.keys(table.content, stop)
        if last - first == 1:
            if pool.keys[table.blocks[first]] is None:
                pool.store(table.blocks[first], keys[first], table.plan.kind)
        else:
            pool.store_all(table.blocks[first:last], keys[first:last], table.plan.kind)
        table.n_keyed = stop

    def let_be_found(self, table: BlockTable) -> None:
        """Let the cached blocks of a table be found that no other sequence would look for: it will come back itself."""
        table.content.private = table.plan.content.private = False
        pool, keys = self.pool, self.keys(table.content, table.n_keyed)
        for block, key in zip(table.blocks, keys, strict=False):
            if pool.keys[block] == PRIVATE:
                pool.store(block, key, table.plan.kind)

    def skip_behind_window(self, table: BlockTable, position: int) -> None:
        """Give up the blocks that no token from ``position`` on can see, the last of them first."""
        assert self.window is not None
        skipped = min(blocks_behind(position, self.window, self.block_size), len(table.blocks))
        if skipped > table.skipped:
            gone = table.blocks[table.skipped : skipped]
            table.blocks[table.skipped : skipped] = [NULL] * len(gone)
            table.skipped = skipped
            self.give_up(gone[::-1])

    def truncate(self, table: BlockTable, n: int) -> None:
        """Keep the first ``n`` tokens of a table, which must not be behind its window."""
        size = self.block_size
        self.release(table, blocks_for(n, size))
        table.length, table.reserved = n, 0
        table.n_keyed = min(table.n_keyed, n // size)
        table.content = table.content.head(n)
        if n % size:
            self.occupancy.partially_visible.add(table.blocks[-1])
            self._recount(table.blocks[-1])

    def take_back(self, table: BlockTable, n: int) -> None:
        """Keep the first ``n`` tokens of a table, and all of its blocks; no other sequence has those behind."""
        size, occupancy = self.block_size, self.occupancy
        if occupancy.up_to_date:
            for at in range(n // size, blocks_for(int(table.length), size)):
                occupancy.set_to(table.blocks[at], max(n - at * size, 0))
        table.length, table.reserved = n, 0

    def release(self, table: BlockTable, keep: int) -> None:
        """Give up all blocks of a table but the first ``keep``, the last of them first.

        Blocks that were cached when they were scheduled, but never written, are no longer cached.
        """
        gone = table.blocks[max(keep, table.skipped) :]
        first = max(table.length // self.block_size, table.skipped)
        for at in range(first, table.n_keyed if self.forgets_uncomputed else first):
            if self.holders(table.blocks[at]) == 1:
                self.pool.forget(table.blocks[at], evicted=False)
        del table.blocks[keep:]
        gone.reverse()
        self.give_up(gone)

    def give_up(self, blocks: list[int]) -> None:
        """Drop a reference to each of these blocks, and count anew what the other holders see of them."""
        self._empty(self.pool.release(blocks))
        if self.occupancy.partially_visible:
            for block in self.occupancy.partially_visible.intersection(blocks):
                self._recount(block)

    def holders(self, block: int) -> int:
        """Number of sequences that hold a block, which must be in use."""
        if not self.copies.runs:
            return self.pool.holders(block)
        return self.pool.refs[block] - self.copies.from_block(block)

    def settle_copies(self) -> Moves:
        """Hand over the copies on write that are due; the blocks that they read are then no longer held for them."""
        if not self.copies.runs:
            return NO_MOVES
        moves, sources = self.copies.settle()
        self._empty(self.pool.release(sources))
        return moves

    def usage(self) -> Usage:
        """How full the pool is; any free block serves any sequence."""
        size, occupancy, extents = self.block_size, self.counted_occupancy(), self.pool.keep_extents()
        free = extents.total * size
        return Usage(
            self.capacity,
            occupancy.stored,
            self.capacity - free,
            free,
            extents.lengths.count,
            extents.largest * size,
            occupancy.top,
            self.pool.n_free_cached * size,
        )

    def counted_occupancy(self) -> BlockOccupancy:
        """How full each block is, counted anew from the tables if that was not kept up to date."""
        self.occupancy.extents = self.pool.keep_extents()
        if not self.occupancy.up_to_date:
            self.occupancy.reset()
            for table in self.tables.values():
                self.count_tokens(table, table.skipped)
        return self.occupancy

    def _recount(self, block: int) -> None:
        """Count anew how much of a block its holders see, after one of them has given up some or all of it."""
        if not self.occupancy.up_to_date:
            return
        most = 0
        for table in self.tables.values():
            if block in table.blocks:
                at = table.blocks.index(block)
                most = max(most, min(self.block_size, table.length - at * self.block_size))
        self.occupancy.set_to(block, most)

    def _empty(self, blocks: list[int]) -> None:
        """Count blocks that have become free as empty, and drop the copies into them."""
        self.occupancy.empty(blocks)
        if self.copies.runs:
            sources = self.copies.cancel(blocks)
            if sources:
                self._empty(self.pool.release(sources))
