"""A pool of blocks with reference counts and a cache of what they hold: vLLM's ``BlockPool``.

The order and the rules are those of vLLM 0.33.0 (``vllm/v1/core/block_pool.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
from policies.vocabulary import IntArray

NULL = 0
"""The block that stands for none in a block table."""


class BlockPool:
    """Blocks ``first .. n - 1``, free or in use by one or more sequences; full ones may be found by their key.

    Several blocks may hold the same; the one cached first is found.
    """

    def __init__(self, n: int, free: Callable[[range, BlockKeys], FreeBlocks], *, first: int = 1):
        self.n = n
        self.first = first
        self.keys: BlockKeys = [None] * n
        """Of each block: its key, while it can be found by it."""
        self._refs = array("i", bytes(4 * n))
        self._kept = True
        """Whether that is up to date; if not, nobody shares a block, and no block is cached."""
        self.free = free(range(first, n), self.keys)
        self.on_evict: Callable[[int, Key], None] | None = None
        """Called before a cached block is handed out for something else."""
        self.n_idle = 0
        """Free blocks that can be found."""
        self._more = 0
        """Of all blocks: how many sequences hold them besides the first."""
        self._found: dict[Key, int | dict[int, None]] = {}
        """By key the block, or the blocks in the order in which they were cached."""

    @property
    def refs(self) -> array[int]:
        """Of each block: how many sequences hold it."""
        refs = self._refs
        if not self._kept:
            refs[self.first :] = array("i", [1]) * (self.n - self.first)
            for block in self.free.order():
                refs[block] = 0
            self._kept = True
        return refs

    def holders(self, block: int) -> int:
        """How many sequences hold a block that is in use."""
        return self._refs[block] if self._kept else 1

    def free_extents(self) -> IntArray:
        """Lengths, in blocks, of the runs of blocks that nobody holds; shape (n_runs,)."""
        unused = np.frombuffer(self.refs, dtype=np.int32)[self.first :] == 0
        # Where the free become the used or the other way round: every second stretch in between is free.
        edges = (unused[1:] != unused[:-1]).nonzero()[0]
        borders = np.empty(len(edges) + 2, dtype=np.int64)
        borders[0], borders[1:-1], borders[-1] = -1, edges, len(unused) - 1
        return (borders[1:] - borders[:-1])[0 if unused[0] else 1 :: 2]

    def relax(self) -> None:
        """Let it not be kept up to date which blocks are in use, if nobody shares one: all that are not free are."""
        if not self._more and not self._found:
            self._kept = False

    @property
    def n_cached(self) -> int:
        """Different keys that can be found."""
        return len(self._found)

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` blocks with one reference each; what they held can no longer be found."""
        blocks = self.free.take(n)
        if not self._kept:
            return blocks
        refs, keys, on_evict = self._refs, self.keys, self.on_evict
        if not self._found:
            for block in blocks:
                refs[block] = 1
            return blocks
        found, evicted = self._found, 0
        for block in blocks:
            refs[block] = 1
            key = keys[block]
            if key is not None:
                if on_evict is not None:
                    on_evict(block, key)
                holds = found.pop(key)
                if holds == block:
                    keys[block] = None
                else:
                    found[key] = holds
                    self._drop(block, key)
                evicted += 1
        self.n_idle -= evicted
        return blocks

    def find(self, key: Key) -> int | None:
        """The block that holds this, or None."""
        found = self._found.get(key)
        return next(iter(found)) if isinstance(found, dict) else found

    def leading(self, keys: Iterable[Key]) -> list[int]:
        """The blocks that hold these, up to the first that is not there."""
        blocks = []
        found = self._found
        for key in keys:
            block = found.get(key)
            if block is None:
                break
            blocks.append(next(iter(block)) if isinstance(block, dict) else block)
        return blocks

    def trailing(self, keys: Sequence[Key], n: int) -> list[int]:
        """The last ``n`` blocks in a row that are there, behind ``NULL`` for all before them: what a window needs to
        see. Where there are no ``n`` in a row, the leading ones."""
        run: list[int] = []
        for at in range(len(keys) - 1, -1, -1):
            block = self.find(keys[at])
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) >= n:
                return [NULL] * at + run[::-1]
        return run[::-1]

    def touch(self, blocks: Iterable[int]) -> None:
        """One more sequence holds each of these cached blocks, which may be free."""
        refs, keys, free = self.refs, self.keys, self.free
        for block in blocks:
            if refs[block] == 0:
                free.remove(block)
                self.n_idle -= 1
            else:
                self._more += 1
            refs[block] += 1
            key = keys[block]
            if key is not None:
                free.hit(block, key)

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence holds each of these blocks, which are in use."""
        refs = self.refs
        for block in blocks:
            refs[block] += 1
            self._more += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """One sequence fewer holds each; returns those that nobody holds now, in order."""
        if not self._kept:
            self.free.release(blocks)
            return list(blocks)
        refs, keys, gone = self._refs, self.keys, list[int]()
        if not self._more:
            gone = list(blocks)
            for block in blocks:
                refs[block] = 0
            if self._found:
                self.n_idle += len(gone) - list(map(keys.__getitem__, gone)).count(None)
            self.free.release(gone)
            return gone
        for block in blocks:
            refs[block] -= 1
            if refs[block] == 0:
                gone.append(block)
                self.n_idle += keys[block] is not None
            else:
                self._more -= 1
        self.free.release(gone)
        return gone

    def store(self, block: int, key: Key) -> None:
        """The block is full; it can be found from now on."""
        if not self._kept:
            _ = self.refs
        self.keys[block] = key
        found = self._found.get(key)
        if found is None:
            self._found[key] = block
        elif isinstance(found, int):
            self._found[key] = {found: None, block: None}
        else:
            found[block] = None
        self.free.stored(block, key)

    def store_all(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """These blocks are full, in this order; those of them that cannot be found yet can be from now on."""
        if self.free.tracks_use or not self._found.keys().isdisjoint(keys):
            for block, key in zip(blocks, keys, strict=True):
                if self.keys[block] is None:
                    self.store(block, key)
            return
        own = self.keys
        for block, key in zip(blocks, keys, strict=True):
            own[block] = key
        self._found.update(zip(keys, blocks, strict=True))

    def forget(self, block: int, *, evicted: bool = True) -> None:
        """The block can no longer be found, whoever holds it. Not ``evicted``: it never held what its key says."""
        key = self.keys[block]
        if key is not None:
            if evicted and self.on_evict is not None:
                self.on_evict(block, key)
            self._drop(block, key)
            if self.refs[block] == 0:
                self.n_idle -= 1
                self.free.forget(block)

    def forget_all(self) -> bool:
        """Forget what every block holds; False, and nothing happens, while any is in use (vLLM's reset)."""
        if len(self.free) != self.n - self.first:
            return False
        for block, key in enumerate(self.keys):
            if key is not None:
                self.keys[block] = None
                self.free.forget(block)
        self._found.clear()
        self.n_idle = 0
        return True

    def _drop(self, block: int, key: Key) -> None:
        self.keys[block] = None
        found = self._found[key]
        if isinstance(found, int):
            del self._found[key]
            return
        del found[block]
        if len(found) == 1:
            self._found[key] = next(iter(found))
