"""Blocks that move between the pool and the host tier: evicted ones, swapped sequences, prefixes fetched ahead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from policies.content import Content, Key
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable, blocks_for
from policies.vocabulary import Exported, OutOfCells, Transfer


class HostTier:
    """Slots for blocks: evicted blocks leave in LRU order, those of swapped sequences stay until they are released."""

    def __init__(self, n_blocks: int):
        self.n = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._evicted: OrderedDict[Key, int] = OrderedDict()
        """Slots of evicted blocks by key, the least recently used first."""

    @property
    def used(self) -> int:
        """Number of slots that hold a block."""
        return self.n - len(self._free)

    def keep(self, key: Key) -> int | None:
        """A slot to copy an evicted block to; None where it is there already, or swapped sequences fill the tier."""
        if key in self._evicted:
            self._evicted.move_to_end(key)
            return None
        slots = self.hold(1)
        if slots is None:
            return None
        self._evicted[key] = slots[0]
        return slots[0]

    def find(self, key: Key) -> int | None:
        """The slot of an evicted block, or None."""
        return self._evicted.get(key)

    def pin(self, keys: list[Key]) -> list[int]:
        """The slots of evicted blocks that are there; they will not be reused before ``unpin``."""
        return [self._evicted.pop(key) for key in keys]

    def unpin(self, keys: list[Key], slots: list[int]) -> None:
        """Let pinned slots be reused again, as the most recently used; the last of them before the others."""
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            if key in self._evicted:
                self._free.append(slot)
            else:
                self._evicted[key] = slot

    def hold(self, n: int) -> list[int] | None:
        """Take ``n`` slots for a swapped sequence, forgetting evicted blocks; None where there are too few."""
        if len(self._free) + len(self._evicted) < n:
            return None
        while len(self._free) < n:
            self._free.append(self._evicted.popitem(last=False)[1])
        return [self._free.pop() for _ in range(n)]

    def release(self, slots: list[int]) -> None:
        """Return the slots of a swapped sequence."""
        self._free.extend(reversed(slots))


class TransferLog:
    """Copies between the cache and the host tier that an engine has yet to make, in order."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._runs: list[Transfer] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, block: int, slot: int, *, to_host: bool) -> None:
        """Note the copy of one block; it is merged with the last one if it continues that in both tiers."""
        size = self._block_size
        cell, host = block * size, slot * size
        if self._runs:
            last = self._runs[-1]
            if last.to_host == to_host and (last.cell + last.n, last.host + last.n) == (cell, host):
                self._runs[-1] = last._replace(n=last.n + size)
                return
        self._runs.append(Transfer(to_host, cell, host, size))

    def settle(self) -> tuple[Transfer, ...]:
        """Hand over all copies, which are then no longer due."""
        runs, self._runs = tuple(self._runs), []
        return runs


class HostOffload:
    """Keeps evicted blocks in a host tier, brings them back where they are found, and swaps whole sequences."""

    def __init__(self, tier: HostTier, blocks: BlockManager):
        self.tier = tier
        self.log = TransferLog(blocks.block_size)
        self._blocks = blocks
        self._pool = blocks.pool
        self._exported: dict[int, tuple[BlockTable, list[int]]] = {}
        """By number: the table of an exported sequence, without blocks, and its slots."""
        self._numbers = count()
        self._pool.on_evict = self._keep_evicted
        blocks.bring_in = self._bring_in
        blocks.transfers = self.log

    def continue_prefix(self, found: list[int], keys: Sequence[Key]) -> None:
        """Extend a found prefix by blocks in the host tier, as ``~slot``, and by blocks of the pool behind them."""
        for key in keys[len(found) :]:
            block = self._pool.find(key)
            if block is None:
                slot = self.tier.find(key)
                if slot is None:
                    return
                block = ~slot
            found.append(block)

    def export(self, seq: int) -> Exported | None:
        """Note the copies of a sequence's blocks to the host tier; None if it must stay. It keeps its blocks."""
        table, size = self._blocks.tables[seq], self._blocks.block_size
        slots = None if table.skipped else self.tier.hold(len(table.blocks))
        if slots is None:
            return None
        for block, slot in zip(table.blocks, slots, strict=True):
            self.log.add(self._blocks.copies.origin(block), slot, to_host=True)
        exported = Exported(int(table.length), state=next(self._numbers))
        left = BlockTable(table.content, table.plan)
        left.length, left.n_keyed = table.length, min(table.n_keyed, exported.tokens // size)
        self._exported[exported.state] = left, slots
        return exported

    def import_(self, seq: int, exported: Exported, upto: int, keep_free: int) -> None:
        """Bring an exported sequence back under this number. Raises ``OutOfCells`` where there is no room.

        ``upto``: it must have room for that many tokens. ``keep_free``: blocks that must stay free.
        """
        table, slots = self._exported[exported.state]
        size = self._blocks.block_size
        keys = table.content.keys(size, table.n_keyed)
        cached = [self._pool.find(key) for key in keys] + [None] * (len(slots) - len(keys))
        idle = sum(1 for block in cached if block is not None and self._pool.refs[block] == 0)
        need = cached.count(None) + idle + max(blocks_for(upto, size) - len(slots), 0) + keep_free
        if need > len(self._pool.free):
            raise OutOfCells(f"{need} blocks of {size} cells are needed, {len(self._pool.free)} are free")
        del self._exported[exported.state]
        self._pool.touch([block for block in cached if block is not None], table.plan.kind)
        fresh = iter(self._bring([slot for block, slot in zip(cached, slots, strict=True) if block is None]))
        table.blocks += [next(fresh) if block is None else block for block in cached]
        self._blocks.count_tokens(table, 0)
        self.tier.release(slots)
        table.seq, table.n_keyed = seq, 0
        self._blocks.tables[seq] = table
        self._blocks.cache_full_blocks(table, exported.tokens)

    def drop_export(self, exported: Exported) -> None:
        """Give up the slots of an exported sequence that will not come back."""
        self.tier.release(self._exported.pop(exported.state)[1])

    def fetch(self, content: Content, tokens: int, keep_free: int) -> list[Key]:
        """Bring a text's prefix from the host tier into free blocks, all of it or none.

        Returns the keys of the blocks that were brought. ``keep_free``: blocks that must stay free.
        """
        size = self._blocks.block_size
        keys = content.keys(size, (tokens - 1) // size)
        found = self._pool.leading(keys)
        self.continue_prefix(found, keys)
        brought = [key for key, block in zip(keys, found, strict=False) if block < 0]
        idle = sum(1 for block in found if block >= 0 and self._pool.refs[block] == 0)
        if not brought or len(brought) > len(self._pool.free) - idle - keep_free:
            return []
        table = BlockTable(content)
        self._blocks.attach(table, found)
        self._blocks.release(table, 0)
        return brought

    def settle(self) -> tuple[Transfer, ...]:
        """Hand over all copies between the tiers, which are then no longer due."""
        return self.log.settle()

    def _bring_in(self, found: Sequence[int], keys: Sequence[Key], kind: int) -> list[int]:
        """Replace each ``~slot`` by a block that it is copied to."""
        blocks = list(found)
        away = [at for at, block in enumerate(found) if block < 0]
        if away:
            slots = self.tier.pin([keys[at] for at in away])
            for at, block in zip(away, self._bring(slots), strict=True):
                self._pool.store(block, keys[at], kind)
                blocks[at] = block
            self.tier.unpin([keys[at] for at in away], slots)
        return blocks

    def _bring(self, slots: Sequence[int]) -> list[int]:
        """Take a block for each slot, and note the copies."""
        blocks = self._pool.take(len(slots))
        for block, slot in zip(blocks, slots, strict=True):
            self.log.add(block, slot, to_host=False)
        return blocks

    def _keep_evicted(self, block: int, key: Key) -> None:
        """Copy a cached block that is about to be handed out to the host tier, if there is room."""
        slot = self.tier.keep(key)
        if slot is not None:
            self.log.add(block, slot, to_host=True)
